"""Tests of the verl integration: those marked ``verl`` start stock verl on CPU, the others take seconds."""

import importlib.util

import pytest

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed: pip install 'flexfloor[verl]'", allow_module_level=True)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """verl is imported inside of tests only, always for this machine's CPU."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
