import math
import random

import pytest
from elastic_sim import Script, Sim, asks
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate_cases import ledger_of, lengths_of, limits, requests, step, tables
from simulate_oracle import slow_world

from flexfloor.simulate.costs import FREE, H200, Costs, ResidencyCosts, ShrinkCosts, h200_table
from flexfloor.simulate.world import simulate_step
from flexfloor.step_times import StepTimes

LADDERS = {1: [(1,)], 2: [(2, 1)], 4: [(4, 2), (4, 2, 1), (4, 1)]}
SIZES = (1, 2, 4)


def curves(table, sizes=SIZES):
    return {size: table.curve(size, extrapolate=True) for size in sizes}


@st.composite
def worlds(draw, *, longest=14):
    size = draw(st.sampled_from(SIZES))
    groups = draw(st.lists(requests(5, longest), min_size=size, max_size=size).filter(any))
    return groups, draw(st.sampled_from(LADDERS[size]))


@settings(max_examples=150, deadline=None)
@given(st.data(), st.booleans())
def test_a_full_world_takes_as_long_as_token_by_token(data, context):
    groups, _ = data.draw(worlds())
    bounds, table = data.draw(limits(groups)), data.draw(tables(SIZES, context=context))
    captures = data.draw(st.sampled_from([(), (1, 2, 4, 8)]))
    costs = Costs(prefill_tokens_per_s=100.0, prefill_step_s=0.01)
    outcome = simulate_step(step(groups, bounds=bounds, captures=captures), costs, curves(table))
    expected = slow_world(groups, bounds, table, prefill_rate=100.0, prefill_step=0.01, captures=captures)
    assert outcome.seconds == pytest.approx(expected.seconds, rel=1e-9)
    assert outcome.iterations == expected.iterations
    assert outcome.tokens == expected.tokens
    assert outcome.dummy_steps == expected.dummy_steps
    assert outcome.dummy_seconds == pytest.approx(expected.dummy_seconds, rel=1e-9, abs=1e-12)
    preempted = sum(mark.event == "preemption" for mark in outcome.marks)
    assert preempted == sum(len(trace.preemptions) for trace in outcome.traces) == expected.preemptions


@settings(max_examples=120, deadline=None)
@given(st.data(), st.sampled_from(["natural", "planned"]))
def test_every_log_passes_the_checks_and_occupies_at_most_all_ranks(data, residency):
    groups, ladder = data.draw(worlds())
    given_ = step(groups, ladder, bounds=data.draw(limits(groups)), captures=(1, 2, 4, 8), residency=residency)
    costs = H200.model_copy(update={"sleep_s": data.draw(st.sampled_from([0.0, 0.1, 5.0]))})
    outcome = simulate_step(given_, costs, curves(data.draw(tables(SIZES))))
    ledger = ledger_of(given_, outcome)
    assert ledger.problems == ()
    totals = ledger.totals
    assert totals.response_tokens == sum(r.length for group in groups for r in group)
    assert sum(len(trace.finished) for trace in outcome.traces) == sum(map(len, groups))
    assert 0 < totals.occupied.hi <= len(groups) * totals.window_seconds * (1 + 1e-12)
    assert [t.after for t in ledger.transitions] == [after for _, after, _, _ in outcome.commits]


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_free_shrinking_at_equal_speed_never_costs_efficiency(data):
    groups, ladder = data.draw(worlds())
    bounds, table = data.draw(limits(groups)), data.draw(tables(SIZES, same=True))
    elastic, full = (step(groups, sizes, bounds=bounds) for sizes in (ladder, ()))
    shrunk, whole = (simulate_step(one, FREE, curves(table)) for one in (elastic, full))
    assert shrunk.seconds == pytest.approx(whole.seconds, rel=1e-9)
    ours, theirs = ledger_of(elastic, shrunk).totals, ledger_of(full, whole).totals
    assert ours.efficiency.lo >= theirs.efficiency.lo * (1 - 1e-9)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_stages_are_those_that_real_sessions_decide(data, tmp_path_factory):
    size = data.draw(st.sampled_from([2, 4]))
    ranks = data.draw(st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=size, max_size=size).filter(any))
    ladder = data.draw(st.sampled_from(LADDERS[size]))
    order = tuple(data.draw(st.permutations(range(size))))
    given_ = step(lengths_of(*ranks), ladder)
    outcome = simulate_step(
        type(given_)(**{**vars(given_), "rank_order": order}), FREE, curves(StepTimes.constant(0.01, SIZES))
    )
    sessions = Sim(tmp_path_factory.mktemp("board"), size, 16, ladder[-1])
    sessions.rollout(Script(asks=asks(ranks), ladder=ladder, rank_order=order))
    assert [commit[:3] for commit in outcome.commits] == sessions.commits()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_longer_responses_and_slower_steps_never_save_time(data):
    groups, ladder = data.draw(worlds())
    table = data.draw(tables(SIZES, same=True))
    base = simulate_step(step(groups, ladder), FREE, curves(table))
    rank = next(i for i, group in enumerate(groups) if group)
    longer = [list(group) for group in groups]
    longer[rank][0] = longer[rank][0]._replace(length=longer[rank][0].length + data.draw(st.integers(1, 9)))
    assert simulate_step(step(longer, ladder), FREE, curves(table)).seconds >= base.seconds * (1 - 1e-12)
    slower = FREE.model_copy(update={"step_scale": 2.0})
    assert simulate_step(step(groups, ladder), slower, curves(table)).seconds == pytest.approx(
        2 * base.seconds, abs=1e-9
    )


@settings(max_examples=60, deadline=None)
@given(st.data(), st.floats(0, 2), st.floats(0, 2))
def test_slower_sleep_restore_and_shrinks_never_occupy_less(data, more, costly):
    groups, ladder = data.draw(worlds())
    table = data.draw(tables(SIZES))
    shrink = ResidencyCosts(shrink=ShrinkCosts(switch=0.1))
    cheap = Costs(sleep_s=0.1, restore_s=0.1, natural=shrink)
    dear = Costs(sleep_s=0.1 + more, restore_s=0.1 + costly, natural=shrink)
    given_ = step(groups, ladder)
    low, high = (ledger_of(given_, simulate_step(given_, c, curves(table))).totals for c in (cheap, dear))
    assert high.occupied.lo >= low.occupied.lo * (1 - 1e-9)
    assert high.window_seconds >= low.window_seconds * (1 - 1e-9)


def test_a_worked_step():
    """Ranks complete after 2, 4, 6, 10 iterations of 1 s; leavers wait for one iteration, then sleep for 0.5 s."""
    given_ = step(lengths_of([2], [4], [6], [10]), (4, 2, 1))
    shrink = ResidencyCosts(shrink=ShrinkCosts(switch=2.0))
    costs = Costs(prefill_tokens_per_s=1e12, sleep_s=0.5, restore_s=3.0, natural=shrink)
    table = StepTimes.constant(1.0, SIZES)
    outcome = simulate_step(given_, costs, curves(table))
    # The first token comes with the prefill, which takes no time here: iteration i ends at i - 1 seconds.
    assert outcome.commits == ((4, 2, (2, 3), 4), (2, 1, (3,), 6))
    assert math.isclose(outcome.seconds, 9 + 2 + 2 + 3)
    assert outcome.dummy_steps == 2 + 0 + 0 + 0
    free = {rank.rank: own.free.lo for rank, own in _ranks(given_, outcome).items() if own.free.lo}
    # 4 -> 2 is decided at 3 s and over at 5 s; ranks 0 and 1 detach at 6 s and sleep until 6.5 s. 2 -> 1 is decided
    # at 7 s and over at 9 s; rank 2 is free from 10.5 s. Generation ends at 13 s.
    assert free == pytest.approx({0: 6.5, 1: 6.5, 2: 2.5})


def test_leavers_wake_in_time_for_the_last_token_or_as_soon_as_they_can():
    """As above, but memory takes 2 s to come back: 0 and 1 have it at 13 s, rank 2 (asleep at 10.5 s) as well."""
    given_ = step(lengths_of([2], [4], [6], [10]), (4, 2, 1))
    shrink = ResidencyCosts(shrink=ShrinkCosts(switch=2.0))
    costs = Costs(prefill_tokens_per_s=1e12, sleep_s=0.5, wake_s=2.0, restore_s=1.0, natural=shrink)
    table = StepTimes.constant(1.0, SIZES)
    outcome = simulate_step(given_, costs, curves(table))
    assert math.isclose(outcome.seconds, 9 + 2 + 2 + 1)
    free = {rank.rank: own.free.lo for rank, own in _ranks(given_, outcome).items() if own.free.lo}
    assert free == pytest.approx({0: 4.5, 1: 4.5, 2: 0.5})
    late = simulate_step(given_, costs.model_copy(update={"wake_s": 3.0}), curves(table))
    assert math.isclose(late.seconds, 9 + 2 + 2 + 0.5 + 1), "rank 2 wakes at 10.5 s and has its memory at 13.5 s"


def _ranks(given_, outcome):
    return ledger_of(given_, outcome).entries[0].occupancy.ranks


def test_a_rank_without_requests_leaves_before_the_first_iteration():
    given_ = step(lengths_of([], [3], [], [5]), (4, 2))
    outcome = simulate_step(given_, FREE, curves(StepTimes.constant(1.0, SIZES)))
    assert outcome.commits == ((4, 2, (1, 3), 0),)
    assert ledger_of(given_, outcome).problems == ()


def test_planned_residency_moves_nothing_and_captures_nothing():
    groups = lengths_of([2], [4], [6], [10])
    parts = {}
    for residency in ("natural", "planned"):
        given_ = step(groups, (4, 2), residency=residency, captures=(1, 2))
        (commit,) = ledger_of(given_, simulate_step(given_, H200, curves(StepTimes.constant(1.0, SIZES)))).transitions
        parts[residency] = commit
    assert parts["natural"].moved_bytes == 8 * H200.expert_bytes
    assert parts["natural"].seconds["capture"] == pytest.approx(0.065)
    assert parts["planned"].moved_bytes == 0
    assert not {"move", "capture"} & set(parts["planned"].seconds)


def test_the_planner_predicts_what_is_simulated():
    """Two implementations, one by token position and one by events, part by no more than single iterations."""
    rate, sections = pytest.importorskip("flexfloor.planner.rate"), pytest.importorskip("flexfloor.config.sections")
    costs = Costs(
        prefill_tokens_per_s=1e12,
        pad_to_captures=False,
        sleep_s=0.1,
        restore_s=0.45,
        natural=ResidencyCosts(prepare_s=0.3, shrink=ShrinkCosts(switch=0.2)),
    )
    told = sections.TransitionsConfig(prepare_s=0.3, shrink_s=0.2, release_s=0.1, restore_s=0.45)
    table = {size: h200_table().curve(size, extrapolate=True, experts=128) for size in SIZES}
    for seed in range(20):
        draw = random.Random(seed)
        lengths = [[draw.randint(50, 3000) for _ in range(draw.randint(1, 16))] for _ in range(4)]
        ends, ladder = sorted(map(max, lengths)), draw.choice(LADDERS[4])
        given_ = step(lengths_of(*lengths), ladder)
        outcome = simulate_step(given_, costs, table)
        quorums = [ends[4 - size - 1] for size in ladder[1:]]
        predicted = rate.predict(rate.Load.of(lengths), ladder, quorums, table, told)
        assert outcome.seconds == pytest.approx(predicted.seconds, rel=2e-3)
        occupied = ledger_of(given_, outcome).totals.occupied.mid
        assert occupied == pytest.approx(predicted.rank_seconds, rel=2e-3)
