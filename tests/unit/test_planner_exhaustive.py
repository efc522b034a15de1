"""On every tiny step the plan is the best one: compared with all groupings (planner.md section 5)."""

import random

import pytest
from planner_oracle import Oracle, make_config, make_history

from flexfloor.planner import matching, plan_epoch

SHAPES = [
    (1, 1),
    (1, 4),
    (2, 4),
    (2, 3),
    (2, 8),
    (3, 6),
    (3, 2),
    (3, 5),
    (3, 9),
    (4, 8),
    (4, 6),
    (4, 10),
    (5, 10),
    (5, 7),
]


def random_case(rng, world, prompts):
    responses = rng.randint(1, 3)
    spread = rng.choice([6, 40, 200])
    lengths = {f"i{k:02d}": [rng.randint(1, spread) for _ in range(responses)] for k in range(prompts)}
    tokens = {item: rng.choice([0, 0, 5, 17]) for item in lengths}
    per_rank = -(-prompts // world) * responses
    capacity = {
        size: int(spread * per_rank * rng.uniform(0.25, 1.1)) for size in range(1, world + 1) if rng.random() < 0.8
    }
    kv = {
        "block_tokens": rng.choice([1, 1, 4]),
        "prompt_sharing": rng.random() < 0.7,
        "capacity": {"natural": capacity},
    }
    config = make_config(
        world,
        prompts,
        responses,
        capacity,
        kv=kv,
        mu=rng.choice([1, 1.16]),
        tail_guard={"enabled": False, "l_max": spread},
    )
    return config, lengths, tokens


def test_beginning_with_few_candidates_changes_no_plan(monkeypatch):
    closed = []
    close = matching._close
    monkeypatch.setattr(matching, "_close", lambda *given: (closed.append(int(given[-1].sum())), close(*given)))
    for seed in range(6):
        rng = random.Random(seed)
        means = [rng.lognormvariate(6, 0.5) for _ in range(32)]
        lengths = {
            f"i{k:02d}": [min(2000, int(m * rng.lognormvariate(0, 0.4)) + 1) for _ in range(8)]
            for k, m in enumerate(means)
        }
        config = make_config(16, 32, 8, {2: 3200, 4: 4300, 8: 5200, 16: 5600}, tail_guard={"l_max": 2000})
        plans = []
        for many in (10**6, 0):
            for few in (20, 100) if many == 0 else (20,):
                monkeypatch.setattr(matching, "_MANY", many)
                monkeypatch.setattr(matching, "_FEW", few)
                plans.append(plan_epoch(config, make_history(lengths)))
        assert plans[0] == plans[1] == plans[2]
    assert sum(count > 0 for count in closed) > 10


@pytest.mark.parametrize("solver", ["highs", "cbc"])
@pytest.mark.parametrize(("world", "prompts"), SHAPES)
def test_the_plan_is_the_best_of_all_groupings(world, prompts, solver):
    check_against_all_groupings(world, prompts, solver, 6 if solver == "highs" else 1)


def check_against_all_groupings(world, prompts, solver, cases):
    rng = random.Random(1000 * world + prompts)
    for _ in range(cases):
        config, lengths, tokens = random_case(rng, world, prompts)
        config = config.model_copy(update={"solver": config.solver.model_copy(update={"name": solver})})
        oracle = Oracle(config, lengths, tokens)
        step = plan_epoch(config, make_history(lengths, tokens)).steps[0]
        best = oracle.best()
        grouping = sorted(tuple(sorted(entry.items)) for entry in step.ranks if entry.items)
        if best is None:
            worst = min(max(oracle.need(g)[1] for g in grouping) for grouping in oracle.groupings)
            assert (step.floor, step.release_area) == (world, 0)
            assert max(oracle.need(g)[1] for g in grouping) == worst
            assert step.kv_safe == (world in config.capacity and worst <= config.capacity[world])
        else:
            area, floor, schedules = best
            cost, groups = schedules[step.quorum_times]
            assert (step.release_area, step.floor, step.kv_safe) == (area, floor, True)
            assert oracle.safe(grouping, config.capacity[floor])
            assert oracle.cost(grouping) == cost
            assert grouping == groups
        assert step.optimality_gap == 0.0
