"""A rank that does not come to the row transfer: the other waits for it no longer than the deadline, the channel is
built anew (NCCL and gloo), and the rollout goes on with the same tokens. Here vLLM schedules no batch ahead."""

import pytest
from records import checked, eager, whole

DEADLINE_S = 5.0


@pytest.fixture(scope="module")
def late(gpu, tmp_path_factory):
    """A server of two ranks; rank 1 stays away from its first transfer of a shrink and its second of a restore."""
    folder = tmp_path_factory.mktemp("late")
    model = gpu.write_weights(folder / "model", gpu.SHAPES["small"])
    spec = gpu.server_spec(
        model,
        folder,
        dummy=False,
        combine="invariant",
        poison=True,
        use=0.3,
        deadline_s=DEADLINE_S,
        ahead=False,
        faults=("stage:1:raise:1", "restore_move:1:raise:2"),
    )
    running = gpu.Bench(spec, folder, limit_s=540.0)
    yield running
    running.server.close()


def test_the_channel_is_rebuilt_and_tokens_are_the_same(late, load):
    late.arm("static", load, (2,))
    for name, failed in (("stage fails", ["stage"]), ("restore fails", ["restore_move"]), ("after", [])):
        late.arm(name, load, (2, 1))
        record = checked(late.records[-1])
        assert whole(record)
        assert eager(record) == 0
        assert [t["survivors"] for t in record["transitions"]] == [[0]]
        faults = [(e["rank"], e["where"]) for e in record["faults"] if e["event"] == "fault"]
        assert sorted(faults) == sorted((rank, where) for where in failed for rank in (0, 1))
        assert [e["event"] for e in record["faults"]].count("plan_skipped") == len(failed)
