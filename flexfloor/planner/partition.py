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
        groups = self._columns.groups
        indices = np.arange(len(groups)) if allowed is None else np.asarray(allowed, dtype=np.int64)
        program = LinearProgram(self._solver)
        taken = program.variables(len(indices), np.isin(indices, forced), 1, integer=True)
        members = np.array([member for k in indices for member in groups[k]], dtype=np.int64)
        owners = np.repeat(taken, [len(groups[k]) for k in indices])
        program.rows([(members, owners, 1.0)], "=", 1, len(self._demand))
        program.rows([(0, taken, 1.0)], "=", self._world_size)
        ends = self._demand.completions[self._columns.last[indices]]
        for quota in quotas:
            program.rows([(0, taken[ends <= quota.time], 1.0)], ">=", quota.groups)
        if avoided:
            program.rows([(0, taken[np.isin(indices, avoided)], 1.0)], "<=", len(set(avoided)) - 2)
        if not any_cost:
            program.minimise(taken, self._columns.costs[indices] / 1000)
        status = program.solve(whole=False)
        if status != "optimal":
            return Placement("infeasible" if status == "infeasible" else "limit")
        duals, bound = program.duals[taken], program.objective
        if not program.is_whole():
            status = program.solve(whole=True)
            if status in ("infeasible", "limit"):
                return Placement(status)
        chosen = tuple(indices[program.values[taken] > 0.5].tolist())
        cost = int(self._columns.costs[list(chosen)].sum())
        if any_cost:
            return Placement(status, chosen, cost)
        relaxed = np.full(len(groups), np.inf)
        relaxed[indices] = np.maximum(duals, 0.0) * 1000
        return Placement(status, chosen, cost, relaxed, max(0.0, program.objective - bound) * 1000)
