"""Decode graphs one at a time: a shrink captures the one that it needs, smaller ones follow as the load falls.

A transition so waits for one capture; until a smaller graph is there, a smaller batch is padded to the present one.
All ranks see from the rows when every member lacks the same graph, and vote on its capture like on any phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from flexfloor.elastic.seat import Seat
from flexfloor.elastic.states import Phase
from flexfloor.elastic.vector import Row

PATIENCE = 4
"""Sync points for which a smaller graph must have been of use: a load that falls fast passes sizes by."""


class Recapture:
    """What one rank lacks, and for how long.

    Args:
        seat: this rank's state.
    """

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._load, self._wanted, self._since = 0, 0, 0
        self._asked: tuple[int, int] | None = None
        self._answer = 0
        self._off = False

    def begin(self) -> None:
        """A step begins."""
        self._load = self._wanted = self._since = 0
        self._off = False

    def wish(self) -> int:
        """What this rank tells the others: the graph it lacks, 0 for none."""
        world = self._seat.world
        small = world.armed and len(world.members) < world.size and self._seat.rank in world.members
        wanted = self._lacking() if small and self._load and not self._off else 0
        self._since = self._since + 1 if wanted == self._wanted else 0
        self._wanted = wanted
        return wanted if self._since >= PATIENCE else 0

    def _lacking(self) -> int:
        """The worker's answer, asked again only after a transition or another load."""
        now = (self._load, self._seat.serial)
        if self._asked != now:
            self._asked, self._answer = now, self._seat.worker.capture_wanted(self._load)
        return self._answer

    def learn(self, rows: Sequence[Row]) -> None:
        """The members' load, from the rows of a sync point."""
        self._load = max(rows[rank].unfinished for rank in self._seat.world.members)

    def due(self, rows: Sequence[Row]) -> bool:
        """Every member lacks the same graph and no batch is in flight."""
        wishes = {rows[rank].capture for rank in self._seat.world.members}
        return len(wishes) == 1 and 0 not in wishes and not any(row.busy or row.pause for row in rows)

    def carry_out(self) -> None:
        """Capture it; where that fails the step goes on with the graphs it has."""
        seat = self._seat
        ticket = replace(seat.ticket(list(seat.world.members), [], {}), load=self._load, lean=True)
        failed, parts = seat.ballot.carry_out(Phase.CAPTURE, partial(seat.worker.capture, ticket))
        self._wanted = self._since = 0
        if failed:
            self._off = True
            if seat.rank == ticket.before[0]:
                reason = f"no smaller decode graph: rank {failed[0]} failed in {Phase.CAPTURE.label}"
                seat.ballot.emit("plan_skipped", stage=len(ticket.after), reason=reason)
        elif seat.rank in ticket.after:
            seat.ballot.emit("capture_end", sizes=list(parts.get("captured", [])), seconds=parts[Phase.CAPTURE.label])
