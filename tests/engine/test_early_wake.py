"""A parked rank's memory comes back while the survivors decode their last tokens: nothing else changes."""

import pytest
from bed_runs import events, requests, roll

FULL = (0, 1, 2, 3)
MADE = requests([[110, 20], [6], [50], [8]])
LONGER_THAN_ANY_ROLLOUT_S = 600.0


@pytest.fixture(scope="module")
def full(bed):
    return roll(bed, MADE, (4,))


def take_long(worker):
    """As if the memory had taken very long to come back the last time: a rank wakes as soon as it can judge."""
    worker._flexfloor_world.memory.reclaim_s = LONGER_THAN_ANY_ROLLOUT_S


def refuse_once(worker):
    """The next memory does not come."""
    memory = worker._flexfloor_world.memory
    reclaim = memory._device.reclaim

    def refused(tensors):
        memory._device.reclaim = reclaim
        raise RuntimeError("no memory")

    memory._device.reclaim = refused


@pytest.mark.parametrize("ladder", [(4, 2), (4, 2, 1)], ids=str)
def test_memory_is_back_before_the_last_token(bed, full, ladder):
    before = {name: len(events(bed, name)) for name in ("wake_start", "restore_start", "fault")}
    bed.call("on_worker", take_long)
    seen = roll(bed, MADE, ladder)
    assert seen.same_as(full)
    assert seen.worlds[0] == seen.worlds[-1] == FULL
    woken = {e["rank"]: e["t"] for e in events(bed, "wake_start")[before["wake_start"] :]}
    restored = {e["rank"]: e["t"] for e in events(bed, "restore_start")[before["restore_start"] :]}
    assert set(woken) == set(FULL) - set(seen.worlds[-2])
    assert all(woken[rank] < restored[rank] for rank in woken)
    assert len(events(bed, "fault")) == before["fault"]
    assert roll(bed, MADE, (4,)).same_as(full)


def test_memory_that_did_not_come_early_comes_with_the_next_restore(bed, full):
    faults = len(events(bed, "fault"))
    bed.call("on_worker", take_long)
    bed.call("on_worker", refuse_once)
    seen = roll(bed, MADE, (4, 2))
    assert seen.same_as(full)
    assert {(e["where"], e["what"]) for e in events(bed, "fault")[faults:]} == {
        ("restore_wake", "RuntimeError: no memory")
    }
    assert roll(bed, MADE, (4, 2, 1)).same_as(full)
