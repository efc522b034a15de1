"""What the ranks agreed to do in one transition, and who carries it out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from flexfloor.elastic.placement import Move
from flexfloor.elastic.vector import Row


@dataclass(frozen=True)
class Ticket:
    """One transition, identical on every rank.

    Attributes:
        serial: lock-step number of the transition; names groups and keys.
        before: members now.
        after: members of the next world.
        moves: expert rows to copy.
        maps: rank of ``after`` -> row of every expert (-1 where not active).
        woken: ranks whose released memory comes back in this transition.
        rebuild: ranks that must first rebuild the row-transfer channel (empty: none).
        deadline_s: how long any one wait inside the transition may last.
        load: most requests that a member has unfinished; no later decode batch of this step is larger.
        lean: only the decode graph that ``load`` needs is captured, smaller ones when the load has fallen to them.
        version: which weights every row in use holds.
        broken: survivors whose groups may be broken and are not used again once this is confirmed (empty: none).
    """

    serial: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    moves: tuple[Move, ...]
    maps: dict[int, list[int]] = field(default_factory=dict)
    woken: tuple[int, ...] = ()
    rebuild: tuple[int, ...] = ()
    deadline_s: float = 60.0
    load: int = 0
    lean: bool = False
    version: int = 0
    broken: tuple[int, ...] = ()


class Worker(Protocol):
    """The device side of a transition. Every method is called on every rank, in phase order.

    A method does what the rank's role asks for (survivor, leaver, bystander) and raises when
    it fails; the vote that follows tells the others.
    """

    def drain(self) -> None:
        """Take in the results of batches in flight (asynchronous scheduling); local, before a transition."""

    def prepare(self, ticket: Ticket) -> None:
        """Local checks and buffers; no collective."""

    def stage(self, ticket: Ticket) -> dict[str, float]:
        """Groups of the next world and rows copied into inactive rows; parts in seconds, moved_bytes."""

    def switch(self, ticket: Ticket) -> None:
        """Survivors point groups, maps and configuration at the next world; local."""

    def capture(self, ticket: Ticket) -> dict[str, Any]:
        """Survivors make the decode graphs of the next world ready, or one more of the present world."""

    def capture_wanted(self, load: int) -> int:
        """Size of the decode graph that a smaller world lacks for ``load`` requests a rank, 0 where it lacks none."""

    def trial(self, ticket: Ticket) -> None:
        """Survivors run one dummy step in the next world."""

    def undo(self, ticket: Ticket) -> None:
        """Back to the world before; called on every rank when any phase failed.

        Memory that ``wake`` brought back stays: the next attempt finds it awake and fills it.
        """

    def confirm(self, ticket: Ticket) -> None:
        """The next world is the world; what only ``undo`` needed may go."""

    def park(self) -> None:
        """Start giving memory back, off the core loop."""

    def park_report(self) -> dict[str, Any] | None:
        """None while memory is being given back, else released_bytes, start, end or error."""

    def wake(self, ticket: Ticket) -> None:
        """Ranks in ``ticket.woken`` get their memory back; local."""

    def start_wake(self) -> None:
        """Start getting this rank's memory back, off the core loop; ``wake`` waits for the rest."""

    def wake_seconds(self) -> float:
        """How long this rank's memory took to come back the last time; 0 before the first."""

    def refill(self, ticket: Ticket) -> dict[str, float]:
        """Weights of ``ticket.woken`` and moved rows come from their peers; joint."""

    def switch_back(self, ticket: Ticket) -> None:
        """Every rank points at the full world; local."""

    def loaded(self, version: int) -> None:
        """New weights are in the rows of the full world, the other rows hold nothing; local."""


class Exchange(Protocol):
    """All ranks' rows from this rank's row: one all-reduce over the full world."""

    def __call__(self, row: Row) -> list[Row]:
        """Blocks until every rank of the full world has called it."""
