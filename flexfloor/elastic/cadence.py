"""How many iterations lie between two sync points of an armed plan.

A meeting of all ranks costs a step several percent of its time, and most have nothing to decide. So the ranks meet at
every iteration only while something may change at any moment; otherwise at most every :data:`STRIDE` iterations, and
at the one in which a rank's token limits say that it is done. A rank that is done sooner is seen so much later; the
distance is a function of rows and world alone, so all ranks count the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from flexfloor.elastic.decision import World, complete
from flexfloor.elastic.vector import Row

STRIDE = 8
"""Most iterations between two sync points while ranks decode."""


def stride(world: World, rows: Sequence[Row], *, changed: bool = False) -> int:
    """Iterations until the next sync point.

    Args:
        world: what all ranks agree on.
        rows: all ranks' rows at this sync point.
        changed: this sync point has changed the world: the first step in it is confirmed at once.
    """
    if changed or not world.armed or world.gate or world.syncs < world.retry_at:
        return 1
    if any(row.pause or row.want_restore for row in rows):
        return 1
    left = [rows[rank].tokens_left for rank in world.members if not complete(rows[rank])]
    return max(1, min([STRIDE, *left])) if left else 1


class Pace:
    """One rank's count of iterations, the same on every rank.

    Attributes:
        iterations: since all ranks of the step could begin.
        passed: since the last sync point.
        coming: from the last sync point to the next.
    """

    def __init__(self) -> None:
        self.iterations, self.passed, self.coming = 0, 0, 1

    def begin(self) -> None:
        """A step begins."""
        self.iterations = 0

    def tick(self, world: World) -> bool:
        """An iteration is over; whether it ends with a sync point."""
        self.passed += 1
        self.iterations += world.armed and not world.gate
        return self.passed >= self.coming

    def met(self, world: World, rows: Sequence[Row], *, changed: bool) -> int:
        """A sync point is over; the iterations that led to it. See :func:`stride`."""
        passed, self.passed = self.passed, 0
        self.coming = stride(world, rows, changed=changed)
        return passed
