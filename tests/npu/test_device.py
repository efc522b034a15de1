"""On NPUs: what only a device can show, in the order of docs/ascend.md. Skipped, with the reason, elsewhere.

Nothing here has run on an NPU yet. FLEXFLOOR_NPU_MODEL names a checkpoint; without it a tiny one is made.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LENGTHS = [12, 30, 20, 8, 16, 110, 24, 60]
GROUPS = [[0, 1], [2, 3], [4, 5], [6, 7]]
ENGINE = {
    "enable_sleep_mode": True,
    "skip_tokenizer_init": True,
    "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]},
    "additional_config": {"weight_nz_mode": 0},
}


def ranks(case):
    done = subprocess.run(
        [sys.executable, str(HERE / "device_ranks.py"), case], capture_output=True, text=True, check=False, timeout=300
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_group_of_some_ranks():
    said = ranks("group_of_some_ranks")
    assert said.count("all_reduce over (0, 1): 1.0") == 2
    assert len(re.findall(r"communicator ep_ff_[0-9a-f]{16} on rank [01]", said)) == 2
    assert said.count("took no part") == 2


def test_destroy_one_group():
    assert ranks("destroy_one_group").count("full world after destroy: 6.0") == 4


def test_rows_travel():
    assert "rows equal: True" in ranks("rows_travel")


def test_narrowed_weights():
    assert "difference to a tensor of E/W rows: 0.0" in ranks("narrowed_weights")


@pytest.fixture(scope="module")
def bed():
    """The helpers of the engine tests."""
    sys.path.insert(0, str(HERE.parent / "engine"))
    import driver_bed

    return driver_bed


@pytest.fixture(scope="module")
def settings(bed):
    engine = {
        "combine": "stock",
        "kv_cache_bytes": 256 << 20,
        "max_num_seqs": 16,
        "max_model_len": 512,
        "block_size": 128,
        "dtype": "bfloat16",
        "deadline_s": 120.0,
        "vllm": ENGINE,
    }
    return bed.config(engine=engine, num_experts=16, hardware=os.environ.get("FLEXFLOOR_NPU", "ascend-a3"))


@pytest.fixture(scope="module")
def replica(bed, settings, tmp_path_factory):
    model = os.environ.get("FLEXFLOOR_NPU_MODEL")
    if model is None:
        import tiny_checkpoint

        model = tiny_checkpoint.make(tmp_path_factory.mktemp("checkpoint"))
    server = bed.local_server(tmp_path_factory.mktemp("replica"), Path(model), settings, poison=False)
    try:
        server.statuses = server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def arm(bed, settings, replica, tmp_path):
    from flexfloor.driver.rollout import run_plan
    from flexfloor.driver.run_dir import RunDirectory
    from flexfloor.events import read_events

    def run(name, *, shrink):
        planned = bed.plan(bed.step(0, GROUPS, LENGTHS, (4, 2, 1)))
        folder = RunDirectory(tmp_path / name, settings)
        run_plan(planned, settings, bed.prompts(LENGTHS), replica, folder, run_id=bed.RUN, shrink=shrink)
        folder.close()
        return folder.path, read_events(folder.path).events

    return run


def test_engine_starts(replica):
    print(f"engine ready: {len(replica.statuses)} ranks")
    assert len(replica.statuses) == 4


def test_one_rank_sleeps(arm):
    _, events = arm("flex", shrink=True)
    slept = [event.fields for event in events if event.event == "sleep_end"]
    print("released", [fields["released_bytes"] for fields in slept])
    assert len(slept) == 3
    assert all(fields["released_bytes"] > 0 for fields in slept)


def test_recapture(arm):
    _, events = arm("captured", shrink=True)
    captured = [event.fields["captured"] for event in events if event.event == "stage_commit"]
    print("captured", captured)
    assert all(captured)
    audits = [event.fields for event in events if event.event == "decode_audit"]
    assert sum(fields["full"] for fields in audits) > 0
    assert sum(fields["eager"] for fields in audits) == 0


def test_graphs_after_wake(arm):
    from flexfloor.driver.identity import compare_runs

    before, _ = arm("before", shrink=False)
    arm("between", shrink=True)
    after, _ = arm("after", shrink=False)
    found = compare_runs(after, before)
    print(f"tokens equal: {found.whole}")
    assert found.whole, found.first_difference
