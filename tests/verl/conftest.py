"""Tests of the verl integration: those marked ``verl`` start stock verl on CPU, the others take seconds."""

import pytest

pytest.importorskip("verl", reason="verl is not installed: pip install 'flexfloor[verl]'")
