"""Exact placement of small steps with any number of prompts a rank: set partition over all KV-safe groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import comb

import numpy as np

from flexfloor.config import SolverConfig
from flexfloor.planner.demand import Demand, IntArray
from flexfloor.planner.layout import group_sizes
from flexfloor.planner.matching import Columns, Placement, Quota
from flexfloor.planner.solver import LinearProgram


def candidate_count(prompts: int, world_size: int) -> int:
    """How many groups of the step's sizes there are."""
    return sum(comb(prompts, size) for size in set(group_sizes(prompts, world_size)) if size)


def candidate_blocks(prompts: int, world_size: int) -> Iterator[IntArray]:
    """All groups of the step's sizes, one array (count, size) a size, rows ascending."""
    for size in sorted(set(group_sizes(prompts, world_size)) - {0}):
        yield np.array(list(combinations(range(prompts), size)), dtype=np.int64)


class PartitionModel:
    """Placements of a step on N ranks whose groups have floor(b/N) or ceil(b/N) prompts, b >= N.

    Args:
        demand: the step.
        columns: KV-safe candidates of both sizes.
        world_size: N.
        solver: solver settings.
    """

    def __init__(self, demand: Demand, columns: Columns, world_size: int, solver: SolverConfig) -> None:
        self._demand, self._columns, self._world_size, self._solver = demand, columns, world_size, solver

    def solve(
        self,
        quotas: Sequence[Quota],
        *,
        forced: Sequence[int] = (),
        allowed: Sequence[int] | None = None,
        avoided: Sequence[int] = (),
        any_cost: bool = False,
    ) -> Placement:
        """The cheapest placement that meets all quotas; arguments as in `PairModel.solve`."""
        indices = list(range(len(self._columns.groups))) if allowed is None else list(allowed)
        must = set(forced)
        program = LinearProgram(self._solver)
        taken = [program.variable(int(k in must), 1, integer=True) for k in indices]
        covering: list[list[int]] = [[] for _ in range(len(self._demand))]
        for position, k in enumerate(indices):
            for member in self._columns.groups[k]:
                covering[member].append(position)
        for positions in covering:
            program.row([(taken[p], 1) for p in positions], "=", 1)
        program.row([(variable, 1) for variable in taken], "=", self._world_size)
        ends = self._demand.completions[self._columns.last[indices]]
        for quota in quotas:
            early = np.flatnonzero(ends <= quota.time).tolist()
            program.row([(taken[p], 1) for p in early], ">=", quota.groups)
        if avoided:
            again = set(avoided)
            kept = [(v, 1.0) for k, v in zip(indices, taken, strict=True) if k in again]
            program.row(kept, "<=", len(again) - 2)
        if not any_cost:
            costs = self._columns.costs[indices] / 1000
            program.minimise([(v, float(cost)) for v, cost in zip(taken, costs, strict=True)])
        status = program.solve(whole=False)
        if status != "optimal":
            return Placement("infeasible" if status == "infeasible" else "limit")
        duals = np.array([v.dj or 0.0 for v in taken])
        bound = program.objective
        if not program.is_whole():
            status = program.solve(whole=True)
            if status in ("infeasible", "limit"):
                return Placement(status)
        chosen = tuple(k for k, v in zip(indices, taken, strict=True) if v.varValue > 0.5)
        cost = int(self._columns.costs[list(chosen)].sum())
        if any_cost:
            return Placement(status, chosen, cost)
        reduced = np.full(len(self._columns.groups), np.inf)
        reduced[indices] = np.maximum(duals - (program.objective - bound), 0.0) * 1000
        return Placement(status, chosen, cost, reduced)
