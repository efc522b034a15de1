"""The integer solvers behind PuLP, set up so that an optimum is exact and reproducible.

HiGHS is the default: it runs in this process, so that one step of 32 prompts costs milliseconds, and it returns the
duals that prove ties. CBC starts a process for every solve; it is kept as a second opinion.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import sys
import warnings
from typing import Literal

import highspy
import numpy as np
import pulp

from flexfloor.config import SolverConfig
from flexfloor.errors import PlanningError

Status = Literal["optimal", "feasible", "infeasible", "limit"]
"""`feasible`: stopped at the time limit with a solution; `limit`: stopped without one."""

Terms = list[tuple[pulp.LpVariable, float]]

WHOLE = 1e-6
"""A value this near to an integer is that integer."""


class LinearProgram:
    """One minimisation, built row by row.

    Args:
        config: which solver, and its limits.
        gap: relative distance to the optimum at which a solve in whole numbers may stop.
        seconds: limit of a solve in whole numbers below the configuration's.
    """

    def __init__(self, config: SolverConfig, gap: float = 0.0, seconds: float = math.inf) -> None:
        self._config, self._gap, self._seconds = config, gap, seconds
        self._problem = pulp.LpProblem("step", pulp.LpMinimize)
        self._integers: list[pulp.LpVariable] = []
        self._variables = 0

    def variable(self, low: float, high: float | None, *, integer: bool = False) -> pulp.LpVariable:
        """A new variable; integer ones are relaxed until `solve` is asked for whole numbers."""
        self._variables += 1
        variable = self._problem.add_variable(f"v{self._variables}", low, high)
        if integer:
            self._integers.append(variable)
        return variable

    def row(self, terms: Terms, sense: Literal["=", "<=", ">="], value: float) -> None:
        """Adds a constraint."""
        code = {"=": pulp.LpConstraintEQ, "<=": pulp.LpConstraintLE, ">=": pulp.LpConstraintGE}[sense]
        self._problem.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), code, rhs=value))

    def minimise(self, terms: Terms) -> None:
        """Sets the objective."""
        self._problem.setObjective(pulp.LpAffineExpression(terms))

    def solve(self, *, whole: bool) -> Status:
        """Solves the relaxation, or the problem in whole numbers.

        Raises:
            PlanningError: the solver is missing or failed.
        """
        for variable in self._integers:
            variable.cat = pulp.LpInteger if whole else pulp.LpContinuous
        limit = min(self._config.time_limit_s, self._seconds) if whole else self._config.time_limit_s
        if self._config.name == "highs":
            _say_hello_to_nobody()
            solver = _Highs(msg=False, gapRel=self._gap, gapAbs=0, threads=1, timeLimit=limit)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 4 moves CBC into an extra; we pin PuLP 3
                solver = pulp.PULP_CBC_CMD(msg=False, gapRel=self._gap, gapAbs=0, threads=1, timeLimit=limit)
        try:
            self._problem.solve(solver)
        except pulp.PulpSolverError as error:
            raise PlanningError(f"solver '{self._config.name}' failed: {error}") from error
        if self._problem.status in (pulp.LpStatusInfeasible, pulp.LpStatusUndefined):
            return "infeasible"
        if self._problem.sol_status == pulp.LpSolutionOptimal:
            return "optimal"
        if whole and self._problem.sol_status == pulp.LpSolutionIntegerFeasible and self.is_whole():
            return "feasible"
        return "limit"

    @property
    def objective(self) -> float:
        """Objective value of the last solve."""
        return 0.0 if self._problem.objective is None else float(self._problem.objective.value() or 0.0)

    def is_whole(self) -> bool:
        """Whether the last solution is whole in all integer variables."""
        return all(abs(v.varValue - round(v.varValue)) < WHOLE for v in self._integers)


class _Highs(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's HiGHS with the same model handed over in bulk; column by column it takes longer than the solve."""

    def buildSolverModel(self, lp: pulp.LpProblem) -> None:  # noqa: N802 (PuLP's name)
        """Columns, integrality and rows of a minimisation, each in one call."""
        columns, rows, free = lp.variables(), list(lp._constraints.values()), highspy.kHighsInf
        for index, variable in enumerate(columns):
            variable.index = index
        costs = np.array([lp.objective.get(variable, 0.0) for variable in columns], dtype=np.float64)
        low = np.array([-free if v.lowBound is None else v.lowBound for v in columns], dtype=np.float64)
        high = np.array([free if v.upBound is None else v.upBound for v in columns], dtype=np.float64)
        none = np.empty(0, dtype=np.int32)
        lp.solverModel.addCols(len(columns), costs, low, high, 0, none, none, none.astype(np.float64))
        whole = np.array([v.index for v in columns if v.cat == pulp.LpInteger and self.mip], dtype=np.int32)
        if whole.size:
            kinds = np.full(whole.size, int(highspy.HighsVarType.kInteger), dtype=np.uint8)
            lp.solverModel.changeColsIntegrality(whole.size, whole, kinds)
        entries: list[int] = []
        values: list[float] = []
        starts, least, most = [], [], []
        for index, row in enumerate(rows):
            row.index = index
            starts.append(len(entries))
            for variable, value in row.items():
                if value:
                    entries.append(variable.index)
                    values.append(value)
            lower, upper = row.getLb(), row.getUb()
            least.append(-free if lower is None else lower)
            most.append(free if upper is None else upper)
        lp.solverModel.addRows(
            len(rows),
            np.array(least, dtype=np.float64),
            np.array(most, dtype=np.float64),
            len(entries),
            np.array(starts, dtype=np.int32),
            np.array(entries, dtype=np.int32),
            np.array(values, dtype=np.float64),
        )


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
