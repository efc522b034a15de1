"""Every check of the log has logs that pass it, logs that trip it, and logs that give it no evidence."""

from __future__ import annotations

import pytest
from ledger_logs import ev, leave, ledger, one_step, window, worked

from flexfloor.events import Event
from flexfloor.ledger.records import StepResponses
from flexfloor.ledger.report import check_statuses
from flexfloor.ledger.validate import CHECKS, check_step


def commit(t: float, before: int, after: int, survivors: list[int] | None = None, **more: object) -> Event:
    named = {} if survivors is None else {"survivors": survivors}
    return ev(t, "stage_commit", from_=before, to=after, **named, **more)


def plan(ladder: list[int], **more: object) -> Event:
    return ev(0.1, "plan_installed", ladder=ladder, **more)


def lease(start: float, ack: float | None) -> list[Event]:
    return [ev(start, "sidecar_start", 1), *([] if ack is None else [ev(ack, "sidecar_ack", 1)])]


BACK = leave(1, 40, 42, 90)
SHRINK = [plan([4, 2, 1]), commit(38, 4, 2, [0, 2]), *leave(1, 40, 42, 90), *leave(3, 40, 42, 90)]

# check, status, a word of the problem, events beside the window of 4 ranks and 100 s
TABLE: list[tuple[str, str, str, list[Event]]] = [
    ("one_release_per_detach", "not checked", "", []),
    ("one_release_per_detach", "ok", "", BACK),
    ("one_release_per_detach", "ok", "", [*BACK, ev(41, "sleep_end", 1, tag="kv")]),
    ("one_release_per_detach", "ok", "", [ev(40, "detach_end", 1), ev(41, "restore_start", 1), ev(42, "sleep_end", 1)]),
    ("one_release_per_detach", "failed", "no sleep", [ev(40, "detach_end", 1), ev(90, "restore_start", 1)]),
    ("one_release_per_detach", "failed", "2 releases", [*BACK, ev(50, "sleep_end", 1)]),
    ("one_release_per_detach", "failed", "no return", [*leave(1, 20, 22), *leave(1, 50, 52, 90)]),
    ("no_decode_while_free", "not checked", "", BACK),
    ("no_decode_while_free", "ok", "", [*BACK, ev(39, "decode_audit", 1, full=5, eager=0)]),
    ("no_decode_while_free", "ok", "", [*BACK, ev(60, "decode_audit", 2, full=5, eager=0)]),
    ("no_decode_while_free", "ok", "", [*BACK, ev(60, "decode_audit", 1, full=0, eager=0)]),
    (
        "no_decode_while_free",
        "failed",
        "rank 1: decode audit at 60",
        [*BACK, ev(60, "decode_audit", 1, full=5, eager=0)],
    ),
    ("no_decode_while_free", "failed", "rank 1", [*BACK, ev(60, "decode_audit", 1, full=0, eager=1)]),
    ("no_eager_fallback", "not checked", "", BACK),
    ("no_eager_fallback", "not checked", "", [ev(39, "decode_audit", 1, full=0, eager=9)]),
    ("no_eager_fallback", "ok", "", [ev(39, "decode_audit", 1, full=5, eager=0, graphs=1)]),
    (
        "no_eager_fallback",
        "failed",
        "2 decode steps of rank 1 before 39 s",
        [ev(39, "decode_audit", 0, full=5, eager=0, graphs=1), ev(39, "decode_audit", 1, full=5, eager=2, graphs=1)],
    ),
    ("occupied_time_positive", "ok", "", BACK),
    ("occupied_time_positive", "failed", "rank 1", leave(1, -2, -1)),
    ("occupied_time_positive", "failed", "rank 1", leave(1, 0, 0, 101)),
    ("every_rank_accounted", "not checked", "", BACK),
    ("every_rank_accounted", "ok", "", [ev(1, "local_complete", rank) for rank in range(4)]),
    ("every_rank_accounted", "failed", "rank 4", [ev(1, "local_complete", 4)]),
    ("every_rank_accounted", "failed", "rank 3 left", SHRINK[:-4]),
    ("every_rank_accounted", "failed", "no replica", [ev(1, "local_complete", 0, replica=r) for r in (0, 1, None)]),
    ("stages_from_ladder", "not checked", "", BACK),
    ("stages_from_ladder", "not checked", "", SHRINK[1:]),
    ("stages_from_ladder", "ok", "", SHRINK),
    ("stages_from_ladder", "ok", "", [plan([4, 2, 1]), commit(38, 4, 1, [2])]),
    ("stages_from_ladder", "ok", "", [*SHRINK, commit(50, 2, 1, [0])]),
    ("stages_from_ladder", "ok", "", [*SHRINK, commit(95, 4, 2, [0, 1])]),
    ("stages_from_ladder", "failed", "not of the installed ladder", [plan([4, 2]), commit(38, 4, 3)]),
    ("stages_from_ladder", "failed", "does not shrink", [plan([4, 2]), commit(38, 2, 4)]),
    ("stages_from_ladder", "failed", "does not shrink", [plan([4, 2]), commit(38, 2, 2)]),
    ("stages_from_ladder", "failed", "no restore", [plan([4, 2]), commit(38, 4, 2), commit(60, 4, 2)]),
    ("stages_from_ladder", "failed", "3 survivors", [plan([4, 2]), commit(38, 4, 2, [0, 1, 2])]),
    ("restore_inside_window", "not checked", "", []),
    ("restore_inside_window", "not checked", "", leave(1, 40, 42)),
    ("restore_inside_window", "ok", "", BACK),
    ("restore_inside_window", "failed", "outside", leave(1, 40, 42, 101)),
    ("restore_inside_window", "failed", "restore_end at 100.5", leave(1, 40, 42, 99.5)),
    ("restore_inside_window", "failed", "no start", [*leave(1, 40, 42), ev(90, "restore_end", 1)]),
    ("restore_inside_window", "ok", "", [*BACK, ev(120, "wake_start", 1), ev(121, "wake_end", 1)]),
    ("restore_inside_window", "failed", "wake_start at 120", [*leave(1, 40, 42), ev(120, "wake_start", 1)]),
    ("ack_before_restore", "not checked", "", BACK),
    ("ack_before_restore", "ok", "", [*BACK, *lease(50, 85)]),
    ("ack_before_restore", "failed", "missing", [*BACK, *lease(50, None)]),
    ("ack_before_restore", "failed", "came at 91", [*BACK, *lease(50, 91)]),
    (
        "ack_before_restore",
        "failed",
        "missing",
        [*leave(1, 10, 11, 30), *lease(12, 20), *leave(1, 40, 42, 90), *lease(50, None)],
    ),
]


@pytest.mark.parametrize(("check", "status", "word", "events"), TABLE)
def test_check(check: str, status: str, word: str, events: list[Event]) -> None:
    found = {finding.check: finding for finding in check_step(one_step([*window(), *events]))}
    assert found[check].outcome.status == status, found[check].outcome
    if status == "failed":
        (problem, *_) = found[check].problems
        assert problem.startswith(f"{check}: seed 0 epoch 1 step 0: ")
        assert word in problem


@pytest.mark.parametrize("check", CHECKS)
def test_every_check_is_tripped_somewhere(check: str) -> None:
    tripped = {name for name, status, _, _ in TABLE if status == "failed"}
    assert check in tripped | {"responses_as_planned", "tokens_as_saved"}


@pytest.mark.parametrize(
    ("expected", "got", "status"),
    [
        ([2, 2, 2, 2], 8, "ok"),
        ({"0": 4, "3": 4}, 8, "ok"),
        ([2, 2, 2, 2], 7, "failed"),
        (None, 8, "not checked"),
        ([2, 2, 2, 2], None, "not checked"),
    ],
)
def test_responses_against_plan(expected: object, got: int | None, status: str) -> None:
    log = window()
    log.append(plan([4, 2]) if expected is None else plan([4, 2], expected=expected))
    if got is not None:
        log[1] = ev(100, "rollout_end", response_tokens=7000, world_size=4, responses=got)
    found = {finding.check: finding.outcome.status for finding in check_step(one_step(log))}
    assert found["responses_as_planned"] == status


def test_each_engine_states_its_own_count() -> None:
    log = [*window(), *(ev(0.1, "plan_installed", rank, ladder=[4, 2], expected=2) for rank in range(4))]
    saved = StepResponses(lengths=[875] * 8)
    found = {finding.check: finding.outcome.status for finding in check_step(one_step(log), saved)}
    assert (found["responses_as_planned"], found["tokens_as_saved"]) == ("ok", "ok")
    short = {finding.check: finding.outcome.status for finding in check_step(one_step(log), StepResponses(lengths=[7]))}
    assert (short["responses_as_planned"], short["tokens_as_saved"]) == ("failed", "failed")


def test_worked_case_has_no_problem_and_says_what_it_could_not_check() -> None:
    run = ledger(worked())
    assert run.problems == ()
    statuses = check_statuses(run)
    assert statuses["one_release_per_detach"] == ("ok", "")
    assert statuses["every_rank_accounted"] == ("not checked", "2 ranks without events are charged whole")
    assert statuses["no_decode_while_free"][0] == "not checked"


def test_killed_step_is_left_out_and_reported() -> None:
    run = ledger([*worked(), ev(200, "rollout_start", step=1), ev(210, "local_complete", 1, step=1)])
    assert run.totals.window_seconds == 100
    assert run.problems == (
        "log: seed 0 epoch 1 step 1: rollout_start at 200.000 has no rollout_end (killed); left out",
    )


def test_step_begun_again_after_a_kill_counts_once() -> None:
    run = ledger([ev(-50, "rollout_start"), ev(-40, "detach_end", 1), ev(-39, "sleep_end", 1), *worked()])
    assert run.totals.occupied.text(1) == "[320.0, 322.1]"
    assert len(run.problems) == 1


def test_events_of_another_run_are_reported() -> None:
    run = ledger([*window(), *leave(1, 40, 42, 90, run="other")])
    assert run.totals.occupied.hi == 400
    assert run.problems == ("log: seed 0 epoch 1 step 0: 4 events but no rollout window of run 'other'; left out",)


def test_events_without_a_step_go_by_their_time() -> None:
    run = ledger([*window(), *leave(1, 40, 42, 90, epoch=None, step=None), ev(150, "weights_loaded", 1, step=None)])
    assert run.totals.occupied.hi == 400 - 48


def test_marks_of_replicas_below_the_driver_change_nothing() -> None:
    servers = [
        ev(0.5, "rollout_start", replica=0),
        ev(99, "rollout_end", replica=0, response_tokens=7000, world_size=4),
    ]
    assert ledger([*worked(), *servers]).totals.occupied == ledger(worked()).totals.occupied
    assert ledger([*worked(), servers[0]]).problems == ()


def test_window_of_replicas_without_a_driver_is_their_hull() -> None:
    log = [*window(world=2, tokens=10, end=60, replica=0), *window(world=2, tokens=20, start=5, end=100, replica=1)]
    totals = ledger(log).totals
    assert (totals.window_seconds, totals.response_tokens, totals.ranks, totals.occupied.hi) == (100, 30, 4, 400)
