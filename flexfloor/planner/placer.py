"""Places the prompts of one step on ranks: exactly where the step is small enough, else by packing.

Exact are: at most one prompt a rank (nothing to choose), pairs and steps of one or two prompts a rank (`PairModel`),
and small steps of larger groups (`PartitionModel`). For larger steps of pairs the placement of the packer is tried
against the exact model on a part of the pairs; a failure there proves nothing, the bounds still hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from flexfloor.config import SolverConfig
from flexfloor.planner.admission import column_needs, column_peaks, fits_in, group_need
from flexfloor.planner.coverage import PairCover
from flexfloor.planner.demand import Demand, IntArray
from flexfloor.planner.layout import contiguous_groups
from flexfloor.planner.matching import (
    RELEASE_AWARE,
    Columns,
    Group,
    PairModel,
    Quota,
    Weights,
    all_pairs,
    columns_of,
)
from flexfloor.planner.packing import Packer
from flexfloor.planner.partition import PartitionModel, candidate_blocks, candidate_count
from flexfloor.planner.schedule import Ladder
from flexfloor.planner.ties import ExactModel, break_ties, meets

_LARGEST_PAIR_TABLE = 6000
"""Most prompts of a step whose pairs are all looked at."""
_NEAR = 12
"""Neighbours on either side that a prompt of a large step may be paired with in the partial model."""
_TIE_SOLVES, _TIE_PROMPTS = 24, 48
"""Most solves spent on ties of one step, and the largest step that is worth more than one."""


class Placer:
    """Places the prompts of one step.

    Args:
        demand: the step.
        world_size: N.
        solver: solver settings.
    """

    def __init__(self, demand: Demand, world_size: int, solver: SolverConfig) -> None:
        self._demand, self._world_size, self._solver = demand, world_size, solver
        self._covers: dict[int, PairCover] = {}
        self._models: dict[tuple[int, int], tuple[Columns, ExactModel]] = {}
        self.packer = Packer(demand, world_size)

    @cached_property
    def is_exact(self) -> bool:
        """Whether `place` finds the cheapest placement or proves that there is none."""
        count, world = len(self._demand), self._world_size
        if count <= world:
            return True
        candidates = count * (count - 1) // 2 if count <= 2 * world else candidate_count(count, world)
        return candidates <= self._solver.max_columns

    def place(self, capacity: int, quotas: Sequence[Quota], weights: Weights) -> tuple[list[Group] | None, bool]:
        """The cheapest KV-safe groups that meet the quotas; or None and whether that is a proof."""
        if len(self._demand) <= self._world_size:
            groups = self._alone()
            return (groups, True) if self.admits(groups, capacity, quotas) else (None, True)
        neighbours = self._neighbours
        if neighbours is not None and self.admits(neighbours, capacity, quotas):
            return neighbours, True
        columns, model = self._model(capacity, weights)
        placement = model.solve(quotas)
        if not placement.found:
            return None, placement.status == "infeasible" and columns.complete
        if placement.status == "optimal" and columns.complete:
            solves = _TIE_SOLVES if len(self._demand) <= _TIE_PROMPTS else 1
            return break_ties(self._demand, columns, model, quotas, placement, solves), True
        return [columns.groups[k] for k in placement.chosen], True

    def rules_out(self, capacity: int, quotas: Sequence[Quota]) -> bool:
        """Whether no KV-safe placement meets the quotas; False where that is not known."""
        if len(self._demand) <= self._world_size:
            return not self.admits(self._alone(), capacity, quotas)
        columns, model = self._model(capacity, RELEASE_AWARE)
        return columns.complete and model.solve(quotas, any_cost=True).status == "infeasible"

    def pack(self, ladder: Ladder, capacity: int) -> list[Group] | None:
        """A KV-safe grouping by packing, None where none was found."""
        return self.packer.pack(ladder, capacity)

    def admits(self, groups: Sequence[Group], capacity: int, quotas: Sequence[Quota] = ()) -> bool:
        """Whether the groups are KV-safe and meet the quotas."""
        return meets(self._demand, groups, quotas) and all(
            group_need(self._demand, group) <= capacity for group in groups
        )

    def fits_at(self, capacity: int) -> bool:
        """Whether a KV-safe grouping is found at all."""
        count = len(self._demand)
        if count <= self._world_size:
            return self.admits(self._alone(), capacity)
        if not fits_in(self._demand, slice(0, count), self._world_size, capacity):
            return False
        needed = self.ranks_needed(capacity)
        if needed is not None and needed[count] > self._world_size:
            return False
        if self.pack(Ladder((self._world_size,)), capacity) is not None:
            return True
        partly = self.is_exact or needed is not None
        return partly and self._model(capacity, RELEASE_AWARE)[1].solve([], any_cost=True).found

    def ranks_needed(self, capacity: int) -> IntArray | None:
        """Least ranks that hold the k longest prompts, by k; None where only coarser bounds are known."""
        cover = self._cover(capacity)
        return cover.ranks if cover is not None else None

    def smallest_peak(self) -> list[Group]:
        """Groups with the smallest worst A + P; exact where `is_exact`."""
        if len(self._demand) <= self._world_size:
            return self._alone()
        packed = self.packer.balanced()
        if not self.is_exact:
            return packed
        columns = self._columns
        levels = np.unique(columns.needs)
        least = np.full(len(self._demand), np.iinfo(np.int64).max, dtype=np.int64)
        for group, need in zip(columns.groups, columns.needs.tolist(), strict=True):
            members = list(group)
            least[members] = np.minimum(least[members], need)
        low = int(np.searchsorted(levels, least.max()))
        high = int(np.searchsorted(levels, max(group_need(self._demand, group) for group in packed)))
        while low < high:
            middle = (low + high) // 2
            if self.rules_out(int(levels[middle]), []):
                low = middle + 1
            else:
                high = middle
        columns, model = self._model(int(levels[low]), RELEASE_AWARE)
        if len(self._demand) > _TIE_PROMPTS:
            placement = model.solve([], any_cost=True)
            return [columns.groups[k] for k in placement.chosen] if placement.found else packed
        return break_ties(self._demand, columns, model, [], model.solve([]), _TIE_SOLVES)

    # ---- candidates ---------------------------------------------------------------------------------------------

    @cached_property
    def _pairs(self) -> IntArray:
        return all_pairs(len(self._demand))

    @cached_property
    def _pair_peaks(self) -> IntArray:
        return column_peaks(self._demand, self._pairs)

    @cached_property
    def _pair_needs(self) -> IntArray:
        """A + P of every pair of prompts, shape (b, b), symmetric."""
        count = len(self._demand)
        needs = np.full((count, count), np.iinfo(np.int64).max, dtype=np.int64)
        values = column_needs(self._demand, self._pairs, self._pair_peaks)
        needs[self._pairs[:, 0], self._pairs[:, 1]] = values
        needs[self._pairs[:, 1], self._pairs[:, 0]] = values
        return needs

    def _cover(self, capacity: int) -> PairCover | None:
        count = len(self._demand)
        if count != 2 * self._world_size or count > _LARGEST_PAIR_TABLE:
            return None
        if capacity not in self._covers:
            marks = {count // 2**k for k in range(1, 8)}
            self._covers[capacity] = PairCover(self._pair_needs <= capacity, marks)
        return self._covers[capacity]

    @cached_property
    def _columns(self) -> Columns:
        """Every group of the step's sizes, priced for release."""
        if len(self._demand) == 2 * self._world_size:
            return columns_of(self._demand, [self._pairs], RELEASE_AWARE)
        return columns_of(self._demand, candidate_blocks(len(self._demand), self._world_size), RELEASE_AWARE)

    def _some_pairs(self, capacity: int) -> Columns:
        """Near pairs, ever sparser far ones, and those of the cover: enough to place a large step well."""
        count = len(self._demand)
        offsets, stride = list(range(1, _NEAR + 1)), float(_NEAR)
        while (stride := stride * 1.25) < count:
            offsets.append(int(stride))
        pairs: set[Group] = {(k, k + offset) for offset in offsets for k in range(count - offset)}
        cover = self._cover(capacity)
        pairs |= cover.pairs if cover is not None else set()
        block = np.array(sorted(pairs), dtype=np.int64)
        return columns_of(self._demand, [block], RELEASE_AWARE, complete=False)

    def _model(self, capacity: int, weights: Weights) -> tuple[Columns, ExactModel]:
        key = (capacity, weights.peak)
        if key not in self._models:
            columns = (self._columns if self.is_exact else self._some_pairs(capacity)).within(capacity)
            if weights is not RELEASE_AWARE:
                columns = columns.priced(self._demand, weights)
            model: ExactModel
            if len(self._demand) <= 2 * self._world_size:
                model = PairModel(self._demand, columns, self._world_size, weights, self._solver)
            else:
                model = PartitionModel(self._demand, columns, self._world_size, self._solver)
            self._models[key] = (columns, model)
        return self._models[key]

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
        spent = int(column_peaks(demand, np.arange(count, dtype=np.int64).reshape(-1, 2)).sum())
        if between.size and int(between.min()) * 2 <= spent:
            return None
        return groups

    def _alone(self) -> list[Group]:
        return [(prompt,) for prompt in range(len(self._demand))]
