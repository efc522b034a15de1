"""Planned residency: predicted worlds are made ready before the first token; a wrong prediction costs only time."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_sim import Script, Sim, asks

from flexfloor.driver.orders import predicted_survivors
from flexfloor.elastic.states import SHRINK_PHASES, Phase
from flexfloor.errors import RefusedError, TransitionError
from flexfloor.plan import RankPlan, StepPlan, release_area

STAIRS = asks([3, 4, 10, 24])
"""Four ranks; 4 -> 2 to ranks 2 and 3 at iteration 4, 2 -> 1 to rank 3 at iteration 10."""
PREDICTED = ((2, 3), (3,))


def commits(sim: Sim) -> list[tuple[int, int, tuple[int, ...], int]]:
    found = sim.named("stage_commit")
    return [(e.fields["from"], e.fields["to"], tuple(e.fields["survivors"]), e.fields["moved_rows"]) for e in found]


def test_rows_travel_before_the_first_token_and_none_at_the_transition(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4)
    sim.rollout(Script(STAIRS, (4, 2, 1), predicted=PREDICTED))
    assert commits(sim) == [(4, 2, (2, 3), 0), (2, 1, (3,), 0)]
    rehearsals = sim.named("rehearsal")
    assert [e.rank for e in rehearsals].count(0) == 1
    assert rehearsals[0].fields["worlds"] == [[2, 3], [3]]
    assert rehearsals[0].fields["whole"] is True
    assert rehearsals[0].fields["moved_rows"] == 8 + 8
    assert all(event.t < sim.named("local_complete")[0].t for event in rehearsals)
    assert [event for event in sim.named("sleep_start") if event.t < rehearsals[-1].t] == []


def test_nobody_leaves_or_gives_memory_back_in_a_rehearsal(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4)
    sim.rollout(Script(asks([9, 9, 9, 9]), (4, 2, 1), predicted=PREDICTED))
    assert sim.named("detach_start", "sleep_start", "stage_commit", "restore_start") == []
    assert len(sim.named("rehearsal")) == 4
    assert all(engine.worker.calls.count("park") == 0 for engine in sim.ranks)


@pytest.mark.parametrize("predicted", [((0, 1), (0,)), ((1, 2), (2,)), ((0, 3), (0,))])
def test_a_wrong_prediction_falls_back_to_the_transition(
    tmp_path: Path, predicted: tuple[tuple[int, ...], ...]
) -> None:
    sim = Sim(tmp_path, 4)
    sim.rollout(Script(STAIRS, (4, 2, 1), predicted=predicted))
    assert [c[:3] for c in commits(sim)] == [(4, 2, (2, 3)), (2, 1, (3,))]
    assert commits(sim)[0][3] > 0


def test_idle_ranks_that_hold_rows_are_chosen_to_fill_up(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4)
    sim.rollout(Script(asks([2, 2, 2, 20]), (4, 2), predicted=((1, 3),)))
    assert commits(sim) == [(4, 2, (1, 3), 0)]


def test_a_second_step_with_the_same_weights_moves_nothing_at_all(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4)
    for _ in range(2):
        sim.rollout(Script(asks([5, 5, 5, 5]), (4, 2, 1), predicted=PREDICTED))
    moved = [e.fields["moved_rows"] for e in sim.named("rehearsal") if e.rank == 0]
    assert moved == [16, 0]


def spare_rows(sim: Sim) -> list[list[str | None]]:
    return [engine.worker.rows[4:] for engine in sim.ranks]


EMPTY = [[None] * 12] * 4


def test_new_weights_reach_the_rows_that_planned_residency_keeps(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4)
    sim.rollout(Script(STAIRS, (4, 2, 1), predicted=PREDICTED))
    sim.all(lambda engine: engine.session.loaded(7))
    held = {row for rows in spare_rows(sim) for row in rows if row is not None}
    assert len(held) == 16 - 4, "rank 3 is to hold every expert, rank 2 half of them"
    assert {row.split(".")[1] for row in held} == {"7"}
    sim.rollout(Script(STAIRS, (4, 2, 1), predicted=PREDICTED))
    assert [e.fields["moved_rows"] for e in sim.named("rehearsal") if e.rank == 0] == [16, 0]


def test_new_weights_leave_no_spare_row_without_planned_residency(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4)
    sim.rollout(Script(STAIRS, (4, 2, 1)))
    sim.all(lambda engine: engine.session.loaded())
    assert spare_rows(sim) == EMPTY
    sim.rollout(Script(STAIRS, (4, 2, 1)))
    assert [c[3] for c in commits(sim)] == [8, 8] * 2


def test_a_step_without_prediction_ends_the_residency(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4)
    sim.rollout(Script(STAIRS, (4, 2, 1), predicted=PREDICTED))
    sim.rollout(Script(STAIRS, (4, 2, 1)))
    sim.all(lambda engine: engine.session.loaded())
    assert spare_rows(sim) == EMPTY


@pytest.mark.parametrize("rank", range(4))
def test_spare_rows_that_could_not_be_filled_stay_empty_and_the_next_step_fills_them(tmp_path: Path, rank: int) -> None:
    sim = Sim(tmp_path, 4, faults=[f"load:{rank}:raise:2"])
    sim.rollout(Script(STAIRS, (4, 2, 1), predicted=PREDICTED))
    sim.all(lambda engine: engine.session.loaded())
    (skipped,) = sim.named("plan_skipped")
    assert skipped.fields["reason"] == f"spare rows stay empty: rank {rank} failed in load"
    assert all(engine.session.placement.spares() == {r: {} for r in range(4)} for engine in sim.ranks)
    sim.rollout(Script(STAIRS, (4, 2, 1), predicted=PREDICTED))
    assert [e.fields["moved_rows"] for e in sim.named("rehearsal") if e.rank == 0] == [16, 16]


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("phase", SHRINK_PHASES, ids=lambda phase: phase.label)
def test_a_failed_rehearsal_is_undone_and_the_step_goes_on(tmp_path: Path, phase: Phase, nth: int, rank: int) -> None:
    sim = Sim(tmp_path, 4, faults=[f"{phase.label}:{rank}:raise:{nth}"])
    ledger = sim.rollout(Script(STAIRS, (4, 2, 1), predicted=PREDICTED))
    assert [c[:3] for c in commits(sim)] == [(4, 2, (2, 3)), (2, 1, (3,))]
    (skipped,) = sim.named("plan_skipped")
    assert skipped.fields["stage"] == (2 if nth == 1 else 1)
    assert "not prepared" in skipped.fields["reason"]
    assert ledger is not None
    assert {e.fields["whole"] for e in sim.named("rehearsal")} == {False}
    sim.rollout(Script(STAIRS, (4, 2, 1), predicted=PREDICTED))
    assert [c[3] for c in commits(sim)[2:]] == [0, 0]


def test_going_back_is_tried_again(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4, faults=["restore_switch:2:raise", "restore_switch:2:raise:2"])
    sim.rollout(Script(STAIRS, (4, 2, 1), predicted=PREDICTED))
    assert [e.fields["reason"] for e in sim.named("plan_skipped")] == [
        "not prepared: rank 2 failed in restore_switch"
    ] * 2
    assert [c[3] for c in commits(sim)] == [0, 0]


def test_a_rank_that_cannot_go_back_ends_the_step_with_its_name(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4, faults=[f"restore_switch:2:raise:{n}" for n in (1, 2, 3)])
    with pytest.raises(TransitionError, match=r"rank 2.*restore_switch"):
        sim.rollout(Script(STAIRS, (4, 2, 1), predicted=PREDICTED))


@pytest.mark.parametrize(
    ("ladder", "predicted"),
    [
        ((4, 2, 1), ((2, 3),)),
        ((4, 2), ((2, 3), (3,))),
        ((4, 2), ((1, 2, 3),)),
        ((4, 2), ((3, 2),)),
        ((4, 2), ((2, 4),)),
        ((4, 2, 1), ((2, 3), (1,))),
    ],
)
def test_predictions_that_are_no_way_down_the_ladder_are_refused(
    tmp_path: Path, ladder: tuple[int, ...], predicted: tuple[tuple[int, ...], ...]
) -> None:
    sim = Sim(tmp_path, 4)
    with pytest.raises(RefusedError, match="predict"):
        sim.all(lambda engine: engine.install(Script(STAIRS, ladder, predicted=predicted)))
    assert all(engine.session.step is None for engine in sim.ranks)


def planned(residency: str, completions: list[int]) -> StepPlan:
    times = tuple(sorted(completions)[4 - size - 1] for size in (2, 1))
    ranks = tuple(RankPlan(rank=r, items=(f"p{r}",), completion=c, peak_tokens=c) for r, c in enumerate(completions))
    return StepPlan(
        step=0,
        items=tuple(f"p{r}" for r in range(4)),
        cap=None,
        tail=max(completions),
        floor=1,
        ladder=(4, 2, 1),
        quorum_times=times,
        release_area=release_area((4, 2, 1), times, max(completions)),
        residency=residency,
        kv_tokens_per_rank=None,
        capture_sizes=(),
        kv_safe=True,
        optimality_gap=0.0,
        excluded_floors={},
        ranks=ranks,
    )


def test_the_plan_predicts_the_ranks_that_complete_last_and_ties_by_the_order_of_leaving() -> None:
    step = planned("planned", [9, 40, 3, 40])
    assert predicted_survivors(step, (4, 2, 1), (0, 1, 2, 3)) == ((1, 3), (3,))
    assert predicted_survivors(step, (4, 2, 1), (3, 2, 1, 0)) == ((1, 3), (1,))
    assert predicted_survivors(step, (4,), (0, 1, 2, 3)) == ()
    assert predicted_survivors(planned("natural", [9, 40, 3, 40]), (4, 2, 1), (0, 1, 2, 3)) == ()
