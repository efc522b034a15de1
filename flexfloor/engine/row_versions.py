"""Which version of the weights each expert row of this rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flexfloor.elastic.placement import Move
from flexfloor.errors import ProtocolError

NOTHING = -1
"""The row holds no weights."""


class RowVersions:
    """A record of what was written, kept beside the rows; every use of a row is checked against it.

    Args:
        rank: this rank.
        primary: rows of the full world, the first ones.
        capacity: all rows of a layer.
    """

    def __init__(self, rank: int, primary: int, capacity: int) -> None:
        self._rank, self._primary, self._capacity = rank, primary, capacity
        self._held = [NOTHING] * capacity
        self.loaded(0)

    def held(self) -> list[int]:
        """The version of each row, ``NOTHING`` where it holds none."""
        return list(self._held)

    def loaded(self, version: int) -> None:
        """The rows of the full world hold ``version``, the others nothing."""
        self._held = [version if row < self._primary else NOTHING for row in range(self._capacity)]

    def lost(self) -> None:
        """No row holds anything (released, or written by somebody who has not yet said what)."""
        self._held = [NOTHING] * self._capacity

    def lost_from(self, row: int) -> None:
        """``row`` and all after it hold nothing (their memory went)."""
        self._held[row:] = [NOTHING] * (self._capacity - row)

    def check(self, rows: Iterable[int], version: int) -> None:
        """Raise ProtocolError unless all of ``rows`` hold ``version``."""
        for row in rows:
            if self._held[row] != version:
                held = "no weights" if self._held[row] == NOTHING else f"weights of version {self._held[row]}"
                raise ProtocolError(f"row {row} of rank {self._rank} holds {held}, not of version {version}")

    def check_world(self, version: int) -> None:
        """`check` for the rows of the full world."""
        self.check(range(self._primary), version)

    def check_sources(self, moves: Sequence[Move], version: int) -> None:
        """`check` for the rows that this rank sends."""
        self.check((move.source_row for move in moves if move.source == self._rank), version)

    def leave(self, moves: Sequence[Move]) -> None:
        """A transfer begins: the rows that it fills on this rank hold nothing until it is over."""
        self._write(moves, NOTHING)

    def arrive(self, moves: Sequence[Move], version: int) -> None:
        """The transfer is over."""
        self._write(moves, version)

    def _write(self, moves: Sequence[Move], version: int) -> None:
        for move in moves:
            if move.target == self._rank:
                self._held[move.target_row] = version
