"""The status board: one small mapped file that every rank writes its own line of.

It is readable at any time without asking an engine: the server keeps late requests away
from parked ranks with it, and the watchdog names rank and phase of a process that died.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

from flexfloor.elastic.states import Phase, RankState

_LINE = struct.Struct("<8q")


class Status(NamedTuple):
    """One rank's line.

    Attributes:
        state: see :class:`RankState`.
        phase: see :class:`Phase`.
        world: size of the EP group the rank last agreed on.
        serial: number of the last transition.
        epoch: epoch of the installed plan.
        step: step of the installed plan.
        beat_ns: CLOCK_MONOTONIC of the last sign of life, nanoseconds.
        pid: process id.
    """

    state: RankState
    phase: Phase
    world: int
    serial: int
    epoch: int
    step: int
    beat_ns: int
    pid: int


class Board:
    """N lines in a file; each rank writes one, anyone reads all.

    Args:
        path: the file; created with ``ranks`` empty lines when missing, lengthened when too short. It is never
            emptied: other processes may have mapped it already.
        ranks: N.
    """

    def __init__(self, path: str | Path, ranks: int) -> None:
        self.path, self.ranks = Path(path), ranks
        self.path.parent.mkdir(parents=True, exist_ok=True)
        size = _LINE.size * ranks
        with open(self.path, "r+b", opener=_create) as file:
            if os.fstat(file.fileno()).st_size < size:
                os.ftruncate(file.fileno(), size)
            self._map = mmap.mmap(file.fileno(), size)

    def write(self, rank: int, status: Status) -> None:
        """Replace the line of ``rank`` (called by its own process only).

        In one copy of 64 aligned bytes: a reader may meet fields of two writes, never an empty line or half a number
        (``pack_into`` would blank the line first).
        """
        self._map[rank * _LINE.size : (rank + 1) * _LINE.size] = _LINE.pack(*status)

    def read(self, rank: int) -> Status:
        """The line of ``rank``; a rank that never wrote reads FULL in START."""
        state, phase, *rest = _LINE.unpack(self._map[rank * _LINE.size : (rank + 1) * _LINE.size])
        return Status(RankState(state), Phase(phase), *rest)

    def read_all(self) -> list[Status]:
        """All lines, rank 0 first."""
        return [self.read(rank) for rank in range(self.ranks)]

    def parked(self) -> set[int]:
        """Ranks that serve nothing now."""
        away = (RankState.DETACHING, RankState.PARKED, RankState.LEASED)
        return {rank for rank, status in enumerate(self.read_all()) if status.state in away}

    def close(self) -> None:
        """Unmap the file; the file itself stays for whoever reads it last."""
        self._map.close()


def _create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o644)


def beat() -> int:
    """Now, as written to the board (nanoseconds of the monotonic clock, shared by a host's processes)."""
    return time.monotonic_ns()
