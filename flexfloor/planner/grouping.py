"""Which prompts share a rank and which floor the step may reach (planner.md section 5).

Schedules of all floors are taken in descending release area, the larger floor first where areas are equal; the first
one whose quotas admit a KV-safe placement is the best of the step. Bounds make that one solve in the usual case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flexfloor.config import SolverConfig
from flexfloor.planner.demand import Demand
from flexfloor.planner.matching import MIN_SKEW, RELEASE_AWARE, Group, Quota
from flexfloor.planner.packing import sorted_groups
from flexfloor.planner.placer import Placer
from flexfloor.planner.schedule import Ladder, ScheduleSearch, earliest_times, ladder_to

_SHARPEN_SOLVES = 12
"""Most solves spent on the earliest time of one stage."""
_REFUSALS = 60
"""Refused schedules of a step after which packing must do; the gap is then reported."""
_CLOSE = 0.005
"""A packing this near to the bound is not worth the exact model on a part of the pairs."""
_PARTIAL_TRIES = 4
"""Schedules of a large step that are tried on a part of its pairs."""


@dataclass(frozen=True)
class Grouping:
    """Groups of a step and the schedule they reach.

    Attributes:
        ladder: ladder of the chosen floor.
        groups: N groups, ascending by completion, ranks without prompts first.
        times: quorum times, micro-tokens.
        area: release area, micro-token-ranks.
        bound: no grouping at any candidate floor has a larger area.
        kv_safe: whether every group passed admission at the floor.
    """

    ladder: Ladder
    groups: tuple[Group, ...]
    times: tuple[int, ...]
    area: int
    bound: int
    kv_safe: bool

    @property
    def gap(self) -> float:
        """Proven relative distance of the area to the optimum."""
        return (self.bound - self.area) / self.bound if self.bound > self.area else 0.0

    @property
    def merit(self) -> tuple[int, int]:
        """Larger is better: release area, then the larger floor."""
        return (self.area, self.ladder.floor)


class _Floor:
    """One candidate floor: its ladder, capacity and what is left of its schedules."""

    def __init__(self, ladder: Ladder, capacity: int, search: ScheduleSearch) -> None:
        self.ladder, self.capacity, self.search = ladder, capacity, search
        self.sharpened = False

    @property
    def promise(self) -> tuple[int, int]:
        """No grouping at this floor has a larger merit."""
        return (self.search.bound, self.ladder.floor)


class StepGrouper:
    """Groups the prompts of one step.

    Args:
        demand: the step.
        sizes: candidate EP sizes, the world size among them.
        capacity: KV tokens of a rank by EP size; a size without capacity is no floor.
        solver: solver settings.
    """

    def __init__(self, demand: Demand, sizes: Sequence[int], capacity: Mapping[int, int], solver: SolverConfig) -> None:
        self._demand, self._capacity = demand, capacity
        self._world_size = max(sizes)
        self._sizes = [size for size in sizes if size == self._world_size or size in capacity]
        self._empty = max(0, self._world_size - len(demand))
        self._placer = Placer(demand, self._world_size, solver)
        self._unproven = 0

    # ---- the three ways to choose -------------------------------------------------------------------------------

    def release_aware(self, floors: Sequence[int] | None = None) -> Grouping | None:
        """The grouping of largest release area, cheapest within its schedule; None where no floor admits any.

        Args:
            floors: candidate floors; None takes all.
        """
        waiting = self._open_floors(floors)
        best: Grouping | None = None
        shut_bound = refusals = 0
        while waiting := [floor for floor in waiting if floor.search.best is not None]:
            floor = max(waiting, key=lambda f: f.promise)
            if best is not None and floor.promise <= best.merit:
                break
            found, settled = self._try(floor, packed=not self._placer.is_exact or refusals >= _REFUSALS)
            refusals += 1
            if found is not None and (best is None or found.merit > best.merit):
                best = found
            if settled:
                waiting.remove(floor)
                shut_bound = max(shut_bound, floor.search.bound)
        if best is None:
            self._unproven = max(self._unproven, shut_bound)
            return None
        left = max((floor.search.bound for floor in waiting), default=0)
        return replace(best, bound=max(best.area, left if best.area < left else 0, shut_bound))

    def min_skew(self) -> Grouping | None:
        """The groupings of least total gap on each floor's graph; of them the largest release area."""
        waiting = self._open_floors(None)
        found: list[Grouping] = []
        for floor in waiting:
            if self._placer.is_exact:
                groups, _ = self._placer.place(floor.capacity, [], MIN_SKEW)
            else:
                groups = self._placer.pack(floor.ladder, floor.capacity)
            if groups is not None:
                found.append(self._reached(floor.ladder, groups))
        if not found:
            return None
        best = max(found, key=lambda g: g.merit)
        bound = best.area if self._placer.is_exact else max(floor.search.bound for floor in waiting)
        return replace(best, bound=bound)

    def smallest_peak(self) -> Grouping:
        """The full world with the smallest worst A + P, for a step no floor admits."""
        groups = self._placer.smallest_peak()
        limit = self._capacity.get(self._world_size)
        safe = limit is not None and self._placer.admits(groups, limit)
        return replace(self._reached(Ladder((self._world_size,)), groups), bound=self._unproven, kv_safe=safe)

    # ---- parts --------------------------------------------------------------------------------------------------

    def _open_floors(self, floors: Sequence[int] | None) -> list[_Floor]:
        opened = []
        for size in self._sizes:
            if size not in self._capacity or (floors is not None and size not in floors):
                continue
            ladder, capacity = ladder_to(size, self._sizes), self._capacity[size]
            earliest = earliest_times(self._demand, ladder, capacity, self._placer.ranks_needed(capacity))
            if earliest is not None:
                opened.append(_Floor(ladder, capacity, ScheduleSearch(self._demand, ladder, earliest)))
        return opened

    def _try(self, floor: _Floor, *, packed: bool) -> tuple[Grouping | None, bool]:
        """Tries the best schedule left of a floor.

        Returns:
            What was found, and whether the floor needs no further try.
        """
        if packed:
            return self._packed(floor), True
        times = floor.search.best
        assert times is not None
        groups, proof = self._placer.place(floor.capacity, self._quotas(floor.ladder, times), RELEASE_AWARE)
        if groups is not None:
            return self._reached(floor.ladder, groups), True
        if not proof:
            return self._packed(floor), True
        floor.search.reject(times)
        self._sharpen(floor)
        return None, False

    def _sharpen(self, floor: _Floor) -> None:
        """After a first refusal: whether the floor admits anything, and the earliest time of every stage alone."""
        if floor.sharpened or len(self._demand) <= self._world_size:
            return
        floor.sharpened = True
        stages = len(floor.ladder.quotas)
        if stages and self._placer.rules_out(floor.capacity, []):
            floor.search.reject((self._demand.tail,) * stages)
            return
        for stage in range(stages):
            solves, stride = 0, 1
            while solves < _SHARPEN_SOLVES and (best := floor.search.best) is not None:
                time = floor.search.later(best[stage], stride - 1)
                alone = tuple(time if s == stage else self._demand.tail for s in range(stages))
                solves += 1
                if self._placer.rules_out(floor.capacity, self._quotas(floor.ladder, alone)):
                    floor.search.reject(alone)
                    stride *= 2
                elif stride == 1:
                    break
                else:
                    stride = max(1, stride // 4)

    def _packed(self, floor: _Floor) -> Grouping | None:
        """The better of packing and, for pairs, of the exact model on a part of them."""
        groups = self._placer.pack(floor.ladder, floor.capacity)
        best = self._reached(floor.ladder, groups) if groups is not None else None
        if self._placer.ranks_needed(floor.capacity) is None:
            return best
        times, stride = floor.search.best, 1
        for _ in range(_PARTIAL_TRIES):
            if times is None:
                break
            area = floor.ladder.area(times, self._demand.tail)
            if best is not None and area - best.area <= _CLOSE * area:
                break
            quotas = self._quotas(floor.ladder, times)
            placed, _ = self._placer.place(floor.capacity, quotas, RELEASE_AWARE)
            if placed is not None:
                return self._reached(floor.ladder, placed)
            times = tuple(floor.search.later(time, stride) for time in times)
            stride *= 4
        return best

    def _quotas(self, ladder: Ladder, times: Sequence[int]) -> list[Quota]:
        pairs = zip(ladder.quotas, times, strict=True)
        return [Quota(quota - self._empty, time) for quota, time in pairs if quota > self._empty]

    def _reached(self, ladder: Ladder, groups: Sequence[Group]) -> Grouping:
        ordered = sorted_groups(self._demand, groups, self._world_size)
        ends = [int(self._demand.completions[group[-1]]) if group else 0 for group in ordered]
        times = ladder.times(ends)
        area = ladder.area(times, self._demand.tail)
        return Grouping(ladder, tuple(ordered), times, area, area, kv_safe=True)
