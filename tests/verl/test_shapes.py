"""Shapes that users bring, in one real run: n = 5, a last step of two prompts on four ranks, an item in two rows,
a dataset reshuffled between epochs. Long: runs with FLEXFLOOR_LONG=1."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from composed import ROOT

from flexfloor.history import HistoryStore
from flexfloor.plan import EpochPlan

sys.path.insert(0, str(ROOT / "recipes"))
N = 5

pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif(os.environ.get("FLEXFLOOR_LONG") != "1", reason="several minutes: set FLEXFLOOR_LONG=1"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import train_cpu
    import train_cpu_task

    folder = tmp_path_factory.mktemp("shapes")
    rows = train_cpu_task.rows(9)
    rows.append({**rows[0], "extra_info": {**rows[0]["extra_info"], "index": 99}})
    train, val = train_cpu_task.write(folder / "data", rows)
    more = [
        *("trainer.total_epochs=2", "data.shuffle=true", "data.seed=5", f"actor_rollout_ref.rollout.n={N}"),
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
    ]
    command = train_cpu.command("cpu_flexfloor", "shapes", folder, train, val, more)
    done = subprocess.run(command, capture_output=True, text=True, env=train_cpu.environment(folder), timeout=560)
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return folder


def test_every_row_is_trained_once_an_epoch(folder):
    with HistoryStore(folder / "flexfloor" / "history.sqlite") as store:
        seen = {(o.item_id, o.epoch): len(o.lengths) for o in store.observations()}
    wanted = {(f"p{i:03}", epoch): N for i in range(9) for epoch in (0, 1)}
    assert seen == wanted | {("p000", 0): 2 * N, ("p000", 1): 2 * N}


def test_the_short_step_has_two_prompts_on_four_ranks(folder):
    for epoch in (0, 1):
        plan = EpochPlan.load(folder / "flexfloor" / "plans" / f"epoch-{epoch}.json")
        assert [len(step.items) for step in plan.steps] == [8, 2]
        assert sum(bool(group.items) for group in plan.steps[1].ranks) == 2


def test_all_steps_trained_and_epoch_1_shrank(folder):
    steps = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert Counter(step["flexfloor/epoch"] for step in steps) == {0: 2, 1: 2}
    assert all(step["training/rollout_actor_probs_pearson_corr"] > 0.99 for step in steps)
    assert [step["flexfloor/floor_reached"] for step in steps[:2]] == [4, 4]
    assert min(step["flexfloor/floor_reached"] for step in steps[2:]) < 4
