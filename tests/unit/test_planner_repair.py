"""Repair: what is examined, in which order, what is skipped, and how much work it may be (planner.md section 5)."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planner_oracle import make_config, make_history

from flexfloor.config import config_from_mapping
from flexfloor.history import Observation, replay
from flexfloor.planner.admission import fits_in
from flexfloor.planner.epoch import plan_epoch, predict
from flexfloor.planner.exchange import ExchangeTest, blocks
from flexfloor.planner.repair import repair
from flexfloor.planner.step import StepPlanner

PROFILE = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@pytest.mark.parametrize(("before", "after", "count"), [(5, 4, 1), (5, 4, 2), (4, 6, 3), (3, 3, 3), (2, 5, 3)])
def test_all_exchanges_come_once_and_in_ascending_disturbance(before, after, count):
    came = []
    for block in blocks(before, after, count):
        for outs, ins in zip(block.outs.tolist(), block.ins.tolist(), strict=True):
            assert block.disturbance == sum(o + 1 for o in outs) + sum(before - i for i in ins)
            came.append((block.disturbance, tuple(outs), tuple(sorted(ins))))
    assert [d for d, _, _ in came] == sorted(d for d, _, _ in came)
    every = {(o, i) for o in combinations(range(after), count) for i in combinations(range(before), count)}
    assert len(came) == len(every)
    assert {(o, i) for _, o, i in came} == every


@st.composite
def neighbours(draw):
    """A planner and the prompts of two neighbouring steps, with a cap that follows the longest prompt."""
    world, prompts = draw(st.integers(1, 3)), draw(st.integers(2, 6))
    lengths = {f"i{k:02d}": draw(st.lists(st.integers(1, 300), min_size=2, max_size=2)) for k in range(2 * prompts)}
    guard = {"enabled": True, "l_max": 300, "c_min": 20, "rounding": 10, "initial_rho": draw(st.sampled_from([1, 2]))}
    config = make_config(world, prompts, 2, {world: draw(st.integers(40, 900))}, tail_guard=guard, mu="1.16")
    planner = StepPlanner(config, guard["initial_rho"])
    ordered = sorted(predict(config, make_history(lengths, draw(st.integers(0, 30))), list(lengths)), key=_by_tail)
    return planner, ordered[:prompts], ordered[prompts:]


def _by_tail(prompt):
    return prompt.sort_key


def _test(planner, previous, current):
    return ExchangeTest(
        previous,
        current,
        limit_of=planner.limit,
        rules=planner.rules,
        groups=planner.config.world_size,
        capacity=max(planner.capacities),
    )


@PROFILE
@given(neighbours(), st.integers(1, 3))
def test_bulk_tests_agree_with_admission_one_by_one(case, count):
    planner, previous, current = case
    test = _test(planner, previous, current)
    capacity, fitting = max(planner.capacities), 0
    for block in blocks(len(previous), len(current), count):
        kept = {(tuple(o), tuple(i)) for o, i in zip(*map(np.ndarray.tolist, _parts(test.hopeful(block))), strict=True)}
        for outs, ins in zip(block.outs.tolist(), block.ins.tolist(), strict=True):
            after = [p for k, p in enumerate(current) if k not in outs] + [previous[k] for k in ins]
            fits = fits_in(planner.demand(after), slice(0, len(after)), planner.config.world_size, capacity)
            assert ((tuple(outs), tuple(ins)) in kept) == fits
            fitting += fits
    assert not (test.rules_out(count) and fitting)


def _parts(block):
    return block.outs, block.ins


@settings(PROFILE, max_examples=15)
@given(neighbours())
def test_the_repair_is_the_least_of_all_by_brute_force(case):
    planner, previous, current = case
    steps = planner.plan(previous), planner.plan(current)
    if steps[1].grouping.kv_safe:
        return
    mended = repair(planner, *steps)
    for count in range(1, planner.config.repair.max_swaps + 1):
        found = {}
        for block in blocks(len(previous), len(current), count):
            for outs, ins in zip(block.outs.tolist(), block.ins.tolist(), strict=True):
                after = [p for k, p in enumerate(current) if k not in outs] + [previous[k] for k in ins]
                before = [p for k, p in enumerate(previous) if k not in ins] + [current[k] for k in outs]
                both = planner.plan(before), planner.plan(after)
                if all(step.grouping.kv_safe for step in both):
                    found.setdefault(block.disturbance, []).append(
                        (sum(s.tail for s in both), -sum(s.grouping.area for s in both))
                    )
        if found:
            assert mended is not None
            assert len(mended.swaps) == count
            assert mended.objective == min(found[min(found)])
            return
    assert mended is None


@pytest.mark.parametrize("scale", [0.5, 0.55, 0.62, 0.66])
def test_tight_memory_costs_few_examinations(monkeypatch, scale):
    # Sixteen ranks, lengths of two epochs that reach the limit, capacities at which the last steps fit nowhere.
    random = np.random.default_rng(5)
    means = random.lognormal(np.log(7000), 0.6, 96)
    seen = [
        Observation(
            f"i{k:03d}",
            epoch,
            256,
            tuple(np.clip(means[k] * random.lognormal(0, 0.35, 16), 64, 16384).astype(int).tolist()),
        )
        for epoch in (0, 1)
        for k in range(96)
    ]
    capacity = {size: int(tokens * scale) for size, tokens in {4: 280576, 8: 349952, 16: 380800}.items()}
    config = config_from_mapping(
        {
            "world_size": 16,
            "responses_per_prompt": 16,
            "step_prompts": 32,
            "floors": {"natural": [4, 8, 16]},
            "kv": {"block_tokens": 128, "capacity": {"natural": capacity}},
        }
    )
    calls = {"plan": 0, "admits": 0}
    for name in calls:
        original = getattr(StepPlanner, name)

        def counted(self, prompts, original=original, name=name):
            calls[name] += 1
            return original(self, prompts)

        monkeypatch.setattr(StepPlanner, name, counted)
    plan = plan_epoch(config, replay(seen, 0.3))
    assert not all(step.kv_safe for step in plan.steps) or plan.swaps
    unsafe = 2
    assert calls["admits"] <= 2 * unsafe * config.repair.max_layouts
    assert calls["plan"] <= 3 + 2 * 16 * unsafe
