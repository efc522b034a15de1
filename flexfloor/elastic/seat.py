"""What one rank knows of the world, and the moves that transitions make with it."""

from __future__ import annotations

from functools import partial
from typing import Any

from flexfloor.elastic.ballot import Ballot
from flexfloor.elastic.cadence import Pace
from flexfloor.elastic.decision import World
from flexfloor.elastic.early_wake import EarlyWake
from flexfloor.elastic.parking import Parking
from flexfloor.elastic.placement import Move, Placement
from flexfloor.elastic.states import Phase, RankState, moved
from flexfloor.elastic.step import Step
from flexfloor.elastic.ticket import Ticket, Worker
from flexfloor.errors import TransitionError


class Seat:
    """One rank's state between and during transitions.

    Args:
        size: ranks N of the full world.
        placement: the full world's expert placement.
        worker: the device side.
        ballot: the way to the other ranks.
        deadline_s: longest wait inside a transition.

    Attributes:
        world: what all ranks agree on.
        placement: contents of all ranks' expert rows now; ``base`` is the full world's.
        state: this rank's state.
        step: the installed step, None between steps.
        asleep: ranks of the full world whose memory is released (after a topology restore).
        leaving: this rank has left the world and waits for the survivors' first step.
        pace: its count of iterations.
        unproven: this rank has not made its first step in the present world.
        committed: the stage_commit event to write after that first step.
        channel_broken: the row-transfer channel failed and is rebuilt by the next ticket.
        restore_attempts: failed restores since the last one that worked.
        version: which weights the engines hold.
    """

    def __init__(
        self, size: int, placement: Placement, worker: Worker, ballot: Ballot, *, deadline_s: float = 60.0
    ) -> None:
        self.rank = ballot.rank
        self.world = World(size, list(range(size)))
        self.base, self.placement = placement.clone(), placement
        self.state = RankState.FULL
        self.step: Step | None = None
        self.asleep: set[int] = set()
        self.worker, self.ballot = worker, ballot
        self.parking = Parking(ballot, worker)
        self.early_wake = EarlyWake(ballot, worker)
        self.leaving = self.unproven = False
        self.committed: dict[str, Any] | None = None
        self.channel_broken = False
        self.restore_attempts = 0
        self.serial = 0
        self.pace = Pace()
        self.version = 0
        self._deadline_s = deadline_s
        ballot.of(self)

    def shown(self) -> tuple[RankState, int, int, int, int]:
        """State, world size, transition serial, epoch and step for the board (-1: no step)."""
        epoch, step = (-1, -1) if self.step is None else (self.step.epoch, self.step.step)
        return self.state, len(self.world.members), self.serial, epoch, step

    def go(self, state: RankState) -> None:
        """Change this rank's state; ProtocolError when the move is illegal."""
        self.state = moved(self.state, state)

    def ticket(self, after: list[int], moves: list[Move], maps: dict[int, list[int]]) -> Ticket:
        """The next ticket; its serial is the same on every rank."""
        self.serial += 1
        return Ticket(
            serial=self.serial,
            before=tuple(self.world.members),
            after=tuple(after),
            moves=tuple(moves),
            maps=maps,
            rebuild=tuple(range(self.world.size)) if self.channel_broken else (),
            deadline_s=self._deadline_s,
            version=self.version,
        )

    def undo(self, ticket: Ticket, what: str) -> None:
        """Undo a ticket on every rank; ``what`` names it in the error.

        Raises:
            TransitionError: a rank could not.
        """
        lost, _ = self.ballot.carry_out(Phase.ROLLBACK, partial(self.worker.undo, ticket))
        if lost:
            raise TransitionError(lost[0], Phase.ROLLBACK.label, f"{what} could not be undone")

    def restored(self, target: Placement, asleep: list[int]) -> None:
        """The full world stands again."""
        self.placement = target
        self.world.members = list(range(self.world.size))
        self.world.attempts.clear()
        self.asleep = set(asleep)
        self.go(RankState.MEMBER)
        self.early_wake.reset()
        self.channel_broken = False
        self.restore_attempts = 0
