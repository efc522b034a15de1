"""A rank that does not come to the row transfer: the other waits for it no longer than the deadline, the channel is
built anew (NCCL and gloo), and the rollout goes on with the same tokens. Here vLLM schedules no batch ahead."""

import pytest
from records import checked, eager, whole

DEADLINE_S = 5.0


@pytest.fixture(scope="module")
def late(serving):
    """Rank 1 stays away from its first transfer of a shrink and its second of a restore."""
    faults = ("stage:1:raise:1", "restore_move:1:raise:2")
    with serving(combine="invariant", deadline_s=DEADLINE_S, ahead=False, faults=faults) as running:
        yield running


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
