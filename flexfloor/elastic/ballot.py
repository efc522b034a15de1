"""Meeting the other ranks: rows exchanged, phases run and voted on, the board kept.

Invariant: every rank calls :meth:`Ballot.meet` the same number of times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Protocol

from flexfloor.elastic.board import Board, Status, beat
from flexfloor.elastic.faults import FaultPlan
from flexfloor.elastic.states import Phase, RankState
from flexfloor.elastic.ticket import Exchange
from flexfloor.elastic.vector import Row
from flexfloor.errors import PeerLostError, ProtocolError, TransitionError

DONE, WAITED, FAILED = 1, -1, -2
"""Votes: done; failed because another rank did not come; failed by this rank's own fault."""

Act = Callable[[], dict[str, Any] | None]


class Emit(Protocol):
    """Writes one event (see the ledger specification)."""

    def __call__(self, event: str, **fields: Any) -> None:
        """Append ``event`` with its fields."""


class Shown(Protocol):
    """What the board shows of a rank."""

    def shown(self) -> tuple[RankState, int, int, int, int]:
        """State, world size, transition serial, epoch, step."""


class Ballot:
    """One rank's way to agree with the others.

    Args:
        rank: this rank.
        exchange: the all-reduce of one row over the full world.
        emit: the event writer.
        board: the status board.
        faults: faults to inject (tests).
        clock: seconds, as stamped on events.
    """

    def __init__(
        self,
        rank: int,
        exchange: Exchange,
        emit: Emit,
        board: Board,
        faults: FaultPlan,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.rank, self.emit, self.clock = rank, emit, clock
        self.phase = Phase.START
        self._exchange, self._board, self.faults = exchange, board, faults
        self._shown: Shown | None = None

    def of(self, shown: Shown) -> None:
        """Whose state the board shows from now on."""
        self._shown = shown
        self.show(Phase.IDLE)

    def show(self, phase: Phase) -> None:
        """Write this rank's line of the board."""
        self.phase = phase
        if self._shown is not None:
            state, world, serial, epoch, step = self._shown.shown()
            self._board.write(self.rank, Status(state, phase, world, serial, epoch, step, beat(), os.getpid()))

    def enter(self, phase: Phase) -> None:
        """Mark a phase on the board, then strike the faults planned for it."""
        self.show(phase)
        self.faults.enter(phase)

    def meet(self, row: Row) -> tuple[list[Row], float]:
        """All rows, and how long it took to get them, seconds."""
        self.show(self.phase)  # a sign of life: who waits here is not the one that hangs
        began = self.clock()
        rows = self._exchange(row)
        return rows, self.clock() - began

    def carry_out(self, phase: Phase, act: Act) -> tuple[list[int], dict[str, Any]]:
        """Run ``act`` here, then learn where it failed.

        Returns:
            The ranks that failed, those at fault before those that only waited for them (empty: go
            on), and what ``act`` returned with the phase's own
            duration in seconds under the phase's name.

        Raises:
            ProtocolError: the ranks are not in the same phase.
        """
        parts: dict[str, Any] = {}
        vote = DONE
        began = self.clock()
        try:
            self.enter(phase)
            parts = dict(act() or {})
        except Exception as error:  # noqa: BLE001 - any failure of a phase becomes a vote
            vote = WAITED if isinstance(error, PeerLostError) else FAILED
            self.fault(phase, error)
        parts.setdefault(phase.label, self.clock() - began)
        rows, _ = self.meet(Row(vote=vote, phase=int(phase)))
        astray = [rank for rank, row in enumerate(rows) if row.phase != phase]
        if astray:
            raise ProtocolError(f"ranks {astray} are not in phase {phase.label}")
        failed = [rank for rank, row in enumerate(rows) if row.vote < 0]
        return sorted(failed, key=lambda rank: (rows[rank].vote, rank)), parts

    def conclude(self, phase: Phase, act: Callable[[], None]) -> None:
        """Run what cannot be undone any more.

        Raises:
            TransitionError: ``act`` failed; names this rank and the phase.
        """
        try:
            self.enter(phase)
            act()
        except Exception as error:
            self.fault(phase, error)
            raise TransitionError(self.rank, phase.label, str(error)) from error

    def fault(self, phase: Phase, what: Exception | str) -> None:
        """Record a failure on this rank."""
        text = what if isinstance(what, str) else f"{type(what).__name__}: {what}"
        self.emit("fault", where=phase.label, what=text)
