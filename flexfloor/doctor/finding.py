"""One thing that was looked at."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    """``missing``: nothing runs without it; ``warning``: it runs, but look at it."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"


class Finding(NamedTuple):
    """One thing that was looked at.

    Attributes:
        area: packages, devices, options, network or memory.
        name: what was looked at.
        state: how it stands.
        found: what was found.
        remedy: what to do; empty where nothing is to be done.
    """

    area: str
    name: str
    state: State
    found: str
    remedy: str = ""


def ok(area: str, name: str, found: str) -> Finding:
    """It is there."""
    return Finding(area, name, State.OK, found)


def missing(area: str, name: str, found: str, remedy: str) -> Finding:
    """It is required and not there."""
    return Finding(area, name, State.MISSING, found, remedy)


def warning(area: str, name: str, found: str, remedy: str) -> Finding:
    """It is not required, or cannot be told for certain."""
    return Finding(area, name, State.WARNING, found, remedy)
