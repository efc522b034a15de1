"""Which prompts share a rank and which floor the step may reach (planner.md section 5).

Schedules of all floors are taken in descending release area, the larger floor first where areas are equal; the first
one whose quotas admit a KV-safe placement is the best of the step. Bounds make that one solve in the usual case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flexfloor.config import SolverConfig
from flexfloor.planner.admission import group_need
from flexfloor.planner.coverage import PairCover
from flexfloor.planner.demand import Demand, IntArray
from flexfloor.planner.layout import contiguous_groups
from flexfloor.planner.matching import (
    MIN_SKEW,
    RELEASE_AWARE,
    Columns,
    Group,
    PairModel,
    Placement,
    Quota,
    Weights,
    all_pairs,
    columns_of,
)
from flexfloor.planner.packing import Packer, sorted_groups
from flexfloor.planner.partition import PartitionModel, candidate_blocks, candidate_count
from flexfloor.planner.schedule import Ladder, ScheduleSearch, earliest_times, ladder_to
from flexfloor.planner.ties import ExactModel, break_ties, meets

_TIE_SOLVES = 24
"""Most solves spent on ties of one step."""
_SHARPEN_SOLVES = 12
"""Most solves spent on the earliest time of one stage."""


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


class _Floor:
    """One candidate floor: its ladder, candidates and what is left of its schedules."""

    def __init__(self, ladder: Ladder, capacity: int, search: ScheduleSearch) -> None:
        self.ladder, self.capacity, self.search = ladder, capacity, search
        self.sharpened = False

    @property
    def rank(self) -> tuple[int, int]:
        """Order in which floors are tried: largest area first, then the larger floor."""
        return (-self.search.bound, -self.ladder.floor)


class StepGrouper:
    """Groups the prompts of one step.

    Args:
        demand: the step.
        sizes: candidate EP sizes, the world size among them.
        capacity: KV tokens of a rank by EP size; a size without capacity is no floor.
        solver: solver settings.
    """

    def __init__(self, demand: Demand, sizes: Sequence[int], capacity: Mapping[int, int], solver: SolverConfig) -> None:
        self._demand, self._solver = demand, solver
        self._world_size = max(sizes)
        self._sizes = [size for size in sizes if size == self._world_size or size in capacity]
        self._capacity = capacity
        self._empty = max(0, self._world_size - len(demand))
        self.unproven = 0
        """Area that a floor might have had although no KV-safe grouping was found there, micro-token-ranks."""
        self._covers: dict[int, IntArray] = {}
        self._models: dict[tuple[int, int], tuple[Columns, ExactModel]] = {}

    # ---- the three ways to choose -------------------------------------------------------------------------------

    def release_aware(self, floors: Sequence[int] | None = None) -> Grouping | None:
        """The grouping of largest release area, cheapest within its schedule; None where no floor admits any.

        Args:
            floors: candidate floors; None takes all.
        """
        open_floors = self._open_floors(floors)
        found: list[Grouping] = []
        shut_bound = 0
        while open_floors:
            best_found = max((g.area for g in found), default=-1)
            open_floors = [floor for floor in open_floors if floor.search.best is not None]
            if not open_floors:
                break
            floor = min(open_floors, key=lambda f: f.rank)
            if found and floor.search.bound <= best_found:
                break
            if not self._is_exact:
                open_floors.remove(floor)
                shut_bound = max(shut_bound, floor.search.bound)
                found.extend(self._packed(floor))
                continue
            times = floor.search.best
            assert times is not None
            groups, proof = self._place(floor, times, RELEASE_AWARE)
            if groups is not None:
                found.append(self._finish(floor, groups))
                break
            if proof:
                floor.search.reject(times)
                self._sharpen(floor)
            else:
                open_floors.remove(floor)
                shut_bound = max(shut_bound, floor.search.bound)
                found.extend(self._packed(floor))
        if not found:
            self.unproven = shut_bound
            return None
        best = max(found, key=lambda g: (g.area, g.ladder.floor))
        left = max((f.search.bound for f in open_floors if f.search.best is not None), default=0)
        bound = max(best.area, left, shut_bound)
        return Grouping(best.ladder, best.groups, best.times, best.area, bound, kv_safe=True)

    def min_skew(self) -> Grouping | None:
        """The groupings of least total gap on each floor's graph; of them the largest release area."""
        found: list[Grouping] = []
        open_floors = self._open_floors(None)
        for floor in open_floors:
            anytime = tuple(self._demand.tail for _ in floor.ladder.quotas)
            groups, _ = self._place(floor, anytime, MIN_SKEW) if self._is_exact else (None, False)
            if groups is not None:
                found.append(self._finish(floor, groups))
            elif not self._is_exact:
                found.extend(self._packed(floor))
        if not found:
            return None
        best = max(found, key=lambda g: (g.area, g.ladder.floor))
        bound = best.area if self._is_exact else max(floor.search.bound for floor in open_floors)
        return Grouping(best.ladder, best.groups, best.times, best.area, bound, kv_safe=True)

    def smallest_peak(self) -> Grouping:
        """The full world with the smallest worst A + P, for a step no floor admits."""
        ladder = Ladder((self._world_size,))
        if len(self._demand) <= self._world_size:
            groups = self._alone()
        elif self._is_exact:
            groups = self._bottleneck()
        else:
            groups = Packer(self._demand, self._world_size).balanced()
        groups = sorted_groups(self._demand, groups, self._world_size)
        limit = self._capacity.get(self._world_size)
        safe = limit is not None and all(group_need(self._demand, group) <= limit for group in groups)
        return Grouping(ladder, tuple(groups), (), 0, self.unproven, kv_safe=safe)

    # ---- parts --------------------------------------------------------------------------------------------------

    @cached_property
    def _is_exact(self) -> bool:
        count, world = len(self._demand), self._world_size
        if count <= world:
            return True
        if count <= 2 * world:
            return count * (count - 1) // 2 <= self._solver.max_columns
        return candidate_count(count, world) <= self._solver.max_columns

    @cached_property
    def _columns(self) -> Columns:
        """Every group of the step's sizes, priced for release."""
        count, world = len(self._demand), self._world_size
        if count == 2 * world:
            blocks = [all_pairs(count)]
        elif count <= world:
            blocks = [np.arange(count, dtype=np.int64)[:, None]]
        else:
            blocks = list(candidate_blocks(count, world))
        return columns_of(self._demand, blocks, RELEASE_AWARE)

    @cached_property
    def _needs_matrix(self) -> IntArray:
        """A + P of every pair, shape (b, b)."""
        count = len(self._demand)
        needs = np.full((count, count), np.iinfo(np.int64).max, dtype=np.int64)
        rows, columns = np.triu_indices(count, 1)
        needs[rows, columns] = self._columns.needs
        needs[columns, rows] = self._columns.needs
        return needs

    def _ranks_needed(self, capacity: int) -> IntArray | None:
        """Least ranks of the k longest prompts, for pairs."""
        if not (self._is_exact and len(self._demand) == 2 * self._world_size):
            return None
        if capacity not in self._covers:
            self._covers[capacity] = PairCover(self._needs_matrix <= capacity).ranks
        return self._covers[capacity]

    def _open_floors(self, floors: Sequence[int] | None) -> list[_Floor]:
        opened = []
        for size in self._sizes:
            if size not in self._capacity or (floors is not None and size not in floors):
                continue
            ladder, capacity = ladder_to(size, self._sizes), self._capacity[size]
            earliest = earliest_times(self._demand, ladder, capacity, self._ranks_needed(capacity))
            if earliest is not None:
                opened.append(_Floor(ladder, capacity, ScheduleSearch(self._demand, ladder, earliest)))
        return opened

    def _quotas(self, ladder: Ladder, times: Sequence[int]) -> list[Quota]:
        pairs = zip(ladder.quotas, times, strict=True)
        return [Quota(quota - self._empty, time) for quota, time in pairs if quota > self._empty]

    def _model(self, capacity: int, weights: Weights) -> tuple[Columns, ExactModel]:
        key = (capacity, weights.peak)
        if key not in self._models:
            columns = self._columns.within(capacity)
            if weights is not RELEASE_AWARE:
                columns = columns.priced(self._demand, weights)
            model: ExactModel
            if len(self._demand) <= 2 * self._world_size:
                model = PairModel(self._demand, columns, self._world_size, weights, self._solver)
            else:
                model = PartitionModel(self._demand, columns, self._world_size, self._solver)
            self._models[key] = (columns, model)
        return self._models[key]

    def _place(self, floor: _Floor, times: Sequence[int], weights: Weights) -> tuple[list[Group] | None, bool]:
        """The cheapest KV-safe groups that meet the schedule; or None and whether that is a proof."""
        quotas = self._quotas(floor.ladder, times)
        if len(self._demand) <= self._world_size:
            groups = self._alone()
            safe = all(group_need(self._demand, group) <= floor.capacity for group in groups)
            return (groups, True) if safe and meets(self._demand, groups, quotas) else (None, True)
        neighbours = self._neighbours
        if neighbours is not None and self._admits(neighbours, floor.capacity, quotas):
            return neighbours, True
        columns, model = self._model(floor.capacity, weights)
        placement = model.solve(quotas)
        if not placement.found:
            return None, placement.status == "infeasible"
        if placement.status == "optimal":
            return break_ties(self._demand, columns, model, quotas, placement, _TIE_SOLVES), True
        return [columns.groups[k] for k in placement.chosen], True

    def _admits(self, groups: Sequence[Group], capacity: int, quotas: Sequence[Quota]) -> bool:
        return meets(self._demand, groups, quotas) and all(
            group_need(self._demand, group) <= capacity for group in groups
        )

    @cached_property
    def _neighbours(self) -> list[Group] | None:
        """Pairs of neighbours, where no other pairs can be as cheap under either weighting.

        Any other pairs span one of the gaps between neighbouring pairs twice; that costs more than all KV peaks
        together could save, or the shortcut is not taken.
        """
        demand, count = self._demand, len(self._demand)
        if count != 2 * self._world_size:
            return None
        groups = contiguous_groups(count, self._world_size)
        between = demand.tails[2::2] - demand.tails[1:-1:2]
        spent = sum(self._peaks[group] for group in groups)
        if between.size and int(between.min()) * 2 <= spent:
            return None
        return groups

    @cached_property
    def _peaks(self) -> dict[Group, int]:
        return dict(zip(self._columns.groups, self._columns.peaks.tolist(), strict=True))

    def _sharpen(self, floor: _Floor) -> None:
        """After a first refusal: the earliest time of every stage alone, by galloping."""
        if floor.sharpened or len(self._demand) <= self._world_size:
            return
        floor.sharpened = True
        _, model = self._model(floor.capacity, RELEASE_AWARE)
        stages = len(floor.ladder.quotas)
        if stages and model.solve([], any_cost=True).status == "infeasible":
            floor.search.reject((self._demand.tail,) * stages)
            return
        for stage in range(stages):
            solves, stride = 0, 1
            while solves < _SHARPEN_SOLVES and (best := floor.search.best) is not None:
                time = best[stage]
                for _ in range(stride - 1):
                    time = floor.search.next_time(time) or time
                alone = tuple(time if s == stage else self._demand.tail for s in range(stages))
                solves += 1
                answer = model.solve(self._quotas(floor.ladder, alone), any_cost=True)
                if answer.status == "infeasible":
                    floor.search.reject(alone)
                    stride *= 2
                elif stride == 1:
                    break
                else:
                    stride = max(1, stride // 4)

    def _packed(self, floor: _Floor) -> list[Grouping]:
        groups = self._packer.pack(floor.ladder, floor.capacity)
        return [] if groups is None else [self._finish(floor, groups)]

    @cached_property
    def _packer(self) -> Packer:
        return Packer(self._demand, self._world_size)

    def _finish(self, floor: _Floor, groups: Sequence[Group]) -> Grouping:
        ordered = sorted_groups(self._demand, groups, self._world_size)
        ends = [int(self._demand.completions[group[-1]]) if group else 0 for group in ordered]
        times = floor.ladder.times(ends)
        area = floor.ladder.area(times, self._demand.tail)
        return Grouping(floor.ladder, tuple(ordered), times, area, area, kv_safe=True)

    def _alone(self) -> list[Group]:
        return [(prompt,) for prompt in range(len(self._demand))]

    def _bottleneck(self) -> list[Group]:
        """Groups with the smallest worst A + P, cheapest among them."""
        columns = self._columns
        levels = np.unique(columns.needs)
        packed = max(group_need(self._demand, group) for group in self._packer.balanced())
        least = np.full(len(self._demand), np.iinfo(np.int64).max, dtype=np.int64)
        for group, need in zip(columns.groups, columns.needs.tolist(), strict=True):
            members = list(group)
            least[members] = np.minimum(least[members], need)
        low = int(np.searchsorted(levels, least.max()))
        high = int(np.searchsorted(levels, packed))
        while low < high:
            middle = (low + high) // 2
            _, model = self._model(int(levels[middle]), RELEASE_AWARE)
            placement: Placement = model.solve([], any_cost=True)
            if placement.status == "infeasible":
                low = middle + 1
            else:
                high = middle
        columns, model = self._model(int(levels[low]), RELEASE_AWARE)
        best = model.solve([])
        return break_ties(self._demand, columns, model, [], best, _TIE_SOLVES)
