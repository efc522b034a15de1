"""Ladders, quotas and shrink schedules, best release area first (planner.md section 5; seed 001, equation 10).

The times of a schedule are micro-tokens. A schedule whose quotas cannot be met rules out every schedule that is
nowhere later, so the search asks for few proofs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import le

import numpy as np

from flexfloor.planner.admission import fits_in
from flexfloor.planner.demand import Demand, IntArray
from flexfloor.planner.layout import group_sizes


@dataclass(frozen=True)
class Ladder:
    """EP sizes of a plan, strictly decreasing, the world size first."""

    sizes: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """Ranks N of the full world."""
        return self.sizes[0]

    @property
    def floor(self) -> int:
        """Smallest size."""
        return self.sizes[-1]

    @property
    def quotas(self) -> tuple[int, ...]:
        """Completed ranks N - f_s that each stage needs."""
        return tuple(self.world_size - size for size in self.sizes[1:])

    @property
    def releases(self) -> tuple[int, ...]:
        """Ranks f_{s-1} - f_s that each stage releases."""
        return tuple(large - small for large, small in zip(self.sizes, self.sizes[1:], strict=False))

    def area(self, times: Sequence[int], tail: int) -> int:
        """Release area of quorum ``times``, micro-token-ranks."""
        return sum(ranks * (tail - time) for ranks, time in zip(self.releases, times, strict=True))

    def times(self, completions: Sequence[int]) -> tuple[int, ...]:
        """Quorum times that groups with these completions reach.

        Args:
            completions: one a rank, ascending, micro-tokens.
        """
        return tuple(completions[quota - 1] for quota in self.quotas)


def ladder_to(floor: int, candidates: Sequence[int]) -> Ladder:
    """The ladder with every candidate size from the largest down to ``floor``."""
    return Ladder(tuple(size for size in sorted(candidates, reverse=True) if size >= floor))


def earliest_times(
    demand: Demand, ladder: Ladder, capacity: int, ranks_needed: IntArray | None = None
) -> tuple[int, ...] | None:
    """Times that no grouping can beat, stage by stage.

    Prompts later than the time of a stage live in at most f_s groups. So they must not be too many for f_s groups,
    must fit there (`fits_in`), and no f_s + 1 of them may exclude each other.

    Args:
        demand: the step.
        ladder: the ladder.
        capacity: KV tokens of a rank.
        ranks_needed: at index k, the least number of ranks that hold the k longest prompts (`PairCover.ranks`).

    Returns:
        Micro-tokens, one a stage, ascending; None where no grouping is KV-safe.
    """
    count = len(demand)
    sizes = group_sizes(count, ladder.world_size)
    if ranks_needed is not None and ranks_needed[count] > ladder.world_size:
        return None
    if not fits_in(demand, slice(0, count), ladder.world_size, capacity):
        return None
    bounds: list[int] = []
    for floor, quota in zip(ladder.sizes[1:], ladder.quotas, strict=True):
        low = sum(sizes[:quota])
        if ranks_needed is not None:
            low = max(low, count - int(np.flatnonzero(ranks_needed <= floor)[-1]))
        high = count
        while low < high:
            middle = (low + high) // 2
            if fits_in(demand, slice(middle, count), floor, capacity):
                high = middle
            else:
                low = middle + 1
        time = int(demand.completions[low - 1]) if low else 0
        bounds.append(max(time, bounds[-1] if bounds else 0))
    return tuple(bounds)


class ScheduleSearch:
    """Schedules of one ladder in descending release area.

    Usage: take `best`, test it, and `reject` it when its quotas cannot be met. `bound` is a proven upper bound on
    the area of every schedule that is left.

    Args:
        demand: the step.
        ladder: the ladder.
        earliest: times of `earliest_times`.
    """

    def __init__(self, demand: Demand, ladder: Ladder, earliest: Sequence[int]) -> None:
        self._ladder, self._tail = ladder, demand.tail
        self._grid = [0, *np.unique(demand.completions).tolist()] if len(demand) else [0]
        first = tuple(self._grid.index(time) for time in earliest)
        self._queue = [self._entry(first)]
        self._seen = {first}
        self._rejected: list[tuple[int, ...]] = []

    def _entry(self, index: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        return (-self._ladder.area([self._grid[i] for i in index], self._tail), index)

    @property
    def best(self) -> tuple[int, ...] | None:
        """Quorum times of the best schedule left, micro-tokens; None when all are ruled out."""
        while self._queue:
            index = self._queue[0][1]
            ruling = next((no for no in self._rejected if all(map(le, index, no))), None)
            if ruling is None:
                return tuple(self._grid[i] for i in index)
            heapq.heappop(self._queue)
            for later in self._beyond(index, ruling):
                if later not in self._seen:
                    self._seen.add(later)
                    heapq.heappush(self._queue, self._entry(later))
        return None

    @property
    def bound(self) -> int:
        """No schedule left has a larger area, micro-token-ranks; 0 when none is left."""
        return -self._queue[0][0] if self.best is not None else 0

    def reject(self, times: Sequence[int]) -> None:
        """Rules out ``times`` and all schedules that are nowhere later."""
        self._rejected.append(tuple(self._grid.index(time) for time in times))

    def later(self, time: int, steps: int) -> int:
        """The completion ``steps`` distinct completions after ``time``, or the last one."""
        return self._grid[min(self._grid.index(time) + steps, len(self._grid) - 1)]

    def _beyond(self, index: tuple[int, ...], ruling: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """The earliest schedules from ``index`` on that are later than ``ruling`` in one stage."""
        for stage, no in enumerate(ruling):
            if no + 1 < len(self._grid):
                yield (*index[:stage], *(max(i, no + 1) for i in index[stage:]))
