"""Decode graphs one at a time: a shrink captures the one that it needs, smaller ones follow as the load falls.

In verification mode a worker captures all of them at the shrink, and lacks none here.
A transition so waits for one capture; until a smaller graph is there, a smaller batch is padded to the present one.
All ranks see from the rows when every member lacks the same graph, and vote on its capture like on any phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from flexfloor.elastic.restoring import restore
from flexfloor.elastic.seat import Seat
from flexfloor.elastic.states import Phase
from flexfloor.elastic.vector import Row

PATIENCE = 4
"""Iterations for which a smaller graph must have been of use: a load that falls fast passes sizes by."""


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

    def wish(self, passed: int) -> int:
        """What this rank tells the others: the graph it lacks, 0 for none.

        Args:
            passed: iterations since the last sync point.
        """
        self._since += passed
        return self._wanted if self._since >= PATIENCE else 0

    def learn(self, rows: Sequence[Row]) -> None:
        """The members' load, from the rows of a sync point, and the graph that it lacks."""
        self._load = self._largest(rows)
        wanted = self._lacking(self._load)
        if wanted != self._wanted:
            self._wanted, self._since = wanted, 0

    def _largest(self, rows: Sequence[Row]) -> int:
        return max(rows[rank].unfinished for rank in self._seat.world.members)

    def _lacking(self, load: int) -> int:
        """The worker's answer, asked again only after a transition or another load."""
        world = self._seat.world
        if not world.armed or len(world.members) == world.size or self._seat.rank not in world.members:
            return 0
        if not load or self._off:
            return 0
        now = (load, self._seat.serial)
        if self._asked != now:
            self._asked, self._answer = now, self._seat.worker.capture_wanted(load)
        return self._answer

    def due(self, rows: Sequence[Row]) -> bool:
        """Every member lacks the same graph, and the load has not halved since; the same answer on all ranks."""
        wishes = {rows[rank].capture for rank in self._seat.world.members}
        if len(wishes) > 1 or 0 in wishes or any(row.pause for row in rows):
            return False
        return 2 * self._largest(rows) > self._load

    def carry_out(self) -> None:
        """Capture it; where that fails the step goes on with the graphs it has, without such captures.

        A capture is joint. Members that waited for one in vain cannot meet over their groups again: the full world,
        whose groups have not been touched, is restored, and a new shrink makes new ones.

        Raises:
            TransitionError: the full world could not be restored.
        """
        seat = self._seat
        ticket = replace(seat.ticket(list(seat.world.members), [], {}), load=self._load, lean=True)
        failed, parts = seat.ballot.carry_out(Phase.CAPTURE, partial(seat.worker.capture, ticket))
        self._wanted = self._since = 0
        if failed:
            self._off = True
            if seat.rank == ticket.before[0]:
                reason = f"no smaller decode graph: rank {failed[0]} failed in {Phase.CAPTURE.label}"
                seat.ballot.emit("plan_skipped", stage=len(ticket.after), reason=reason)
            if len(ticket.after) > 1 and set(failed) & set(ticket.after):
                while len(seat.world.members) != seat.world.size:
                    restore(seat, "full", "a joint capture failed", broken=True)
        elif seat.rank in ticket.after:
            seat.ballot.emit("capture_end", sizes=list(parts.get("captured", [])), seconds=parts[Phase.CAPTURE.label])
