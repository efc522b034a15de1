"""Faults in every phase and role: abandoned everywhere and tried again, or named with rank and phase."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from elastic_sim import Ask, Engine, Script, Sim, asks
from elastic_world import AbsentError, EndedError

from flexfloor.elastic import parking
from flexfloor.elastic.decision import MAX_ATTEMPTS
from flexfloor.elastic.shrinking import BACKOFF_SYNCS
from flexfloor.elastic.states import RESTORE_PHASES, SHRINK_PHASES, Phase
from flexfloor.elastic.ticket import Ticket
from flexfloor.errors import ProtocolError, TransitionError

STAIRS = asks([3, 4, 10, 24])
"""Four ranks; 4 -> 2 to ranks 2 and 3 at iteration 4, 2 -> 1 to rank 3 at iteration 10."""

SHRINK_ROLES = {
    "survivor": (3, 1),
    "leaver": (0, 1),
    "second survivor": (3, 2),
    "second leaver": (2, 2),
    "parked": (0, 2),
}
RESTORE_ROLES = {"member": 3, "parked": 0, "last parked": 2}


def name_of(value: Phase | str) -> str:
    return value.label if isinstance(value, Phase) else value


def wish(engine: Engine) -> None:
    engine.session.request_restore()


def faults_of(sim: Sim) -> list[tuple[int | None, str]]:
    return [(e.rank, e.fields["where"]) for e in sim.named("fault") if "injected" in e.fields["what"]]


def tickets_of(sim: Sim) -> list[Ticket]:
    seen: list[Ticket] = []
    worker = sim.ranks[1].worker
    stage, refill = worker.stage, worker.refill
    worker.stage = lambda t: (seen.append(t), stage(t))[1]  # type: ignore[method-assign]
    worker.refill = lambda t: (seen.append(t), refill(t))[1]  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(("phase", "role"), list(product(SHRINK_PHASES, SHRINK_ROLES)), ids=name_of)
def test_a_shrink_that_fails_is_undone_everywhere_and_tried_again(tmp_path: Path, phase: Phase, role: str) -> None:
    rank, nth = SHRINK_ROLES[role]
    sim = Sim(tmp_path, 4, faults=[f"{phase.label}:{rank}:raise:{nth}"])
    ledger = sim.rollout(Script(STAIRS, (4, 2, 1)))
    assert faults_of(sim) == [(rank, phase.label)]
    (skipped,) = sim.named("plan_skipped")
    assert skipped.fields["stage"] == (2 if nth == 1 else 1)
    assert skipped.fields["reason"] == f"rank {rank} failed in {phase.label}, attempt 1 of {MAX_ATTEMPTS}"
    assert [engine.worker.calls.count("undo") for engine in sim.ranks] == [1] * 4
    assert [(b, a) for b, a, _ in sim.commits()] == [(4, 2), (2, 1)]
    widths = [len(world) for world in sim.ranks[0].worlds]
    waits = BACKOFF_SYNCS if nth == 1 else 0
    assert widths.index(2) == 4 + waits
    assert widths.index(1) == (10 if nth == 1 else 10 + BACKOFF_SYNCS)
    assert ledger is not None
    assert ledger.skipped
    sim.rollout(Script(STAIRS, (4, 2, 1)))
    assert len(sim.commits()) == 4


@pytest.mark.parametrize("phase", SHRINK_PHASES, ids=name_of)
def test_three_failures_give_the_stage_up_and_the_step_still_finishes(tmp_path: Path, phase: Phase) -> None:
    sim = Sim(tmp_path, 4, faults=[f"{phase.label}:2:raise:{n}" for n in (1, 2, 3)])
    tall = (*STAIRS, Ask("long", 2, 60), Ask("longer", 3, 70))
    sim.rollout(Script(tall, (4, 2, 1)))
    assert sim.commits() == [(4, 1, (3,))], "two is given up, one is not"
    assert len(sim.named("plan_skipped")) == MAX_ATTEMPTS
    assert {e.fields["stage"] for e in sim.named("plan_skipped")} == {2}
    sim.rollout(Script(STAIRS, (4, 2, 1)))
    assert [(b, a) for b, a, _ in sim.commits()[1:]] == [(4, 2), (2, 1)], "a new step starts afresh"


def test_a_restore_gives_a_stage_its_attempts_back(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4, faults=[f"stage:2:raise:{n}" for n in (2, 3, 4)])
    calls = ((70, 3, wish),)
    sim.rollout(Script(asks([3, 4, 100, 120]), (4, 2, 1), calls=((6, 3, wish), *calls)))
    assert [a for _, a, _ in sim.commits()] == [2, 1]
    assert len(sim.named("plan_skipped")) == 3


@pytest.mark.parametrize("final", [True, False], ids=["at the end", "in mid-rollout"])
@pytest.mark.parametrize("phase", RESTORE_PHASES, ids=name_of)
@pytest.mark.parametrize("role", RESTORE_ROLES)
def test_a_restore_that_fails_is_undone_everywhere_and_tried_again(
    tmp_path: Path, phase: Phase, role: str, final: bool
) -> None:
    rank = RESTORE_ROLES[role]
    sim = Sim(tmp_path, 4, faults=[f"{phase.label}:{rank}:raise"], polls=2)
    sim.rollout(Script(STAIRS, (4, 2, 1), calls=() if final else ((14, 3, wish),)))
    assert faults_of(sim) == [(rank, phase.label)]
    (skipped,) = sim.named("plan_skipped")
    assert skipped.fields["stage"] == 4
    assert skipped.fields["reason"] == f"rank {rank} failed in {phase.label}, attempt 1 of {MAX_ATTEMPTS}"
    assert [engine.worker.calls.count("undo") for engine in sim.ranks] == [1] * 4
    assert len(sim.ranks[3].named("restore_end")) == (1 if final else 2)
    sim.rollout(Script(STAIRS, (4, 2, 1)))
    assert [(b, a) for b, a, _ in sim.commits()[-2:]] == [(4, 2), (2, 1)]


@pytest.mark.parametrize("phase", RESTORE_PHASES, ids=name_of)
@pytest.mark.parametrize("rank", [0, 3])
def test_a_topology_restore_that_fails_is_tried_again(tmp_path: Path, phase: Phase, rank: int) -> None:
    sim = Sim(tmp_path, 4, faults=[f"{phase.label}:{rank}:raise"])
    sim.rollout(Script(STAIRS, (4, 2), end="topology"))
    assert faults_of(sim) == [(rank, phase.label)]
    assert [engine.worker.memory for engine in sim.ranks] == [False, False, True, True]
    sim.all(lambda engine: engine.session.wake_all())
    sim.rollout(Script(STAIRS, (4, 2)))


@pytest.mark.parametrize("phase", RESTORE_PHASES, ids=name_of)
def test_three_failed_restores_end_the_step_with_rank_and_phase_everywhere(tmp_path: Path, phase: Phase) -> None:
    sim = Sim(tmp_path, 4, faults=[f"{phase.label}:1:raise:{n}" for n in (1, 2, 3)])
    with pytest.raises(TransitionError, match="could not be restored"):
        sim.rollout(Script(STAIRS, (4, 2)))
    assert len(sim.steps.errors) == 4
    for error in sim.steps.errors.values():
        assert isinstance(error, TransitionError)
        assert (error.rank, error.phase) == (1, phase.label), "the rank at fault, not one that waited for it"
    assert len(sim.named("plan_skipped")) == 2


def test_failures_of_restores_that_worked_in_the_end_do_not_add_up(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4, faults=[f"restore_switch:1:raise:{n}" for n in (1, 2, 4, 5)])
    sim.rollout(Script(asks([3, 4, 40, 60]), (4, 2), calls=((12, 3, wish),)))
    assert len(sim.named("plan_skipped")) == 4


def test_two_ranks_that_fail_at_once_are_one_attempt(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4, faults=["switch:0:raise", "switch:2:raise"])
    sim.rollout(Script(STAIRS, (4, 2, 1)))
    assert sorted(faults_of(sim)) == [(0, "switch"), (2, "switch")]
    (skipped,) = sim.named("plan_skipped")
    assert skipped.fields["reason"].startswith("rank 0 failed in switch, attempt 1")


@pytest.mark.parametrize(
    ("faults", "rank", "restores"),
    [
        (["trial:3:raise", "rollback:1:raise"], 1, False),
        (["prepare:0:raise", "rollback:0:raise"], 0, False),
        (["restore_move:0:raise", "rollback:2:raise"], 2, True),
    ],
)
def test_a_rollback_that_fails_ends_the_step_everywhere(
    tmp_path: Path, faults: list[str], rank: int, restores: bool
) -> None:
    sim = Sim(tmp_path, 4, faults=faults)
    with pytest.raises(TransitionError):
        sim.rollout(Script(STAIRS, (4, 2)))
    assert len(sim.steps.errors) == 4
    for error in sim.steps.errors.values():
        assert isinstance(error, TransitionError)
        assert (error.rank, error.phase) == (rank, "rollback")
    assert bool(sim.commits()) is restores


@pytest.mark.parametrize("injected", [True, False], ids=["injected", "worker"])
@pytest.mark.parametrize(
    ("phase", "rank", "method"),
    [
        ("confirm", 2, "confirm"),
        ("confirm", 0, "confirm"),
        ("park", 1, "park"),
        ("restore_confirm", 0, "confirm"),
        ("restore_confirm", 3, "confirm"),
    ],
)
def test_after_the_vote_a_failure_ends_the_step_with_rank_and_phase(
    tmp_path: Path, phase: str, rank: int, method: str, injected: bool
) -> None:
    sim = Sim(tmp_path, 4, faults=[f"{phase}:{rank}:raise"] if injected else [])
    worker = sim.ranks[rank].worker
    if not injected and phase != "restore_confirm":
        worker.breaks[method] = RuntimeError("driver says no")
    elif not injected:
        switch_back = worker.switch_back
        worker.switch_back = lambda t: (  # type: ignore[method-assign]
            worker.breaks.update(confirm=RuntimeError("driver says no")),
            switch_back(t),
        )[1]
    with pytest.raises(TransitionError, match=f"rank {rank} failed in phase '{phase}': (injected|driver says no)"):
        sim.rollout(Script(STAIRS, (4, 2)))
    assert [(e.rank, e.fields["where"]) for e in sim.named("fault")] == [(rank, phase)]
    others = {r: e for r, e in sim.steps.errors.items() if r != rank}
    assert all(isinstance(error, EndedError | AbsentError) for error in others.values())
    assert sim.board.read(rank).phase.label == phase, "the watchdog reads it there"


def test_a_release_that_fails_later_is_reported_by_its_rank(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4, polls=5)
    sim.ranks[1].worker.park_error = "OSError: cannot unmap"
    with pytest.raises(TransitionError, match="rank 1 failed in phase 'park': OSError: cannot unmap"):
        sim.rollout(Script(STAIRS, (4, 2)))
    assert [(e.rank, e.fields["what"]) for e in sim.named("fault")] == [(1, "OSError: cannot unmap")]
    assert sim.ranks[1].named("sleep_end") == []


def test_a_release_that_never_ends_is_named_when_the_full_world_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parking, "RELEASE_DEADLINE_S", 0.02)
    sim = Sim(tmp_path, 4, polls=10**9)
    with pytest.raises(TransitionError, match=r"'park': memory was not given back within 0\.02 s"):
        sim.rollout(Script(STAIRS, (4, 2)))
    assert {e.fields["where"] for e in sim.named("fault")} == {"park"}


@pytest.mark.parametrize("method", ["prepare", "stage", "switch", "capture", "trial"])
def test_a_worker_that_raises_is_a_failed_vote_not_a_dead_rank(tmp_path: Path, method: str) -> None:
    sim = Sim(tmp_path, 4)
    sim.ranks[2].worker.breaks[method] = RuntimeError("out of memory")
    sim.rollout(Script(STAIRS, (4, 2, 1)))
    assert "RuntimeError: out of memory" in [e.fields["what"] for e in sim.named("fault")]
    assert len(sim.commits()) == 2


@pytest.mark.parametrize(("fault", "broken"), [("stage", True), ("switch", False)])
def test_a_broken_channel_is_rebuilt_by_the_next_ticket_alone(tmp_path: Path, fault: str, broken: bool) -> None:
    sim = Sim(tmp_path, 4, faults=[f"{fault}:3:raise"])
    seen = tickets_of(sim)
    sim.rollout(Script(STAIRS, (4, 2, 1)))
    rebuilt = [ticket.rebuild for ticket in seen]
    assert rebuilt[0] == ()
    assert rebuilt[1] == ((0, 1, 2, 3) if broken else ())
    assert set(rebuilt[2:]) == {()}
    assert [ticket.serial for ticket in seen] == [1, 2, 3, 4]


def test_a_channel_broken_by_a_restore_is_rebuilt_too(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4, faults=["restore_move:0:raise"])
    seen = tickets_of(sim)
    sim.rollout(Script(STAIRS, (4, 2)))
    assert [bool(ticket.rebuild) for ticket in seen] == [False, False, True]


def test_rows_of_an_abandoned_stage_are_not_trusted(tmp_path: Path) -> None:
    """The failing rank never received its rows: the next attempt has to move them again."""
    sim = Sim(tmp_path, 4, faults=["stage:2:raise"])
    seen = tickets_of(sim)
    sim.rollout(Script(STAIRS, (4, 2)))
    assert len(seen[0].moves) == len(seen[1].moves) == 8
    assert [e.fields["moved_rows"] for e in sim.named("stage_commit")] == [8]


def test_a_fault_before_anything_moved_keeps_spare_copies(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4, faults=["prepare:2:raise:2"])
    for _ in range(2):
        sim.rollout(Script(STAIRS, (4, 2)))
    assert [e.fields["moved_rows"] for e in sim.named("stage_commit")] == [8, 0]


def test_ranks_that_are_not_in_the_same_phase_are_a_bug(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4)
    phases = [Phase.STAGE, Phase.STAGE, Phase.SWITCH, Phase.STAGE]
    with pytest.raises(ProtocolError, match=r"ranks \[2\] are not in phase stage"):
        sim.all(lambda engine: engine.session.ballot.carry_out(phases[engine.rank], lambda: None))


def test_a_fault_in_the_agreement_ends_the_step(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4, faults=["agree:1:raise:3"])
    with pytest.raises(Exception, match="injected in agree"):
        sim.rollout(Script(STAIRS, (4, 2)))
    assert sim.board.read(1).phase is Phase.AGREE
