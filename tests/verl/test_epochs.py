"""Epochs, shares, places and seeds: pure functions, no verl."""

import itertools
from collections import Counter

import pytest

from flexfloor.config import config_from_mapping
from flexfloor.errors import InputError, RefusedError
from flexfloor.history import LengthHistory, Observation, replay
from flexfloor.workload import response_seed
from verl_integration.epochs import dataset_order, plan_replicas, steps_per_epoch, train_steps
from verl_integration.items import ItemIndex, check_prompt_lengths


def config(world=4, n=2, b=8, **more):
    sizes = [size for size in (1, 2, 4) if size <= world]
    return config_from_mapping(
        {
            "world_size": world,
            "responses_per_prompt": n,
            "step_prompts": b,
            "num_experts": 16,
            "floors": {"natural": sizes},
            "kv": {"capacity": {"natural": dict.fromkeys(sizes, 100000)}},
            "tail_guard": {"c_min": 16, "rounding": 16, "l_max": 208},
            **more,
        }
    )


def history(ids, n, *, epoch=0):
    return replay([Observation(item, epoch, 9, (10 + 7 * (k % 13),) * n) for k, item in enumerate(ids)], 0.3)


def epoch_steps(settings, ids, replicas=1, known=None, epoch=1):
    known = history(ids, settings.responses_per_prompt) if known is None else known
    plans = plan_replicas(settings, known, ids, replicas, epoch)
    return train_steps(settings, plans, ItemIndex(ids), epoch)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 5, 7])
@pytest.mark.parametrize(("items", "b"), [(32, 8), (30, 8), (7, 8), (3, 8), (10, 3), (1, 1), (9, 5)])
def test_every_row_is_trained_once_an_epoch(items, b, n, replicas):
    ids = [f"p{i}" for i in range(items)]
    settings = config(b=b, n=n)
    steps = epoch_steps(settings, ids, replicas)
    assert len(steps) == steps_per_epoch(items, b)
    assert sorted(p.row for step in steps for p in step.placements) == list(range(items))
    assert [len(step.placements) for step in steps[:-1]] == [b] * (len(steps) - 1)
    for step in steps:
        for replica in range(replicas):
            own = [p for p in step.placements if p.replica == replica]
            assert sum(step.expected(replica, 4)) == len(own) * n
            assert [place for p in own for place in p.places] == list(range(len(own) * n))
            assert (step.plans[replica] is None) == (not own)


def test_a_row_keeps_its_seeds_whatever_the_order_and_the_number_of_replicas():
    ids = [f"p{i}" for i in range(12)]
    one = epoch_steps(config(), ids)
    other = epoch_steps(config(), list(reversed(ids)), 2)
    seeds = [{p.item_id: p.seeds for step in steps for p in step.placements} for steps in (one, other)]
    assert seeds[0] == seeds[1]
    assert seeds[0]["p3"] == (response_seed("p3", 1, 0), response_seed("p3", 1, 1))
    assert len(set(itertools.chain(*seeds[0].values()))) == 24


def test_a_prompt_twice_in_the_dataset_has_samples_and_rows_of_its_own():
    ids = ["a", "b", "a", "c"]
    steps = epoch_steps(config(b=4), ids)
    own = [p for p in steps[0].placements if p.item_id == "a"]
    assert sorted(p.row for p in own) == [0, 2]
    assert sorted(sample for p in own for sample in p.samples) == [0, 1, 2, 3]
    assert len({seed for p in own for seed in p.seeds}) == 4


def test_the_bootstrap_epoch_and_an_unseen_item_do_not_shrink():
    ids = [f"p{i}" for i in range(16)]
    first = epoch_steps(config(), ids, known=LengthHistory(), epoch=0)
    assert all(step.ladder(0) == (4,) for step in first)
    later = epoch_steps(config(), [*ids, "new"], known=history(ids, 2))
    assert later[0].ladder(0)[-1] < 4
    assert "new" in {p.item_id for p in later[-1].placements}
    assert later[-1].ladder(0) == (4,)


def test_shrinking_off_keeps_everything_but_the_ladder():
    steps = epoch_steps(config(), [f"p{i}" for i in range(16)])
    assert steps[0].ladder(0, shrink=False) == (4,)
    assert steps[0].digest(0) != steps[0].digest(0, shrink=False)


def test_replicas_share_a_step_evenly():
    ids = [f"p{i:02}" for i in range(20)]
    steps = epoch_steps(config(world=2, b=5), ids, 2)
    for step in steps:
        assert Counter(p.replica for p in step.placements) == {0: 3, 1: 2}
        longest = {r: max(step.plans[r].tail for _ in [0]) for r in (0, 1)}
        assert abs(longest[0] - longest[1]) <= 14


def test_order_of_the_dataset_is_shuffled_by_epoch_and_seed_alone():
    ids = [str(i) for i in range(50)]
    assert dataset_order(ids, 3, shuffle=False, seed=1) == ids
    assert dataset_order(ids, 3, shuffle=True, seed=1) == dataset_order(ids, 3, shuffle=True, seed=1)
    assert dataset_order(ids, 3, shuffle=True, seed=1) != dataset_order(ids, 4, shuffle=True, seed=1)
    assert sorted(dataset_order(ids, 3, shuffle=True, seed=1)) == sorted(ids)


def test_a_row_without_an_id_is_refused_with_the_remedy():
    rows = [{"extra_info": {"item_id": "a"}}, {"extra_info": {"index": 3}}]
    with pytest.raises(InputError, match=r"row 1 has no extra_info.item_id; write a stable id") as caught:
        ItemIndex.of(rows, "extra_info.item_id")
    assert caught.value.field == "data.train_files"
    assert ItemIndex.of([{"extra_info": {"index": 0}}, {"extra_info": {"index": 7}}], "extra_info.index").ids == [
        "0",
        "7",
    ]


@pytest.mark.parametrize("over", [-1, 0])
def test_prompts_up_to_the_limit_pass(over):
    check_prompt_lengths([5, 64 + over], ["a", "b"], 64)


def test_a_prompt_above_the_limit_is_refused_before_the_run():
    with pytest.raises(RefusedError, match=r"1 prompts are above data.max_prompt_length 64: item 'b' has 65"):
        check_prompt_lengths([5, 65], ["a", "b"], 64)
