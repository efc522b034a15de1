"""EP 4 -> 2 -> 1 -> 4: captures that are joint, and a transition that is undone."""

import pytest

LENGTHS = (tuple(90 if i % 2 else 60 for i in range(24)), (20,) * 8, (50,) * 8, (20,) * 8)
REQUESTS = 48


@pytest.fixture(scope="module")
def load(gpu):
    return gpu.Load(LENGTHS, prompt=40)


@pytest.fixture(scope="module")
def static(four, load):
    four.arm("static", load, (4,))
    return four.records[-1]


def checked(four):
    record = four.records[-1]
    assert record["finite_logprobs"], "NaN reached a token"
    assert sum(row["eager"] for row in record["audit"].values()) == 0
    assert record["against"]["same_tokens_and_logprobs"] == record["against"]["requests"] == REQUESTS
    return record


def test_down_the_ladder_and_back(four, load, static):
    four.arm("flex", load, (4, 2, 1))
    by_world = {tuple(t["survivors"]): t for t in checked(four)["transitions"]}
    assert set(by_world) == {(0, 2), (0,)}
    assert all(transition["captured"] for transition in by_world.values())


def test_a_failed_trial_step_is_undone_on_all_ranks_and_the_rollout_goes_on(four, load, static):
    four.arm("flex, a trial step fails", load, (4, 2, 1))
    record = checked(four)
    assert [e["event"] for e in record["faults"]].count("plan_skipped") >= 1


def test_the_next_rollout_shrinks_as_before(four, load, static):
    four.arm("static after", load, (4,))
    checked(four)
    four.arm("flex after", load, (4, 2, 1))
    record = checked(four)
    assert {tuple(t["survivors"]) for t in record["transitions"]} == {(0, 2), (0,)}
    assert record["faults"] == []
