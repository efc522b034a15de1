"""Shapes that users bring, each in a real run. Long: runs with FLEXFLOOR_LONG=1.

odd      n = 5, a last step of two prompts on four ranks, an item in two rows, a dataset reshuffled between epochs,
         prompts of exactly and of one below data.max_prompt_length
single   n = 1
seven    n = 7, a last step of one prompt
small    two prompts a step on four ranks
"""

import json
import os
import sys
from collections import Counter
from dataclasses import dataclass

import pytest
from composed import ROOT, finished

from flexfloor.history import HistoryStore
from flexfloor.plan import EpochPlan

sys.path.insert(0, str(ROOT / "recipes"))

pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif(os.environ.get("FLEXFLOOR_LONG") != "1", reason="several minutes: set FLEXFLOOR_LONG=1"),
]


@dataclass(frozen=True)
class Shape:
    """``items`` prompts in ``steps`` (prompts of each), n responses a prompt; ``more`` overrides."""

    items: int
    steps: tuple[int, ...]
    n: int
    more: tuple[str, ...] = ()
    twice: bool = False


def batch(prompts):
    return (f"data.train_batch_size={prompts}", f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}")


SHAPES = {
    "odd": Shape(9, (8, 2), 5, ("data.shuffle=true", "data.seed=5", "data.max_prompt_length=15"), twice=True),
    "single": Shape(8, (8,), 1),
    "seven": Shape(5, (4, 1), 7, batch(4)),
    "small": Shape(4, (2, 2), 2, batch(2)),
}


@pytest.fixture(scope="module", params=list(SHAPES))
def run(request, tmp_path_factory):
    """A shape and the folder of its finished run of two epochs."""
    import train_cpu
    import train_cpu_task

    shape, folder = SHAPES[request.param], tmp_path_factory.mktemp(request.param)
    rows = train_cpu_task.rows(shape.items)
    if shape.twice:
        rows.append({**rows[0], "extra_info": {**rows[0]["extra_info"], "index": 99}})
    train, val = train_cpu_task.write(folder / "data", rows)
    more = [
        *("trainer.total_epochs=2", f"actor_rollout_ref.rollout.n={shape.n}"),
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        *shape.more,
    ]
    command = train_cpu.command("cpu_flexfloor", request.param, folder, train, val, more)
    finished(command, folder, train_cpu.environment(folder))
    return shape, folder


def test_every_row_is_trained_once_an_epoch(run):
    shape, folder = run
    with HistoryStore(folder / "flexfloor" / "history.sqlite") as store:
        seen = {(o.item_id, o.epoch): len(o.lengths) for o in store.observations()}
    wanted = {(f"p{i:03}", epoch): shape.n for i in range(shape.items) for epoch in (0, 1)}
    twice = {("p000", epoch): 2 * shape.n for epoch in (0, 1)} if shape.twice else {}
    assert seen == wanted | twice


def test_short_steps_leave_ranks_without_a_prompt(run):
    shape, folder = run
    for epoch in (0, 1):
        plan = EpochPlan.load(folder / "flexfloor" / "plans" / f"epoch-{epoch}.json")
        assert tuple(len(step.items) for step in plan.steps) == shape.steps
        for step in plan.steps:
            assert sum(bool(group.items) for group in step.ranks) == min(4, len(step.items))


def test_all_steps_trained_and_epoch_1_shrank(run):
    shape, folder = run
    steps = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert Counter(step["flexfloor/epoch"] for step in steps) == {0: len(shape.steps), 1: len(shape.steps)}
    assert all(step["training/rollout_actor_probs_pearson_corr"] > 0.99 for step in steps)
    floors = [step["flexfloor/floor_reached"] for step in steps]
    assert set(floors[: len(shape.steps)]) == {4}
    assert min(floors[len(shape.steps) :]) < 4
