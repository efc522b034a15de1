"""Exact placement of one or two prompts a rank (planner.md section 5; seed 001, equations 11, 12 and 14).

Prompts stand in ascending order of completion. In a pair the earlier prompt opens and the later one closes; a prompt
alone does both. So the number of pairs that span the gap between two neighbours follows from who opens, the total
prediction gap is a sum over these spans, the completions are those of the prompts that do not open, and a quota
is one row over the openers. Given the openers, who closes whom is a bipartite assignment, whose relaxation is whole.
The integer model therefore has one binary a prompt instead of one a pair, and with the odd prefixes of pairs its
relaxation is nearly always tight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexfloor.config import SolverConfig
from flexfloor.planner.admission import column_needs, column_peaks
from flexfloor.planner.demand import Demand, IntArray
from flexfloor.planner.solver import WHOLE, LinearProgram, Status, are_whole

_MANY, _FEW = 5000, 800
"""Candidates from which on a solve in whole numbers begins with few (at most half), and how many these are."""

_PARTIAL_GAP, _PARTIAL_SECONDS = 1e-3, 2.0
"""Where only a part of the candidates is offered: relative distance to the cheapest placement that is good enough, and
the longest solve in whole numbers; packing has an answer already."""

Group = tuple[int, ...]
"""Prompts of one rank: positions in demand order, ascending."""


@dataclass(frozen=True)
class Weights:
    """Weights of the cost of a group: gap * spread + completion * M + peak * A, each in tokens (equation 14)."""

    gap: int = 1_000_000
    completion: int = 1_000
    peak: int = 1

    def column_costs(self, demand: Demand, columns: IntArray, peaks: IntArray) -> IntArray:
        """Costs of many groups in thousandths, exact integers, shape (count,). ``columns`` rows ascend."""
        spread = demand.tails[columns[:, -1]] - demand.tails[columns[:, 0]]
        costs: IntArray = (
            spread * self.gap // 1000
            + demand.completions[columns[:, -1]] * self.completion // 1000
            + peaks * self.peak * 1000
        )
        return costs


RELEASE_AWARE = Weights()
MIN_SKEW = Weights(gap=1_000_000, completion=0, peak=0)


@dataclass(frozen=True)
class Columns:
    """Candidate groups: KV-safe, in ascending order of members.

    Attributes:
        groups: the candidates.
        last: last (latest) member of each, shape (count,).
        peaks: active-token peaks A, tokens.
        needs: A + P, tokens.
        costs: cost of each in thousandths, exact.
        complete: whether every KV-safe group is here, so that infeasible means infeasible.
    """

    groups: list[Group]
    last: IntArray
    peaks: IntArray
    needs: IntArray
    costs: IntArray
    complete: bool = True

    def within(self, limit: int) -> Columns:
        """The candidates whose A + P is at most ``limit`` tokens."""
        kept = np.flatnonzero(self.needs <= limit)
        return Columns(
            [self.groups[k] for k in kept],
            self.last[kept],
            self.peaks[kept],
            self.needs[kept],
            self.costs[kept],
            self.complete,
        )

    def priced(self, demand: Demand, weights: Weights) -> Columns:
        """The same candidates with another cost."""
        costs = np.empty(len(self.groups), dtype=np.int64)
        lengths = np.array([len(group) for group in self.groups])
        for size in set(lengths.tolist()):
            chosen = np.flatnonzero(lengths == size)
            block = np.array([self.groups[k] for k in chosen], dtype=np.int64)
            costs[chosen] = weights.column_costs(demand, block, self.peaks[chosen])
        return Columns(self.groups, self.last, self.peaks, self.needs, costs, self.complete)


def columns_of(demand: Demand, blocks: Iterable[IntArray], weights: Weights, *, complete: bool = True) -> Columns:
    """Candidates from arrays of groups of one size each, rows ascending."""
    groups: list[Group] = []
    last, peaks, needs, costs = [], [], [], []
    for block in blocks:
        block_peaks = column_peaks(demand, block)
        groups.extend(tuple(row) for row in block.tolist())
        last.append(block[:, -1])
        peaks.append(block_peaks)
        needs.append(column_needs(demand, block, block_peaks))
        costs.append(weights.column_costs(demand, block, block_peaks))
    return Columns(groups, _joined(last), _joined(peaks), _joined(needs), _joined(costs), complete)


def _joined(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def all_pairs(count: int) -> IntArray:
    """Every pair of ``count`` prompts, shape (count*(count-1)/2, 2)."""
    pairs: IntArray = np.stack(np.triu_indices(count, 1), axis=1).astype(np.int64)
    return pairs


@dataclass(frozen=True)
class Quota:
    """At least ``groups`` non-empty groups complete by ``time`` (micro-tokens)."""

    groups: int
    time: int


@dataclass(frozen=True)
class Placement:
    """Answer of an exact model.

    Attributes:
        status: of the solve.
        chosen: indices of the chosen candidates; empty without a solution.
        cost: their cost in thousandths.
        relaxed: reduced costs of the candidates in the relaxation, in thousandths: any placement costs at least
            ``cost - distance`` and the sum of its candidates' reduced costs. None if unknown.
        distance: what this placement costs above the relaxation, thousandths.
    """

    status: Status
    chosen: tuple[int, ...] = ()
    cost: int = 0
    relaxed: NDArray[np.float64] | None = None
    distance: float = 0.0

    @property
    def found(self) -> bool:
        """Whether there is a placement."""
        return self.status in ("optimal", "feasible")


class PairModel:
    """Placements of N <= b <= 2N prompts on N ranks, one or two a rank.

    Args:
        demand: the step.
        columns: KV-safe candidates of one or two prompts.
        world_size: N.
        weights: the weights ``columns`` were priced with.
        solver: solver settings.
    """

    def __init__(
        self, demand: Demand, columns: Columns, world_size: int, weights: Weights, solver: SolverConfig
    ) -> None:
        self._demand, self._columns, self._weights, self._solver = demand, columns, weights, solver
        self._alone = 2 * world_size - len(demand)
        self._first = np.array([group[0] for group in columns.groups], dtype=np.int64)
        self._paired = self._first != columns.last

    def solve(
        self,
        quotas: Sequence[Quota],
        *,
        forced: Sequence[int] = (),
        allowed: Sequence[int] | None = None,
        avoided: Sequence[int] = (),
        any_cost: bool = False,
    ) -> Placement:
        """The cheapest placement that meets all quotas.

        Args:
            quotas: what must complete when.
            forced: candidates that must be chosen.
            allowed: the only candidates that may be chosen; None allows all.
            avoided: a placement that must not be the answer.
            any_cost: settle for any placement.
        """
        count = len(self._demand)
        indices = np.arange(len(self._first)) if allowed is None else np.asarray(allowed, dtype=np.int64)
        first, last, pairs = self._first[indices], self._columns.last[indices], self._paired[indices]
        loose = () if self._columns.complete else (_PARTIAL_GAP, _PARTIAL_SECONDS)
        program = LinearProgram(self._solver, *loose, presolve=not self._columns.complete)
        every = np.arange(count)
        opens = program.variables(count, 0, 1, integer=True)
        around = [(every, opens, -2.0)]
        least = (every[:-1] + 1) % 2
        if self._alone:
            alone = program.variables(count, 0, np.isin(every, first[~pairs]), integer=True)
            around.append((every, alone, -1.0))
            least = 0 * least
        spans = program.variables(count - 1, least, math.inf)
        around += [(every[:-1], spans, 1.0), (every[1:], spans, -1.0)]
        taken = program.variables(len(indices), np.isin(indices, forced), 1)
        program.rows([(every, opens, -1.0), (first[pairs], taken[pairs], 1.0)], "=", 0, count)
        program.rows([(every, opens, 1.0), (last, taken, 1.0)], "=", 1, count)
        program.rows(around, "=", -1, count)
        if self._alone:
            single = taken[~pairs]
            own = np.arange(len(single))
            program.rows([(own, single, 1.0), (own, alone[first[~pairs]], -1.0)], "=", 0, len(single))
            program.rows([(0, alone, 1.0)], "=", self._alone)
        for quota in quotas:
            reached = int(np.searchsorted(self._demand.completions, quota.time, side="right"))
            if reached < quota.groups:
                return Placement("infeasible")
            if reached < count:
                program.rows([(0, opens[:reached], 1.0)], "<=", reached - quota.groups)
        if avoided:
            program.rows([(0, taken[np.isin(indices, avoided)], 1.0)], "<=", len(set(avoided)) - 2)
        if not any_cost:
            weights, demand = self._weights, self._demand
            program.minimise(taken, self._columns.peaks[indices] * float(weights.peak))
            program.minimise(spans, np.diff(demand.tails) * (weights.gap / 1e6))
            program.minimise(opens, -demand.completions * (weights.completion / 1e6))
        return self._answer(program, indices, taken, any_cost=any_cost)

    def _answer(self, program: LinearProgram, indices: IntArray, taken: IntArray, *, any_cost: bool) -> Placement:
        status = program.solve(whole=False)
        if status != "optimal":
            return Placement("infeasible" if status == "infeasible" else "limit")
        duals, bound = program.duals[taken], program.objective
        if not (program.is_whole() and are_whole(program.values[taken])):
            status = _solve_whole(program, taken, duals, bound)
            if status in ("infeasible", "limit"):
                return Placement(status)
        chosen = tuple(indices[program.values[taken] > 0.5].tolist())
        cost = int(self._columns.costs[list(chosen)].sum())
        if any_cost:
            return Placement(status, chosen, cost)
        relaxed = np.full(len(self._first), np.inf)
        relaxed[indices] = np.maximum(duals, 0.0) * 1000
        return Placement(status, chosen, cost, relaxed, max(0.0, program.objective - bound) * 1000)


def _solve_whole(program: LinearProgram, taken: IntArray, duals: NDArray[np.float64], bound: float) -> Status:
    """Whole numbers after the relaxation, first with few candidates.

    A candidate costs at least the relaxation's ``bound`` and its reduced cost. So once a placement is known, candidates
    whose reduced cost exceeds its distance to the bound cannot be in a cheaper one, nor in one that costs the same.
    """
    for few in (min(_FEW, len(taken) // 2), len(taken) // 2) if len(taken) > _MANY else ():
        tried = float(np.partition(duals, few)[few])
        _close(program, taken, duals > tried)
        status = program.solve(whole=True)
        if status == "optimal":
            distance = program.objective - bound + WHOLE * abs(bound)
            if distance <= tried:
                return status
            _close(program, taken, duals > distance)
            return program.solve(whole=True)
    _close(program, taken, duals > np.inf)
    return program.solve(whole=True)


def _close(program: LinearProgram, taken: IntArray, shut: NDArray[np.bool_]) -> None:
    program.limit(taken, ~shut)
