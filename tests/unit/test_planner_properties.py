"""What holds for every plan, on random steps (issue 3, line 4)."""

from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planner_oracle import Oracle, make_config, make_history

from flexfloor.history import LengthHistory
from flexfloor.plan import release_area
from flexfloor.planner import plan_epoch

PROFILE = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@st.composite
def steps(draw, max_group=3):
    """(config, lengths, prompt tokens) of one step of up to 6 ranks."""
    world = draw(st.integers(1, 6))
    prompts = draw(st.integers(1, max_group * world))
    responses = draw(st.integers(1, 3))
    spread = draw(st.sampled_from([5, 60, 1000]))
    rows = st.lists(st.integers(1, spread), min_size=responses, max_size=responses)
    lengths = {f"i{k}": draw(rows) for k in range(prompts)}
    tokens = {item: draw(st.sampled_from([0, 3, 20])) for item in lengths}
    full = -(-prompts // world) * responses * spread
    sizes = draw(st.sets(st.integers(1, world)))
    capacity = {size: draw(st.integers(full // 4, full + 40)) for size in sizes | {world}}
    config = make_config(world, prompts, responses, capacity, tail_guard={"enabled": False, "l_max": spread})
    return config, lengths, tokens


def planned(config, lengths, tokens, **changes):
    return plan_epoch(config.model_copy(update=changes), make_history(lengths, tokens)).steps[0]


@PROFILE
@given(steps())
def test_every_prompt_once_no_unsafe_group_quotas_met_area_recomputed(case):
    config, lengths, tokens = case
    oracle = Oracle(config, {key: [1] for key in list(lengths)[:1]}, tokens)
    oracle.lengths = lengths
    for method in ("flex", "minskew", "fixed"):
        step = planned(config, lengths, tokens, method=method, fixed_floor=config.admissible_sizes[-1])
        assert Counter(i for entry in step.ranks for i in entry.items) == Counter(lengths.keys())
        sizes = sorted(len(entry.items) for entry in step.ranks)
        assert sizes[-1] - sizes[0] <= 1
        for entry in step.ranks:
            a, need = oracle.need(entry.items)
            assert entry.peak_tokens == a
            assert entry.completion == (oracle.tail(entry.items) if entry.items else 0)
            assert not step.kv_safe or need <= config.capacity[step.floor]
        ends = sorted(entry.completion for entry in step.ranks)
        for size, time in zip(step.ladder[1:], step.quorum_times, strict=True):
            assert sum(end <= time for end in ends) >= config.world_size - size
        assert step.release_area == release_area(step.ladder, step.quorum_times, step.tail)
        assert step.ladder == tuple(s for s in config.admissible_sizes if s >= step.floor)
        assert 0 <= step.optimality_gap <= 1


@PROFILE
@given(steps())
def test_flex_is_never_below_minskew(case):
    flex, skew = (planned(*case, method=method) for method in ("flex", "minskew"))
    assert flex.release_area >= skew.release_area
    assert flex.kv_safe == skew.kv_safe


@PROFILE
@given(steps(), st.randoms(use_true_random=False))
def test_a_permutation_of_the_input_gives_the_same_plan(case, random):
    config, lengths, tokens = case
    items = list(lengths)
    random.shuffle(items)
    shuffled = {item: lengths[item] for item in items}
    for method in ("flex", "minskew", "lengthsort", "ls_tg"):
        assert planned(config, lengths, tokens, method=method) == planned(config, shuffled, tokens, method=method)


@PROFILE
@given(steps(max_group=2), st.floats(0.3, 1.0))
def test_a_worse_capacity_never_gives_a_larger_area(case, factor):
    config, lengths, tokens = case
    step = planned(config, lengths, tokens)
    less = {size: int(capacity * factor) for size, capacity in config.capacity.items()}
    kv = config.kv.model_copy(update={"capacity": config.kv.capacity.model_copy(update={"natural": less})})
    assert planned(config, lengths, tokens, kv=kv).release_area <= step.release_area


@PROFILE
@given(st.integers(2, 6), st.integers(1, 9))
def test_a_floor_tie_goes_to_the_larger(world, length):
    lengths = {f"i{k}": [length] for k in range(2 * world)}
    config = make_config(world, 2 * world, 1, dict.fromkeys(range(1, world + 1), 10**6))
    step = planned(config, lengths, dict.fromkeys(lengths, 0))
    assert (step.floor, step.release_area, step.kv_safe) == (world, 0, True)


@PROFILE
@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=14), st.integers(1, 4))
def test_a_repeated_prompt_is_two_entries_of_one_item(items, world):
    lengths = {name: [3 + 7 * k] for k, name in enumerate("abcdef")}
    config = make_config(world, 5, 1, dict.fromkeys(range(1, world + 1), 10**6))
    plan = plan_epoch(config, make_history(lengths), items)
    assert Counter(i for step in plan.steps for i in step.items) == Counter(items)
    assert [len(step.items) for step in plan.steps[:-1]] == [5] * (len(plan.steps) - 1)
    ordered = [i for step in plan.steps for i in step.items]
    assert ordered == sorted(items)


@PROFILE
@given(st.integers(1, 5), st.integers(1, 9))
def test_without_history_nothing_shrinks(world, prompts):
    config = make_config(world, prompts, 2, dict.fromkeys(range(1, world + 1), 10**6))
    step = plan_epoch(config, LengthHistory(), [f"i{k}" for k in range(prompts)]).steps[0]
    assert (step.ladder, step.release_area) == ((world,), 0)
    assert set(step.excluded_floors) == {str(size) for size in range(1, world)}
