"""Groupings of steps too large for an exact model: pooled longest-processing-time packing.

The method: every stage of the ladder is a class of ranks. From the final survivors down, a class takes the longest
prompts that are left, and the quota before it completes when the longest prompt outside it does. Inside a class
neighbours share a rank; where their KV peak is too high, ever more neighbouring ranks are pooled and their prompts
are dealt by longest processing time first (Graham 1969; the vector form of bin packing's balanced fit), the load of
a rank being its active-token profile. Where pooling the whole class fails, the class takes fewer of the longest
prompts and fills up with the shortest. `schedule.earliest_times` bounds what any grouping could reach, so the
distance to the optimum is proven, not guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from flexfloor.planner.admission import fits_in, group_need
from flexfloor.planner.demand import Demand, IntArray
from flexfloor.planner.layout import group_sizes
from flexfloor.planner.matching import Group
from flexfloor.planner.schedule import Ladder

_THRESHOLDS = 48
"""Lengths at which the active-token profile of a rank is sampled while prompts are dealt."""
_SWAPS = 200
"""Most swaps tried to mend one pool after its prompts have been dealt."""


class Packer:
    """Packs the prompts of one step into ranks of a given KV capacity.

    Args:
        demand: the step.
        world_size: N.
    """

    def __init__(self, demand: Demand, world_size: int) -> None:
        self._demand, self._world_size = demand, world_size
        rows = demand.rows
        grid = np.quantile(rows, np.linspace(0, 1, _THRESHOLDS), method="higher") if rows.size else np.zeros(1)
        self._grid = np.unique(grid).astype(np.int64)
        self._profile = (rows[:, :, None] >= self._grid).sum(axis=1) * self._grid
        self._solo = self._profile.max(axis=1) + demand.prompts if len(demand) else np.zeros(0, dtype=np.int64)

    def pack(self, ladder: Ladder, capacity: int) -> list[Group] | None:
        """A KV-safe grouping that aims at early quotas of ``ladder``.

        Returns:
            N groups, or None where none was found (which proves nothing).
        """
        sizes = group_sizes(len(self._demand), self._world_size)
        left = list(range(len(self._demand)))
        groups: list[Group] = []
        edges = [*ladder.quotas[::-1], 0]
        upper = self._world_size
        for lower in edges:
            found = self._take_class(left, sizes[lower:upper], capacity, last=lower == 0)
            if found is None:
                return self._pool(list(range(len(self._demand))), sizes, capacity)
            groups.extend(found)
            used = {member for group in found for member in group}
            left = [member for member in left if member not in used]
            upper = lower
        return groups

    def balanced(self) -> list[Group]:
        """A grouping with a small worst KV peak, for a step that fits at no capacity."""
        return self._deal(list(range(len(self._demand))), group_sizes(len(self._demand), self._world_size), 0)

    def _take_class(self, left: list[int], sizes: list[int], capacity: int, *, last: bool) -> list[Group] | None:
        """Groups of one class; takes as many of the longest prompts as fit."""
        total = sum(sizes)
        whole = self._pool(left[len(left) - total :], sizes, capacity)
        if whole is not None or last:
            return whole
        low, high, best = 0, total, None
        while high - low > 1:
            longest = (low + high) // 2
            members = left[: total - longest] + left[len(left) - longest :]
            found = self._pool(members, sizes, capacity)
            if found is None:
                high = longest
            else:
                low, best = longest, found
        return best

    def _pool(self, members: list[int], sizes: list[int], capacity: int) -> list[Group] | None:
        """Neighbours share a rank; unsafe ranks are pooled with ever more neighbours."""
        starts = np.cumsum([0, *sizes]).tolist()
        groups = [tuple(members[a:b]) for a, b in pairwise(starts)]
        safe = [group_need(self._demand, group) <= capacity for group in groups]
        high = len(groups)
        while high > 0:
            if safe[high - 1]:
                high -= 1
                continue
            width = 2
            while True:
                low = max(0, high - width)
                upper = min(len(groups), low + width)
                pooled = sorted(member for group in groups[low:upper] for member in group)
                dealt = self._fitting(pooled, sizes[low:upper], capacity)
                if dealt is not None:
                    groups[low:upper] = dealt
                    high = low
                    break
                if low == 0 and upper == len(groups):
                    return None
                width *= 2
        return groups

    def _fitting(self, members: list[int], sizes: list[int], capacity: int) -> list[Group] | None:
        """A KV-safe deal, None where none was found; what provably does not fit is not dealt."""
        if not fits_in(self._demand, members, len(sizes), capacity):
            return None
        dealt = self._deal(members, sizes, capacity)
        return dealt if all(group_need(self._demand, group) <= capacity for group in dealt) else None

    def _deal(self, members: list[int], sizes: list[int], capacity: int) -> list[Group]:
        """Longest processing time first, then swaps while a rank is over capacity (0: while swaps help)."""
        loads = np.zeros((len(sizes), self._grid.size), dtype=np.int64)
        prompts = np.zeros(len(sizes), dtype=np.int64)
        room = np.array(sizes, dtype=np.int64)
        groups: list[list[int]] = [[] for _ in sizes]
        for member in sorted(members, key=lambda m: (-int(self._solo[m]), m)):
            need = (loads + self._profile[member]).max(axis=1) + prompts + self._demand.prompts[member]
            need[room == 0] = np.iinfo(np.int64).max
            rank = int(np.lexsort((-room, need))[0])
            loads[rank] += self._profile[member]
            prompts[rank] += self._demand.prompts[member]
            room[rank] -= 1
            groups[rank].append(member)
        self._mend(groups, capacity)
        return [tuple(sorted(group)) for group in groups]

    def _mend(self, groups: list[list[int]], capacity: int) -> None:
        """Swaps prompts of the fullest rank against prompts of emptier ones."""
        needs = np.array([group_need(self._demand, group) for group in groups], dtype=np.int64)
        for _ in range(_SWAPS):
            worst = int(needs.argmax())
            if needs[worst] <= capacity or not self._swap(groups, needs, worst):
                return

    def _swap(self, groups: list[list[int]], needs: IntArray, worst: int) -> bool:
        for other in np.argsort(needs, kind="stable")[:8].tolist():
            if other == worst:
                continue
            for mine in sorted(groups[worst], key=lambda m: -int(self._solo[m])):
                for theirs in sorted(groups[other], key=lambda m: int(self._solo[m])):
                    if self._solo[theirs] >= self._solo[mine]:
                        break
                    here = [theirs if m == mine else m for m in groups[worst]]
                    lighter = group_need(self._demand, here)
                    if lighter >= needs[worst]:
                        continue
                    there = [mine if m == theirs else m for m in groups[other]]
                    heavier = group_need(self._demand, there)
                    if heavier < needs[worst]:
                        groups[worst], groups[other] = here, there
                        needs[worst], needs[other] = lighter, heavier
                        return True
        return False


def sorted_groups(demand: Demand, groups: Sequence[Group], world_size: int) -> list[Group]:
    """N groups by completion, ranks without prompts first; ties by item ids."""
    padded = [*groups, *([()] * (world_size - len(groups)))]
    return sorted(
        padded,
        key=lambda g: (int(demand.completions[g[-1]]) if g else -1, sorted(int(demand.lexical[m]) for m in g), g),
    )
