"""The rules of planner.md, section by section, on small cases worked by hand."""

import random
from fractions import Fraction

import numpy as np
import pytest
from planner_oracle import Oracle, make_config, make_history

from flexfloor.config import TailGuardConfig
from flexfloor.history import Observation, replay
from flexfloor.planner import plan_epoch
from flexfloor.planner.buckets import choose_buckets, expected_trace
from flexfloor.planner.demand import KvRules, Prompt, build_demand, to_micro
from flexfloor.planner.layout import contiguous_groups
from flexfloor.planner.tail_guard import guard_ratio, step_cap

GUARD = TailGuardConfig()


def test_guard_ratio_is_the_higher_quantile_of_the_last_transitions():
    pairs = {1: [(900, 1.0)], 2: [(200, 100.0)], 3: [(50, 100.0)], 4: [(150, 100.0), (120, 100.0)]}
    assert guard_ratio(pairs, GUARD) == pytest.approx(2.0)
    assert guard_ratio(pairs, GUARD.model_copy(update={"q": 0.5})) == pytest.approx(1.5)
    assert guard_ratio(pairs, GUARD.model_copy(update={"window": 1, "q": 0.1})) == pytest.approx(1.5)
    assert guard_ratio({3: [(50, 100.0)]}, GUARD) == 1.0
    assert guard_ratio({}, GUARD) is None
    assert guard_ratio({}, GUARD.model_copy(update={"initial_rho": 1.25})) == 1.25


@pytest.mark.parametrize(
    ("longest", "rho", "cap"),
    [
        (1000, 1.5, 4096),
        (4096, 1.0, 4096),
        (4096, 1.01, 4608),
        (5000, 1.2, 6144),
        (16000, 1.2, 16384),
        (5000, None, None),
    ],
)
def test_cap_rounds_up_between_c_min_and_l_max(longest, rho, cap):
    assert step_cap(to_micro(longest), rho, GUARD) == cap
    assert step_cap(to_micro(longest), rho, GUARD.model_copy(update={"enabled": False})) is None


def test_cap_comes_from_the_prediction_in_force_before_the_observation():
    observations = [Observation("a", 0, 0, (1000,)), Observation("a", 1, 0, (2000,)), Observation("b", 1, 0, (100,))]
    guard = {"c_min": 64, "rounding": 64, "l_max": 8192}
    config = make_config(1, 1, 1, {1: 10**6}, tail_guard=guard)
    plan = plan_epoch(config, replay(observations, 0.5))
    # rho = 2000/1000; tails 100 and 1500
    assert [step.cap for step in plan.steps] == [256, 3008]
    assert [step.items for step in plan.steps] == [("b",), ("a",)]


def test_a_cap_clips_completions_and_kv():
    config = make_config(1, 1, 2, {1: 10**6}, mu=1.5, tail_guard={"enabled": False, "l_max": 100})
    step = plan_epoch(config, make_history({"a": [90, 10]})).steps[0]
    assert (step.cap, step.tail, step.ranks[0].peak_tokens) == (None, 90, 100)
    short = make_config(1, 1, 2, {1: 10**6}, tail_guard={"enabled": False, "l_max": 50})
    step = plan_epoch(short, make_history({"a": [90, 10]})).steps[0]
    assert (step.tail, step.ranks[0].completion, step.ranks[0].peak_tokens) == (50, 50, 50)


def test_mu_is_an_exact_decimal_rounded_up():
    rules = KvRules(Fraction(make_config(1, 1, 1, {}, mu=1.16).mu), 1, prompt_sharing=True, responses=1)
    for length, inflated in ((25, 29), (100, 116), (1, 2), (50, 58), (75, 87)):
        demand = build_demand([Prompt("a", to_micro(length), (length,), 0)], 10**6, rules)
        assert demand.rows.tolist() == [[inflated]]


@pytest.mark.parametrize(("block", "rows"), [(1, [21, 19]), (16, [48, 48]), (4, [24, 24])])
def test_block_rounding_shares_the_first_block_with_the_prompt(block, rows):
    rules = KvRules(Fraction(1), block, prompt_sharing=True, responses=2)
    demand = build_demand([Prompt("a", to_micro(21), (21, 19), 37)], 10**6, rules)
    assert demand.rows.tolist() == [rows]
    assert demand.prompts.tolist() == [37 // block * block]
    unshared = KvRules(Fraction(1), block, prompt_sharing=False, responses=2)
    assert unshared.prompt_rows([Prompt("a", 1, (1,), 37)]).tolist() == [37 // block * block * 2]


def test_prompts_count_in_admission_and_not_in_the_peak():
    lengths = {"a": [10], "b": [10]}
    for tokens, safe in ((5, True), (6, False)):
        step = plan_epoch(make_config(1, 2, 1, {1: 30}), make_history(lengths, tokens)).steps[0]
        assert (step.kv_safe, step.ranks[0].peak_tokens) == (safe, 20)


def test_over_capacity_the_world_is_the_fallback_with_the_smallest_worst_peak():
    lengths = {"a": [100], "b": [90], "c": [20], "d": [10]}
    step = plan_epoch(make_config(2, 4, 1, {1: 50, 2: 50}), make_history(lengths)).steps[0]
    assert (step.ladder, step.release_area, step.kv_safe) == ((2,), 0, False)
    # With a and b apart the worst peak is 100 either way and the cost is the same: the smaller list of groups.
    assert [entry.items for entry in step.ranks] == [("d", "b"), ("c", "a")]


def test_a_safe_smaller_floor_beats_an_unsafe_world():
    lengths = {f"i{k}": [10] for k in range(4)}
    step = plan_epoch(make_config(2, 4, 1, {1: 100, 2: 5}), make_history(lengths)).steps[0]
    assert (step.ladder, step.kv_safe, step.release_area) == ((2, 1), True, 0)


def test_fewer_prompts_than_ranks_leave_ranks_empty_and_done_at_0():
    config = make_config(4, 2, 1, {1: 100, 2: 100, 4: 100})
    step = plan_epoch(config, make_history({"a": [30], "b": [90]})).steps[0]
    assert [entry.completion for entry in step.ranks] == [0, 0, 30, 90]
    assert (step.ladder, step.quorum_times, step.release_area) == ((4, 2, 1), (0, 30), 2 * 90 + 60)


def test_rank_order_says_who_leaves_first():
    lengths = {f"i{k}": [10 * k + 1] for k in range(4)}
    config = make_config(4, 4, 1, {2: 100, 4: 100}, rank_order=[3, 1, 0, 2])
    step = plan_epoch(config, make_history(lengths)).steps[0]
    assert [entry.items for entry in step.ranks] == [("i2",), ("i1",), ("i3",), ("i0",)]


def test_capacity_need_not_be_monotone_in_the_floor():
    lengths = {"a": [10], "b": [20], "c": [90], "d": [100]}
    step = plan_epoch(make_config(2, 4, 1, {1: 1000, 2: 1000}), make_history(lengths)).steps[0]
    tight = plan_epoch(make_config(2, 4, 1, {1: 1000, 2: 1}), make_history(lengths)).steps[0]
    assert step.release_area == tight.release_area == 80
    assert tight.floor == 1


def test_fixed_keeps_its_floor_or_the_world():
    lengths = {f"i{k}": [10] for k in range(8)}
    config = make_config(4, 8, 1, {1: 100, 2: 100, 4: 100}, method="fixed", fixed_floor=2)
    assert plan_epoch(config, make_history(lengths)).steps[0].ladder == (4, 2)
    tight = make_config(4, 8, 1, {1: 100, 2: 5, 4: 100}, method="fixed", fixed_floor=2)
    assert plan_epoch(tight, make_history(lengths)).steps[0].ladder == (4,)


@pytest.mark.parametrize("seed", range(4))
def test_min_skew_is_the_least_total_gap(seed):
    rng = random.Random(seed)
    lengths = {f"i{k}": [rng.randint(1, 60) for _ in range(2)] for k in range(8)}
    config = make_config(4, 8, 2, {2: 150, 4: 170}, method="minskew")
    step = plan_epoch(config, make_history(lengths)).steps[0]
    oracle = Oracle(config, lengths, dict.fromkeys(lengths, 0))
    areas = {floor: oracle.best_skew_area(floor) for floor in (2, 4)}
    if step.kv_safe:
        assert step.release_area in areas[step.floor]
        admitted = [g for g in oracle.groupings if oracle.safe(g, config.capacity[step.floor])]
        mine = [entry.items for entry in step.ranks]
        assert oracle.skew(mine) == min(map(oracle.skew, admitted))
    else:
        assert areas == {2: None, 4: None}


def test_unseen_quantile_predicts_and_says_so():
    lengths = {f"i{k}": [10 * k + 1] for k in range(11)}
    config = make_config(2, 4, 1, {1: 10**6, 2: 10**6}, history={"unseen": "quantile", "unseen_quantile": 0.5})
    step = plan_epoch(config, make_history(lengths), ["new", "i0", "i1", "i10"]).steps[0]
    assert step.items == ("i0", "i1", "new", "i10")
    assert step.ladder == (2, 1)
    assert "1 prompts without history are predicted by a quantile of the known tails: 51" in step.notes


def test_repair_swaps_as_few_and_as_near_prompts_as_possible():
    # The second step holds two long prompts too many for one rank; the first one has room.
    lengths = {"a": [10], "b": [11], "c": [12], "d": [60], "e": [61], "f": [62]}
    config = make_config(2, 3, 1, {2: 75})
    plan = plan_epoch(config, make_history(lengths))
    assert all(step.kv_safe for step in plan.steps)
    assert plan.swaps == ((1, "d", "c"),)
    assert sorted(i for step in plan.steps for i in step.items) == sorted(lengths)
    off = make_config(2, 3, 1, {2: 75}, repair={"max_swaps": 0})
    assert [step.kv_safe for step in plan_epoch(off, make_history(lengths)).steps] == [True, False]


def test_what_cannot_be_repaired_falls_back():
    lengths = {k: [60] for k in "abcdef"}
    plan = plan_epoch(make_config(2, 3, 1, {2: 75}), make_history(lengths))
    assert [step.kv_safe for step in plan.steps] == [False, False]
    assert plan.swaps == ()
    assert [step.ladder for step in plan.steps] == [(2,), (2,)]


def test_the_short_step_comes_last_and_uneven_groups_differ_by_one():
    lengths = {f"i{k}": [k + 1] for k in range(11)}
    plan = plan_epoch(make_config(3, 7, 1, {1: 99, 3: 99}), make_history(lengths))
    assert [len(step.items) for step in plan.steps] == [7, 4]
    assert [sorted(len(entry.items) for entry in step.ranks) for step in plan.steps] == [[2, 2, 3], [1, 1, 2]]
    assert contiguous_groups(7, 3) == [(0, 1), (2, 3), (4, 5, 6)]


def test_buckets_minimise_padded_rows_and_end_at_the_largest():
    assert choose_buckets({1: 100, 2: 1, 7: 50}, 8, 2) == (1, 8)
    assert choose_buckets({1: 100, 2: 1, 7: 50}, 8, 3) == (1, 7, 8)
    assert choose_buckets({3: 5}, 3, 8) == (3,)
    assert choose_buckets({}, 4, 8) == (4,)
    assert choose_buckets({}, 0, 8) == ()
    assert expected_trace([np.array([[5, 2]]), np.array([[2]])]) == {2: 2, 1: 5}
