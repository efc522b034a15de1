"""Two replicas (two EP groups of two ranks) on two Ray nodes of one machine. Long: runs with FLEXFLOOR_LONG=1."""

import json
import os
import sys
from collections import Counter

import pytest
from composed import ROOT, finished
from ray_head import ray_head

from flexfloor.events import read_events
from flexfloor.history import HistoryStore
from flexfloor.ledger import load_run
from flexfloor.plan import EpochPlan

sys.path.insert(0, str(ROOT / "recipes"))
PROMPTS, N = 8, 2

pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif(os.environ.get("FLEXFLOOR_LONG") != "1", reason="several minutes: set FLEXFLOOR_LONG=1"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import train_cpu
    import train_cpu_task

    folder = tmp_path_factory.mktemp("two")
    train, val = train_cpu_task.write(folder / "data", train_cpu_task.rows(PROMPTS))
    more = [
        *("trainer.total_epochs=2", "trainer.nnodes=2", "trainer.n_gpus_per_node=2"),
        *(f"actor_rollout_ref.rollout.{kind}_parallel_size=2" for kind in ("data", "expert")),
        "flexfloor.floors.natural=[1,2]",
    ]
    command = train_cpu.command("cpu_flexfloor", "two", folder, train, val, more)
    with ray_head(gpus=2, nodes=2, cpus=12, env=train_cpu.environment(folder)) as (_, address, variables):
        finished(command, folder, {**variables, "RAY_ADDRESS": address})
    return folder


def test_each_replica_has_a_plan_of_half_the_step(folder):
    plans = [EpochPlan.load(folder / "flexfloor" / "plans" / f"epoch-1-replica-{r}.json") for r in (0, 1)]
    assert [plan.world_size for plan in plans] == [2, 2]
    assert [len(plan.steps[0].items) for plan in plans] == [PROMPTS // 2] * 2
    assert not set(plans[0].steps[0].items) & set(plans[1].steps[0].items)
    with HistoryStore(folder / "flexfloor" / "history.sqlite") as store:
        assert Counter((o.epoch, len(o.lengths)) for o in store.observations()) == {(0, N): PROMPTS, (1, N): PROMPTS}


def test_all_four_ranks_speak_by_replica_and_get_the_weights(folder):
    events = read_events(folder / "flexfloor").events
    ranks = {(e.replica, e.rank) for e in events if e.rank is not None}
    assert ranks == {(replica, rank) for replica in (0, 1) for rank in (0, 1)}
    loads = Counter((e.replica, e.rank, e.fields["version"]) for e in events if e.event == "weights_loaded")
    assert set(loads.values()) == {1}
    assert len(loads) == 4 * 3


def test_free_time_between_and_within_workers_is_told_apart_and_disjoint(folder):
    step = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()][1]
    between, within = (step[f"flexfloor/free_{kind}_workers/lo"] for kind in ("between", "within"))
    assert between > 0
    assert within > 0
    assert step["flexfloor/world_size"] == 2
    ledger = load_run(folder / "flexfloor")
    last = ledger.entries[-1]
    assert last.occupancy.log.world_size == 4
    assert within <= last.occupancy.free.hi
    assert between + within <= last.occupancy.log.seconds * 4
