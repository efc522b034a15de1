"""A shrink captures the decode graph it needs; smaller ones follow when the load has stayed with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_sim import Script, Sim, asks

from flexfloor.elastic.recapture import PATIENCE

BUCKETS = (1, 2, 4, 8)


def sizes(sim: Sim, rank: int = 3) -> list[list[int]]:
    return [e.fields["sizes"] for e in sim.ranks[rank].named("capture_end")]


def test_one_graph_at_the_shrink_and_each_smaller_one_when_it_is_of_use(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4, buckets=BUCKETS)
    sim.rollout(Script(asks([3, 3, 3, [100, 70, 40, 40, 16, 16, 16]]), (4, 1)))
    (commit,) = sim.named("stage_commit")
    assert commit.fields["captured"] == [8]
    assert sizes(sim) == [[4], [2], [1]]
    assert sim.ranks[3].worker.graphs[3,] == {1, 2, 4, 8}
    assert all(sizes(sim, rank) == [] for rank in (0, 1, 2))


def test_sizes_that_the_load_passes_by_are_never_captured(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4, buckets=BUCKETS)
    falling = [60, *(20 + i for i in range(PATIENCE)), 19, 19, 19]
    sim.rollout(Script(asks([3, 3, 3, falling[:8]]), (4, 1)))
    assert sizes(sim) == [[1]]


def test_kept_graphs_are_not_captured_again(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4, buckets=BUCKETS)
    for _ in range(2):
        sim.rollout(Script(asks([3, 3, 3, [40, 20, 20]]), (4, 1)))
    assert [e.fields["captured"] for e in sim.named("stage_commit")] == [[4], []]
    assert sizes(sim) == [[1]]


def test_planned_residency_captures_all_of_them_beforehand(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4, buckets=BUCKETS)
    sim.rollout(Script(asks([3, 3, 3, [40, 20, 20]]), (4, 1), predicted=((3,),)))
    assert [e.fields["captured"] for e in sim.named("stage_commit")] == [[]]
    assert sizes(sim) == []
    assert next(e.fields["captured"] for e in sim.ranks[3].named("rehearsal")) == [1, 2, 4]


def test_survivors_capture_together(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4, buckets=BUCKETS)
    sim.rollout(Script(asks([3, 3, [40, 12], [40, 12]]), (4, 2)))
    assert sizes(sim, 2) == sizes(sim, 3) == [[1]]


def test_a_device_without_graphs_never_asks(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4)
    sim.rollout(Script(asks([3, 3, 3, [60, 40, 30, 16]]), (4, 1)))
    assert sim.named("capture_end") == []


PAIR = Script(asks([3, 3, [60, 30, 20, 10], [60, 30, 20, 10]]), (4, 2))


def test_a_capture_that_fails_on_a_rank_outside_of_the_world_is_recorded_and_not_tried_again(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4, buckets=BUCKETS, faults=["capture:0:raise:2"])
    sim.rollout(PAIR)
    (skipped,) = sim.named("plan_skipped")
    assert skipped.fields["reason"] == "no smaller decode graph: rank 0 failed in capture"
    assert sim.named("capture_end") == []
    assert len(sim.named("stage_commit")) == 1
    sim.rollout(PAIR)
    assert sizes(sim)


@pytest.mark.parametrize("rank", [2, 3])
def test_members_that_waited_for_one_in_vain_meet_over_new_groups(tmp_path: Path, rank: int) -> None:
    sim = Sim(tmp_path, 4, buckets=BUCKETS, faults=[f"capture:{rank}:raise:2"])
    sim.rollout(PAIR)
    (skipped,) = sim.named("plan_skipped")
    assert skipped.fields["reason"] == f"no smaller decode graph: rank {rank} failed in capture"
    assert sim.named("restore_start")[0].fields["reason"] == "a joint capture failed"
    assert [e.fields["survivors"] for e in sim.named("stage_commit")] == [[2, 3], [2, 3]]
    assert sim.named("capture_end") == []
    sim.rollout(PAIR)
    assert sizes(sim)


def test_a_lone_survivor_goes_on_when_its_capture_fails(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4, buckets=BUCKETS, faults=["capture:3:raise:2"])
    sim.rollout(Script(asks([3, 3, 3, [60, 30, 20, 10]]), (4, 1)))
    assert len(sim.named("plan_skipped")) == len(sim.named("stage_commit")) == 1
    assert {e.fields["reason"] for e in sim.named("restore_start")} == {"the step is complete"}
