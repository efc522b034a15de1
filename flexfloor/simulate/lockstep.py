"""From what each rank does to what the world does: compositions by iteration, and the largest of them."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from flexfloor.simulate.batching import RankTrace


class Change(NamedTuple):
    """A rank's new composition; ``preempted`` is the index of its first preemption that is not over."""

    rank: int
    decode: int
    prefill: int
    context: int
    preempted: int


class Batches:
    """One number a rank: the largest of them and their sum, under changes."""

    def __init__(self, ranks: int) -> None:
        self.of = [0] * ranks
        self._count = Counter({0: ranks})
        self._heap = [0]
        self.total = 0

    def put(self, rank: int, value: int) -> None:
        """A rank's new number."""
        self._count[self.of[rank]] -= 1
        self.total += value - self.of[rank]
        self.of[rank] = value
        self._count[value] += 1
        heapq.heappush(self._heap, -value)

    def largest(self) -> int:
        """The largest number of any rank."""
        while self._count[-self._heap[0]] <= 0:
            heapq.heappop(self._heap)
        return -self._heap[0]


def changes_of(traces: Sequence[RankTrace]) -> dict[int, list[Change]]:
    """What changes, by the iteration that it changes in."""
    found: dict[int, list[Change]] = {}
    for rank, trace in enumerate(traces):
        starts = [lost.iteration for lost in trace.preemptions]
        for phase in trace.phases:
            row = Change(rank, phase.decode, phase.prefill, phase.context, bisect_left(starts, phase.start))
            found.setdefault(phase.start, []).append(row)
    return found


def sampled(trace: RankTrace, count: int = 32) -> list[int]:
    """Decoding requests at up to ``count`` evenly spaced iterations."""
    ends = [phase.end for phase in trace.phases]
    step = max(1, trace.end // count)
    at = (min(bisect_left(ends, i + 1), len(ends) - 1) for i in range(0, trace.end, step))
    return [trace.phases[index].decode for index in at]
