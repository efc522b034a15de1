"""The integer solvers, set up so that an optimum is exact and reproducible.

HiGHS is the default: it runs in this process, so that one step of 32 prompts costs milliseconds, and it returns the
duals that prove ties. It is handed the arrays of a programme as they are; an object a variable, as in PuLP's models,
costs more than the solve. CBC is kept as a second opinion, behind a PuLP model of the same arrays; it starts a process
for every solve.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Literal

import highspy
import numpy as np
import pulp
from numpy.typing import ArrayLike, NDArray

from flexfloor.config import SolverConfig
from flexfloor.errors import PlanningError
from flexfloor.planner.demand import IntArray

Status = Literal["optimal", "feasible", "infeasible", "limit"]
"""`feasible`: stopped at the time limit with a solution; `limit`: stopped without one."""

Floats = NDArray[np.float64]

WHOLE = 1e-6
"""A value this near to an integer is that integer."""

_INFINITE = math.inf


class LinearProgram:
    """One minimisation, built in blocks of variables and rows.

    Args:
        config: which solver, and its limits.
        gap: relative distance to the optimum at which a solve in whole numbers may stop.
        seconds: limit of a solve in whole numbers below the configuration's.
        presolve: whether the relaxation is presolved too, which takes longer than a small one of pairs.

    Attributes:
        values: solution of the last solve, shape (variables,).
        duals: reduced costs of the last solve, same shape; zeros where the solver gives none.
    """

    def __init__(
        self, config: SolverConfig, gap: float = 0.0, seconds: float = math.inf, *, presolve: bool = True
    ) -> None:
        self._config, self._gap, self._seconds, self._presolve = config, gap, seconds, presolve
        self._low, self._high, self._costs = np.empty(0), np.empty(0), np.empty(0)
        self._integer = np.empty(0, dtype=bool)
        self._rows: list[tuple[IntArray, IntArray, Floats]] = []
        self._row_low: list[Floats] = []
        self._row_high: list[Floats] = []
        self._row_count = 0
        self.values, self.duals = np.empty(0), np.empty(0)

    def variables(self, count: int, low: ArrayLike, high: ArrayLike, *, integer: bool = False) -> IntArray:
        """New variables, their indices; integer ones are relaxed until `solve` is asked for whole numbers.

        Args:
            count: how many.
            low: lower bounds, one or ``count``.
            high: upper bounds, one or ``count``; infinity for none.
            integer: whether they are whole.
        """
        first = len(self._low)
        self._low = np.concatenate([self._low, np.broadcast_to(np.asarray(low, dtype=np.float64), count)])
        self._high = np.concatenate([self._high, np.broadcast_to(np.asarray(high, dtype=np.float64), count)])
        self._integer = np.concatenate([self._integer, np.full(count, integer)])
        self._costs = np.concatenate([self._costs, np.zeros(count)])
        return np.arange(first, first + count, dtype=np.int64)

    def rows(
        self,
        entries: Sequence[tuple[ArrayLike, ArrayLike, float]],
        sense: Literal["=", "<=", ">="],
        value: ArrayLike,
        count: int = 1,
    ) -> None:
        """Adds constraints.

        Args:
            entries: blocks of coefficients: row (from 0 within these), variable, coefficient; rows and variables
                broadcast.
            sense: of all of them.
            value: right-hand sides, one or ``count``.
            count: how many.
        """
        right = np.array(np.broadcast_to(np.asarray(value, dtype=np.float64), count))
        free = np.full(count, _INFINITE)
        self._row_low.append(-free if sense == "<=" else right)
        self._row_high.append(free if sense == ">=" else right)
        for rows, variables, coefficient in entries:
            row, variable = np.broadcast_arrays(np.asarray(rows, dtype=np.int64), np.asarray(variables, dtype=np.int64))
            filled = np.full(row.size, float(coefficient))
            self._rows.append((row.ravel() + self._row_count, variable.ravel(), filled))
        self._row_count += count

    def minimise(self, variables: IntArray, costs: ArrayLike) -> None:
        """Sets the costs of these variables."""
        self._costs[variables] = costs

    def limit(self, variables: IntArray, high: ArrayLike) -> None:
        """Sets upper bounds, never below the lower ones."""
        self._high[variables] = np.maximum(high, self._low[variables])

    def solve(self, *, whole: bool) -> Status:
        """Solves the relaxation, or the problem in whole numbers.

        Raises:
            PlanningError: the solver is missing or failed.
        """
        limit = min(self._config.time_limit_s, self._seconds) if whole else self._config.time_limit_s
        status = self._highs(limit, whole=whole) if self._config.name == "highs" else self._cbc(limit, whole=whole)
        return "limit" if status == "feasible" and not (whole and self.is_whole()) else status

    @property
    def objective(self) -> float:
        """Objective value of the last solve."""
        return float(self._costs @ self.values)

    def is_whole(self) -> bool:
        """Whether the last solution is whole in all integer variables."""
        return are_whole(self.values[self._integer])

    def _entries(self) -> tuple[IntArray, IntArray, Floats]:
        """Start of every row, variables and coefficients, row by row."""
        row, variable, value = (np.concatenate(parts) for parts in zip(*self._rows, strict=True))
        order = np.argsort(row, kind="stable")
        starts = np.searchsorted(row[order], np.arange(self._row_count))
        return starts, variable[order], value[order]

    def _highs(self, limit: float, *, whole: bool) -> Status:
        _say_hello_to_nobody()
        solver = highspy.Highs()
        for name, value in (
            ("output_flag", False),
            ("presolve", "choose" if whole or self._presolve else "off"),
            ("mip_rel_gap", self._gap),
            ("mip_abs_gap", 0.0),
            ("threads", 1),
            ("time_limit", float(limit)),
        ):
            solver.setOptionValue(name, value)
        none = np.empty(0, dtype=np.int32)
        count = len(self._low)
        solver.addCols(count, self._costs, self._low, self._high, 0, none, none, none.astype(np.float64))
        if whole:
            integers = np.flatnonzero(self._integer).astype(np.int32)
            kinds = np.full(integers.size, int(highspy.HighsVarType.kInteger), dtype=np.uint8)
            solver.changeColsIntegrality(integers.size, integers, kinds)
        starts, variables, values = self._entries()
        solver.addRows(
            self._row_count,
            np.concatenate(self._row_low),
            np.concatenate(self._row_high),
            len(values),
            starts.astype(np.int32),
            variables.astype(np.int32),
            values,
        )
        solver.run()
        status, solution = solver.getModelStatus(), solver.getSolution()
        kinds_of = highspy.HighsModelStatus
        if status in (kinds_of.kInfeasible, kinds_of.kUnboundedOrInfeasible):
            return "infeasible"
        self.values, self.duals = np.array(solution.col_value), np.array(solution.col_dual)
        if len(self.values) != count or status not in (kinds_of.kOptimal, kinds_of.kTimeLimit):
            return "limit"
        if status == kinds_of.kOptimal:
            return "optimal"
        return "feasible" if math.isfinite(solver.getObjectiveValue()) else "limit"

    def _cbc(self, limit: float, *, whole: bool) -> Status:
        problem = pulp.LpProblem("step", pulp.LpMinimize)
        columns = [
            problem.add_variable(
                f"v{k}",
                low,
                high if math.isfinite(high) else None,
                pulp.LpInteger if integer and whole else "Continuous",
            )
            for k, (low, high, integer) in enumerate(
                zip(self._low.tolist(), self._high.tolist(), self._integer.tolist(), strict=True)
            )
        ]
        starts, variables, values = (part.tolist() for part in self._entries())
        bounds = zip(np.concatenate(self._row_low).tolist(), np.concatenate(self._row_high).tolist(), strict=True)
        for (low, high), start, stop in zip(bounds, starts, [*starts[1:], len(values)], strict=True):
            terms = pulp.LpAffineExpression([(columns[variables[k]], values[k]) for k in range(start, stop)])
            sense = (
                pulp.LpConstraintEQ if low == high else pulp.LpConstraintLE if high < math.inf else pulp.LpConstraintGE
            )
            problem.addConstraint(pulp.LpConstraint(terms, sense, rhs=high if high < math.inf else low))
        priced = [(v, cost) for v, cost in zip(columns, self._costs.tolist(), strict=True) if cost]
        problem.setObjective(pulp.LpAffineExpression(priced))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 4 moves CBC into an extra; we pin PuLP 3
            solver = pulp.PULP_CBC_CMD(msg=False, gapRel=self._gap, gapAbs=0, threads=1, timeLimit=limit)
        try:
            problem.solve(solver)
        except pulp.PulpSolverError as error:
            raise PlanningError(f"solver 'cbc' failed: {error}") from error
        self.values = np.array([v.varValue or 0.0 for v in columns])
        self.duals = np.array([v.dj or 0.0 for v in columns])
        if problem.status in (pulp.LpStatusInfeasible, pulp.LpStatusUndefined):
            return "infeasible"
        if problem.sol_status == pulp.LpSolutionOptimal:
            return "optimal"
        return "feasible" if problem.sol_status == pulp.LpSolutionIntegerFeasible else "limit"


def are_whole(values: Floats) -> bool:
    """Whether all values are whole."""
    return bool(np.all(np.abs(values - np.round(values)) < WHOLE))


@functools.cache
def _say_hello_to_nobody() -> None:
    """Lets HiGHS print the banner of its first use where nobody reads it: standard output belongs to the caller."""
    sys.stdout.flush()
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:  # noqa: PTH123 (a device, not a path)
        kept = os.dup(1)
        try:
            os.dup2(nowhere.fileno(), 1)
            highspy.Highs()
            ctypes.CDLL(None).fflush(None)
        finally:
            os.dup2(kept, 1)
            os.close(kept)
