"""A parked rank's memory comes back while the survivors decode their last tokens.

A full restore waits for the leavers' memory; begun in time, the wait is over when the last token is. Each parked rank
judges for itself, by its own clock: waking changes nothing that another rank uses, so nothing has to be agreed. What
the survivors can still give is known from their requests' token limits. Where requests end sooner, the restore waits
for what is missing, at worst for all of it, as it would have without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from flexfloor.elastic.ballot import Ballot
from flexfloor.elastic.ticket import Worker
from flexfloor.elastic.vector import Row

SAMPLES = 3
"""Intervals between sync points that tell how long an iteration takes: the newest, because the load only falls."""

MARGIN = 1.25
"""How much earlier than needed, for iterations that get shorter still: a wake that comes late keeps all ranks waiting,
one that comes early occupies one."""


class EarlyWake:
    """One rank's judgement, from its parking to its return.

    Args:
        ballot: events and clock of the rank.
        worker: the device side.
    """

    def __init__(self, ballot: Ballot, worker: Worker) -> None:
        self._ballot, self._worker = ballot, worker
        self._met: deque[tuple[float, int]] = deque(maxlen=SAMPLES + 1)
        self._takes: float | None = None
        self.begun = False

    def forget(self) -> None:
        """Something other than decoding took time: how long an iteration takes is learnt anew."""
        self._met.clear()

    def reset(self) -> None:
        """The rank has parked, or the full world stands again."""
        self._met.clear()
        self._takes = None
        self.begun = False

    def follow(self, left: int | None, passed: int, coming: int) -> None:
        """Begin when at the next sync point the survivors' last tokens would take less time than the memory.

        Args:
            left: see :func:`tokens_left`.
            passed: iterations since the last sync point.
            coming: iterations until the next one.
        """
        self._met.append((self._ballot.clock(), passed))
        if self.begun or left is None or len(self._met) <= SAMPLES:
            return
        if self._takes is None:
            self._takes = self._worker.wake_seconds()
        (first, _), *later = self._met
        iteration_s = (later[-1][0] - first) / sum(count for _, count in later)
        if (left - coming) * iteration_s < self._takes * MARGIN:
            self.begun = True
            self._ballot.emit("wake_start")
            self._worker.start_wake()


def tokens_left(rows: Sequence[Row], members: Sequence[int]) -> int | None:
    """Most iterations until the step is complete; None where it may last longer: something may still come.

    Args:
        rows: all ranks' rows.
        members: ranks of the present world.
    """
    if any(row.open or not row.closed or row.received < row.expected for row in rows):
        return None
    return max(rows[rank].tokens_left for rank in members)
