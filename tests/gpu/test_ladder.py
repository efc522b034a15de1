"""EP 4 -> 2 -> 1 -> 4: captures that are joint, and a transition that is undone."""

import pytest
from records import checked, eager, whole

LENGTHS = (tuple(90 if i % 2 else 60 for i in range(24)), (20,) * 8, (50,) * 8, (20,) * 8)
REQUESTS = 48


@pytest.fixture(scope="module")
def load(gpu):
    return gpu.Load(LENGTHS, prompt=40)


@pytest.fixture(scope="module")
def static(four, load):
    four.arm("static", load, (4,))
    return four.records[-1]


def same(four):
    record = checked(four.records[-1])
    assert eager(record) == 0
    assert whole(record, REQUESTS)
    return record


def test_down_the_ladder_and_back(four, load, static):
    four.arm("flex", load, (4, 2, 1))
    by_world = {tuple(t["survivors"]): t for t in same(four)["transitions"]}
    assert set(by_world) == {(0, 2), (0,)}
    assert all(transition["captured"] for transition in by_world.values())


def test_a_failed_trial_step_is_undone_on_all_ranks_and_the_rollout_goes_on(four, load, static):
    four.arm("flex, a trial step fails", load, (4, 2, 1))
    record = same(four)
    assert [e["event"] for e in record["faults"]].count("plan_skipped") >= 1


def test_the_next_rollout_shrinks_as_before(four, load, static):
    four.arm("static after", load, (4,))
    same(four)
    four.arm("flex after", load, (4, 2, 1))
    record = same(four)
    assert {tuple(t["survivors"]) for t in record["transitions"]} == {(0, 2), (0,)}
    assert record["faults"] == []
