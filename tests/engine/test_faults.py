"""A fault in any phase of a transition, on the real worker: undone everywhere, recorded, tokens unchanged."""

import pytest
from bed_runs import events, requests, roll

FULL = (0, 1, 2, 3)
MADE = requests([[70, 20], [6], [50], [8]])
SHRINK = ("prepare", "stage", "switch", "capture", "trial")
RESTORE = ("restore_wake", "restore_move", "restore_switch")


@pytest.fixture(scope="module")
def full(bed):
    return roll(bed, MADE, (4,))


@pytest.fixture(autouse=True)
def _no_fault_stays(bed):
    yield
    bed.call("strike", ())


@pytest.mark.parametrize("phase", SHRINK)
@pytest.mark.parametrize("rank", [0, 1], ids=["survivor", "leaver"])
def test_fault_before_the_commit_is_undone_and_the_next_attempt_works(bed, full, phase, rank):
    faults, skipped = len(events(bed, "fault")), len(events(bed, "plan_skipped"))
    bed.call("strike", (f"{phase}:{rank}:raise",))
    seen = roll(bed, MADE, (4, 2))
    assert seen.same_as(full)
    assert seen.worlds == [FULL, (0, 2), FULL]
    recorded = events(bed, "fault")[faults:]
    assert (rank, phase) in {(e["rank"], e["where"]) for e in recorded}
    assert f"rank {rank} failed in {phase}" in events(bed, "plan_skipped")[skipped]["reason"]


@pytest.mark.parametrize("phase", RESTORE)
@pytest.mark.parametrize("rank", [0, 1], ids=["survivor", "parked"])
def test_fault_in_a_restore_is_undone_and_tried_again(bed, full, phase, rank):
    skipped = len(events(bed, "plan_skipped"))
    bed.call("strike", (f"{phase}:{rank}:raise",))
    seen = roll(bed, MADE, (4, 2))
    assert seen.same_as(full)
    assert f"rank {rank} failed in {phase}" in events(bed, "plan_skipped")[skipped]["reason"]
    assert roll(bed, MADE, (4, 2, 1)).same_as(full)


def test_three_failures_give_the_stage_up_and_the_rollout_ends_in_the_full_world(bed, full):
    bed.call("strike", tuple(f"switch:2:raise:{nth}" for nth in (1, 2, 3)))
    seen = roll(bed, MADE, (4, 2))
    assert seen.worlds == [FULL]
    assert seen.same_as(full)
