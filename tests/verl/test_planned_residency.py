"""Planned residency under verl: spare rows are filled before the first token and get each later version of the weights.

Long: runs with FLEXFLOOR_LONG=1.
"""

import json
import os
import sys

import pytest
from composed import ROOT, finished

from flexfloor.events import read_events
from flexfloor.ledger import load_run

sys.path.insert(0, str(ROOT / "recipes"))
PROMPTS, PER, CAPACITY = 8, 4, 16

pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif(os.environ.get("FLEXFLOOR_LONG") != "1", reason="several minutes: set FLEXFLOOR_LONG=1"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import train_cpu
    import train_cpu_task

    folder = tmp_path_factory.mktemp("planned")
    train, val = train_cpu_task.write(folder / "data", train_cpu_task.rows(PROMPTS))
    more = [
        *("trainer.total_epochs=3", "+flexfloor.residency=planned", "+flexfloor.floors.planned=[1,2,4]"),
        "+flexfloor.kv.capacity.planned={1:8192,2:8192,4:8192}",
    ]
    command = train_cpu.command("cpu_flexfloor", "planned", folder, train, val, more)
    finished(command, folder, train_cpu.environment(folder))
    return folder


@pytest.fixture(scope="module")
def events(folder):
    return read_events(folder / "flexfloor").events


def test_the_predicted_worlds_are_made_ready_before_the_first_token(events):
    rehearsals = [e for e in events if e.event == "rehearsal" and e.rank == 0]
    assert [e.epoch for e in rehearsals] == [1, 2]
    assert all(e.fields["whole"] for e in rehearsals)
    assert rehearsals[0].fields["moved_rows"] > 0
    commits = [e for e in events if e.event == "stage_commit"]
    assert {e.epoch for e in commits} == {1, 2}
    assert any(e.fields["moved_rows"] == 0 for e in commits)


def test_the_spare_rows_hold_every_later_version(events):
    rehearsed = {e.epoch: e.fields["worlds"] for e in events if e.event == "rehearsal"}
    loads = [e for e in events if e.event == "weights_loaded"]
    assert {e.fields["version"] for e in loads} == {0, 1, 2, 3}
    for load in loads:
        version, rows = load.fields["version"], load.fields["rows"]
        assert rows[:PER] == [version] * PER
        worlds = rehearsed.get(version - 1, [])
        smallest = min((len(world) for world in worlds if load.rank in world), default=4)
        kept = CAPACITY // smallest - PER
        assert rows[PER:] == [version] * kept + [-1] * (CAPACITY - PER - kept)


def test_rollout_and_trainer_agree_and_the_log_is_whole(folder):
    steps = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    for step in steps:
        assert step["training/rollout_actor_probs_pearson_corr"] > 0.999
        assert step["training/rollout_probs_diff_mean"] < 0.01
    assert steps[0]["flexfloor/floor_reached"] == 4
    assert max(step["flexfloor/floor_reached"] for step in steps[1:]) < 4
    assert not load_run(folder / "flexfloor").problems
