"""Stock verl with the section, started with `ray job submit` on a real local Ray head: two steps, the second shrinks.

One run, many questions: half of the prompts use a user's agent loop of two turns; the last step is followed by a
validation and a checkpoint.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from ray_head import RAY, ray_head

from flexfloor.events import read_events
from flexfloor.history import HistoryStore
from flexfloor.ledger import load_run
from flexfloor.plan import EpochPlan

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes"))
PROMPTS, N = 8, 2

pytestmark = pytest.mark.verl


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run, and what it printed."""
    import train_cpu_task
    import yaml

    folder = tmp_path_factory.mktemp("verl")
    rows = train_cpu_task.rows(PROMPTS)
    for index, row in enumerate(rows):
        row["agent_name"] = "two_turns" if index % 2 else "single_turn_agent"
    train, val = train_cpu_task.write(folder / "data", rows)
    loops = folder / "loops.yaml"
    loops.write_text(yaml.safe_dump([{"name": "two_turns", "_target_": "two_turns.TwoTurns"}]))
    env = {
        "VERL_PLATFORM": "cpu",
        "PYTHONPATH": str(Path(__file__).parent),
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "TENSORBOARD_DIR": str(folder / "tensorboard"),
        "OMP_NUM_THREADS": "1",
    }
    with ray_head(gpus=4, env=env) as (jobs, _, variables):
        command = [
            *(RAY, "job", "submit", f"--address={jobs}", "--", sys.executable, "-m", "verl_integration.main"),
            *("--config-name", "cpu_flexfloor"),
            f"actor_rollout_ref.model.path={ROOT / 'recipes/data/tiny-moe'}",
            *(f"data.train_files={train}", f"data.val_files={val}"),
            f"reward.custom_reward_function.path={ROOT / 'recipes/train_cpu_task.py'}",
            "reward.custom_reward_function.name=compute_score",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
            "trainer.logger=[console,file,tensorboard]",
            *("trainer.total_epochs=2", "trainer.test_freq=2", "trainer.save_freq=2"),
            f"trainer.default_local_dir={folder}",
            f"hydra.run.dir={folder / 'hydra'}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=540)
    (folder / "job.txt").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return folder, done.stdout


@pytest.fixture(scope="module")
def steps(run):
    return [json.loads(line)["data"] for line in (run[0] / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def events(run):
    return read_events(run[0] / "flexfloor").events


def test_epoch_0_bootstraps_and_epoch_1_shrinks(steps, events):
    assert len(steps) == 2
    assert steps[0]["flexfloor/floor_reached"] == 4
    assert steps[1]["flexfloor/floor_reached"] < 4
    assert steps[1]["flexfloor/released_rank_seconds/lo"] > 0
    assert Counter(e.epoch for e in events if e.event == "stage_commit").keys() == {1}


def test_the_history_holds_every_item_once_an_epoch(run):
    with HistoryStore(run[0] / "flexfloor" / "history.sqlite") as store:
        seen = store.observations()
        assert store.last_step == 2
    assert Counter((o.epoch, len(o.lengths)) for o in seen) == {(0, N): PROMPTS, (1, N): PROMPTS}
    assert {o.item_id for o in seen} == {f"p{i:03}" for i in range(PROMPTS)}


def test_the_plan_lies_beside_the_checkpoint_and_is_what_ran(run, events):
    plan = EpochPlan.load(run[0] / "flexfloor" / "plans" / "epoch-1.json")
    installed = {tuple(e.fields["ladder"]) for e in events if e.event == "plan_installed" and e.epoch == 1}
    assert installed == {plan.steps[0].ladder}
    assert (run[0] / "global_step_2" / "actor").is_dir()


def test_the_full_world_stands_before_the_update_and_every_rank_gets_the_weights(events):
    from train_cpu_report import restores_after_end

    assert restores_after_end(events) == 0
    ends = [e.t for e in events if e.event == "rollout_end"]
    loads = [e for e in events if e.event == "weights_loaded"]
    assert Counter((e.rank, e.fields["version"]) for e in loads) == {(r, v): 1 for r in range(4) for v in (0, 1, 2)}
    for load in loads:  # 4 experts a rank, room for 16; nothing old or new is left in the spare rows
        assert load.fields["rows"] == [load.fields["version"]] * 4 + [-1] * 12
    for version, end in zip((1, 2), ends, strict=True):
        assert min(e.t for e in loads if e.fields["version"] == version) > end


def test_rollout_and_training_agree_after_restore_and_weight_sync(steps):
    for step in steps:
        assert step["training/rollout_actor_probs_pearson_corr"] > 0.999
        assert step["training/rollout_probs_diff_mean"] < 0.01


def test_two_turn_trajectories_held_their_ranks_open(run, events):
    ledger = load_run(run[0] / "flexfloor")
    assert [line for line in ledger.problems if "rollout_end" not in line] == []
    left = {(e.step, e.rank): e.t for e in events if e.event == "detach_end" and e.epoch == 1}
    done = {(e.step, e.rank): e.t for e in events if e.event == "local_complete" and e.epoch == 1}
    assert left
    assert all(done[key] <= t for key, t in left.items())


def test_metrics_reach_console_file_and_tensorboard(run, steps):
    wanted = {"throughput_q", "efficiency_e/lo", "occupied_rank_seconds/hi", "floor_planned", "planning_seconds"}
    wanted |= {"transitions_skipped", "preemptions", "dummy_share/lo", "released_rank_seconds/lo"}
    for name in wanted:
        assert isinstance(steps[1][f"flexfloor/{name}"], float | int)
        assert f"flexfloor/{name}" in run[1]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run[0] / "tensorboard"))
    board.Reload()
    assert {f"flexfloor/{name}" for name in wanted} <= set(board.Tags()["scalars"])


def test_validation_ran_in_the_full_world(steps):
    assert any(name.startswith(("val-core/", "val-aux/")) for name in steps[1])
