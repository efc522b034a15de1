"""The linear programmes behind exact placement: both solvers against every choice tried by hand."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexfloor.config import SolverConfig
from flexfloor.planner.solver import LinearProgram

np = pytest.importorskip("numpy")
HIGHS, CBC = SolverConfig(name="highs"), SolverConfig(name="cbc")
FACTORS = st.integers(-4, 4)
ROWS = st.lists(st.tuples(st.lists(FACTORS, min_size=4, max_size=4), st.sampled_from(["=", "<=", ">="])), max_size=3)


def built(solver, costs, rows, values, high=1, **more):
    program = LinearProgram(solver, **more)
    whole = program.variables(3, 0, high, integer=True)
    loose = program.variables(1, [-2], np.inf)
    every = np.concatenate([whole, loose])
    for (factors, sense), value in zip(rows, values, strict=True):
        entries = [(0, [variable], float(factor)) for variable, factor in zip(every, factors, strict=True)]
        program.rows(entries, sense, value)
    program.rows([(0, loose, 1.0)], "<=", 3)
    program.minimise(every, costs)
    return program


def tried(costs, rows, values):
    """The least cost over all whole choices; the loose variable is best at an end of what the rows leave of it."""
    best = None
    for chosen in itertools.product((0, 1), repeat=3):
        low, high, possible = -2.0, 3.0, True
        for (factors, sense), value in zip(rows, values, strict=True):
            left, factor = value - sum(f * x for f, x in zip(factors, chosen, strict=False)), factors[3]
            if factor == 0:
                possible &= {"=": left == 0, "<=": left >= 0, ">=": left <= 0}[sense]
                continue
            at = left / factor
            if sense == "=" or (sense == "<=") == (factor > 0):
                high = min(high, at)
            if sense == "=" or (sense == ">=") == (factor > 0):
                low = max(low, at)
        if possible and low <= high + 1e-9:
            cost = sum(c * x for c, x in zip(costs, chosen, strict=False)) + costs[3] * (low if costs[3] > 0 else high)
            best = cost if best is None else min(best, cost)
    return best


@settings(max_examples=60, deadline=None)
@given(st.lists(FACTORS, min_size=4, max_size=4), ROWS, st.data())
def test_highs_finds_the_least_cost(costs, rows, data):
    values = [data.draw(FACTORS) for _ in rows]
    program, least = built(HIGHS, costs, rows, values), tried(costs, rows, values)
    status = program.solve(whole=True)
    assert status == ("infeasible" if least is None else "optimal")
    if least is not None:
        assert program.objective == pytest.approx(least, abs=1e-5), "rows hold within 1e-6, costs are up to 4"
        assert program.is_whole()


@pytest.mark.parametrize("seed", range(6))
def test_cbc_and_highs_agree(seed):
    random = np.random.default_rng(seed)
    costs = random.integers(-4, 5, 4).tolist()
    rows = [(random.integers(-4, 5, 4).tolist(), sense) for sense in ("<=", ">=", "=")[: 1 + seed % 3]]
    values = random.integers(-3, 4, len(rows)).tolist()
    programs = [built(solver, costs, rows, values) for solver in (HIGHS, CBC)]
    statuses = [program.solve(whole=True) for program in programs]
    assert statuses[0] == statuses[1] == ("infeasible" if tried(costs, rows, values) is None else "optimal")
    if statuses[0] == "optimal":
        assert programs[0].objective == pytest.approx(programs[1].objective, abs=1e-6)


@pytest.mark.parametrize("presolve", [True, False])
def test_reduced_costs_bound_what_a_variable_adds(presolve):
    costs, rows = [5.0, 2.0, 9.0], [([1, 1, 1, 0], "=")]
    program = built(HIGHS, [*costs, 0.0], rows, [1], presolve=presolve)
    assert program.solve(whole=False) == "optimal"
    assert program.objective == pytest.approx(2)
    assert program.duals[[0, 2]] == pytest.approx([3, 7])
    program.limit(np.array([1]), 0)
    assert program.solve(whole=False) == "optimal"
    assert program.objective == pytest.approx(5)
    forced = LinearProgram(HIGHS)
    taken = forced.variables(2, [1, 0], 1, integer=True)
    forced.limit(taken, 0)
    forced.rows([(0, taken, 1.0)], ">=", 1)
    assert forced.solve(whole=True) == "optimal"
    assert forced.values == pytest.approx([1, 0])


def test_a_relaxation_may_be_split_where_whole_numbers_may_not():
    program = built(HIGHS, [1.0, 1.0, 1.0, 0.0], [([2, 2, 2, 0], "=")], [3])
    assert program.solve(whole=False) == "optimal"
    assert not program.is_whole()
    assert program.solve(whole=True) == "infeasible"
