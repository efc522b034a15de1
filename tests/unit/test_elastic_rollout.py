"""Whole rollouts of the protocol in the simulator, without faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from elastic_sim import LONG, Ask, Engine, Script, Sim, asks, at, wish
from elastic_world import weight

from flexfloor.elastic.cadence import STRIDE
from flexfloor.elastic.placement import Move
from flexfloor.elastic.states import Phase, RankState
from flexfloor.elastic.step import Local, Step
from flexfloor.errors import ProtocolError, RefusedError, TransitionError


@pytest.fixture
def sim(tmp_path: Path) -> Sim:
    return Sim(tmp_path, 4)


# -- shrinking ---------------------------------------------------------------------------------------


def test_shrinks_to_who_is_unfinished_not_by_number(sim: Sim) -> None:
    ledger = sim.rollout(Script(asks(LONG), (4, 2, 1)))
    assert sim.commits() == [(4, 2, (1, 3)), (2, 1, (3,))]
    assert ledger is not None
    assert [(t.before, t.after) for t in ledger.transitions] == [(4, 2), (2, 1)]
    assert ledger.entries[0].occupancy.free.lo > 0
    widths = [len(world) for world in sim.ranks[0].worlds]
    assert widths[:4] == [4] * 4, "the first sync opens the gate, then four steps to the quorum"
    assert widths == [*sorted(widths[:-1], reverse=True), 4]


def test_stages_are_skipped_where_both_quorums_are_met_at_once(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 16, 32, 2)
    lengths = [2] * 16
    lengths[5] = lengths[9] = 12
    lengths[14] = 20
    sim.rollout(Script(asks(lengths), (16, 8, 4, 2)))
    assert [(before, after) for before, after, _ in sim.commits()] == [(16, 4), (4, 2)]
    assert {5, 9, 14} <= set(sim.commits()[0][2])
    assert 14 in sim.commits()[1][2]


def test_a_ladder_of_the_full_world_alone_never_shrinks(sim: Sim) -> None:
    sim.rollout(Script(asks(LONG), (4,)))
    assert sim.commits() == []
    assert set(sim.ranks[0].worker.calls) <= {"drain"}


def test_ranks_without_requests_may_leave_before_the_first_step(sim: Sim) -> None:
    sim.rollout(Script(asks([0, 6, 0, 0]), (4, 2, 1)))
    assert sim.commits() == [(4, 1, (1,))]
    assert sim.ranks[0].steps == []
    assert sim.ranks[1].steps == list(range(1, 7))


def test_no_step_before_every_trajectory_arrived_with_the_gate(sim: Sim) -> None:
    late = (*asks([3, 3, 3]), Ask("late", 3, 3, at=7))
    sim.rollout(Script(late, (4, 2)))
    assert [engine.steps[0] for engine in sim.ranks] == [8] * 4, "rows of iteration 7 open the gate"
    assert sim.commits() == []


def test_without_the_gate_no_rank_leaves_before_its_trajectories_arrived(sim: Sim) -> None:
    late = (Ask("a", 0, 20), Ask("b", 1, 1), Ask("c", 2, 1, at=9), Ask("d", 3, 1, at=12))
    sim.rollout(Script(late, (4, 2, 1), gate=False))
    assert sim.ranks[2].steps[0] == 0
    assert [after for _, after, _ in sim.commits()] == [2, 1]
    first, second = (next(i for i, w in enumerate(sim.ranks[0].worlds) if len(w) == size) for size in (2, 1))
    assert (first, second) == (9, 12)
    assert sim.commits()[0][2] == (0, 3)


def test_an_expected_trajectory_that_never_comes_holds_until_revised(sim: Sim) -> None:
    revise = at(15, 0, lambda engine: engine.session.trajectories.revise(-1))
    sim.rollout(Script(asks(LONG), (4, 1), expected=(2, 1, 2, 1), gate=False, calls=(revise,)))
    assert next(i for i, world in enumerate(sim.ranks[0].worlds) if len(world) == 1) == 15
    assert sim.commits() == [(4, 1, (3,))]


def test_an_open_trajectory_holds_its_rank_until_closed(sim: Sim) -> None:
    turns = (
        Ask("t1", 0, 2, trajectory="t", more=True),
        Ask("t2", 0, 2, at=9, trajectory="t", more=True),
        *asks([0, 1, 1, 30]),
    )
    close = at(16, 0, lambda engine: engine.session.trajectories.close_trajectory("t"))
    sim.rollout(Script(turns, (4, 1), calls=(close,)))
    assert sim.commits() == [(4, 1, (3,))]
    assert next(i for i, world in enumerate(sim.ranks[0].worlds) if len(world) == 1) == 16


def test_an_aborted_request_completes_its_rank(sim: Sim) -> None:
    script = Script((*asks([2, 2, 2, 30]), Ask("gone", 0, 500, abort_at=6)), (4, 1))
    sim.rollout(script)
    assert sim.commits() == [(4, 1, (3,))]
    assert 6 <= next(i for i, world in enumerate(sim.ranks[0].worlds) if len(world) == 1) < 6 + STRIDE


def test_digests_that_differ_never_arm(sim: Sim) -> None:
    script = Script(asks(LONG), (4, 2), gate=False, digests=("1" * 64, "1" * 64, "2" * 64, "1" * 64))
    sim.rollout(script)
    assert sim.commits() == []
    assert all(engine.session.step is not None for engine in sim.ranks), "the step is still to be withdrawn"
    assert not any(engine.session.world.armed for engine in sim.ranks)
    for engine in sim.ranks:
        engine.session.withdraw()
    sim.rollout(Script(asks(LONG), (4, 2)))
    assert [c[1] for c in sim.commits()] == [2]


def test_empty_but_open_keeps_the_wave_running_until_it_is_closed(sim: Sim) -> None:
    closing = tuple(at(20, rank, lambda engine: engine.session.trajectories.close()) for rank in range(4))
    more = (*asks([2, 2, 2, 2]), Ask("extra", 2, 3, at=10, extra=True))
    sim.rollout(Script(more, (4, 2), auto_close=False, calls=closing))
    assert len(sim.ranks[0].worlds) == 21
    assert sim.commits() == [(4, 2, (2, 3))], "with one extra request only, two ranks are enough"


@pytest.mark.parametrize(
    "script",
    [
        Script(asks([1, 1, 1, 20]), (4, 1)),
        Script(asks(LONG), (4, 2, 1)),
        Script(asks(LONG), (4, 2), predicted=((1, 3),)),
        Script(asks(LONG), (4, 1), calls=(at(20, 3, wish),)),
        Script(tuple(replace(ask, spare=9) for ask in asks(LONG)), (4, 2, 1), end="topology"),
    ],
    ids=["one stage", "two stages", "planned", "restore in between", "ends before its limit"],
)
def test_batches_in_flight_are_taken_in_before_a_transition(tmp_path: Path, script: Script) -> None:
    sim = Sim(tmp_path, 4, buckets=(1, 2), flight=True)
    sim.rollout(script)
    assert sim.commits()
    assert all("drain" in engine.worker.calls for engine in sim.ranks)


# -- pause -------------------------------------------------------------------------------------------


def test_pause_needs_every_rank_and_holds_transitions_meanwhile(sim: Sim) -> None:
    def pause(engine: Engine) -> None:
        engine.pause = True

    calls = tuple(at(2 + 2 * rank, rank, pause) for rank in range(4))
    sim.rollout(Script(asks([3, 3, 3, 30]), (4, 1), calls=calls))
    assert [engine.paused_at for engine in sim.ranks] == [[8]] * 4
    assert next(i for i, world in enumerate(sim.ranks[0].worlds) if len(world) == 1) == 9


def test_pause_reaches_parked_ranks(sim: Sim) -> None:
    def pause(engine: Engine) -> None:
        engine.pause = True

    sim.rollout(Script(asks(LONG), (4, 2), calls=tuple(at(15, rank, pause) for rank in range(4))))
    (paused,) = sim.ranks[0].paused_at
    assert 15 <= paused < 15 + STRIDE
    assert all(engine.paused_at == [paused] for engine in sim.ranks)


# -- late requests and restores ------------------------------------------------------------------------


def test_a_late_request_to_a_parked_rank_is_served_and_a_second_exit_follows(sim: Sim) -> None:
    late = (*asks(LONG), Ask("late", 0, 4, at=14, extra=True))
    sim.rollout(Script(late, (4, 2, 1)))
    assert sim.ranks[0].tokens["late"]
    assert [(b, a) for b, a, _ in sim.commits()] == [(4, 2), (2, 1), (4, 2), (2, 1)]
    assert sim.ranks[0].named("restore_start")[0].fields["reason"] == "rank 0 asked for the full world"
    third = sim.commits()[2]
    assert set(third[2]) == {0, 3}
    served = sim.ranks[0].named("local_complete")
    assert len(served) == 2, "complete again after the late request"


def test_a_request_that_meets_a_leaver_before_it_parks(sim: Sim) -> None:
    sizes = [4, 4, 4, 4, 4, 4, 2]
    late = (*asks(LONG), Ask("late", 0, 4, at=len(sizes) - 1, extra=True))
    sim.rollout(Script(late, (4, 2)))
    assert [len(w) for w in sim.ranks[0].worlds[:8]] == [4, 4, 4, 4, 4, 2, 4, 4]


def test_a_wish_for_the_full_world_is_granted_once(sim: Sim) -> None:
    sim.rollout(Script(asks(LONG), (4, 2), calls=(at(8, 3, wish),)))
    kinds = [e.fields["reason"] for e in sim.ranks[1].named("restore_start")]
    assert kinds == ["rank 3 asked for the full world", "the step is complete"]
    assert [a for _, a, _ in sim.commits()] == [2, 2]
    assert sim.commits()[0] == sim.commits()[1]
    assert sim.named("stage_commit")[1].fields["moved_rows"] == 0, "what they got the first time is still there"


def test_a_wish_in_the_full_world_does_not_undo_a_later_exit(sim: Sim) -> None:
    sim.rollout(Script(asks(LONG), (4, 2), calls=(at(1, 3, wish),)))
    assert len(sim.commits()) == 1
    assert len(sim.ranks[3].named("restore_start")) == 1


def test_a_slow_release_delays_nobody_but_the_restore(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4, polls=40)
    sim.rollout(Script(asks(LONG), (4, 2, 1)))
    assert len(sim.ranks[3].worlds) == 31, "one iteration a token and one for the gate"
    assert len(sim.named("sleep_end")) == 3


def test_many_rollouts_one_after_another(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4, 16, 1, seed=3)
    for turn in range(12):
        lengths = [(turn * 7 + rank * 5) % 11 + 1 for rank in range(4)]
        sim.rollout(Script(asks(lengths), (4, 2, 1) if turn % 3 else (4, 1)))
    assert len({engine.session.serial for engine in sim.ranks}) == 1
    assert len(sim.commits()) >= 12


def test_plain_waves_run_as_before_between_steps(sim: Sim) -> None:
    sim.rollout(Script(asks(LONG)))
    assert sim.commits() == []
    assert [engine.session.state for engine in sim.ranks] == [RankState.FULL] * 4
    assert len(sim.ranks[0].worlds) == 30, "nothing waits for a gate"


def test_a_plan_installed_while_engines_run_never_splits_a_collective(sim: Sim) -> None:
    """The acknowledgement of one rank says nothing of the next: all step on until all hold the plan, then all wait."""
    other = Script(asks([0, 0, 6, 9]), (4, 2))

    def install(engine: Engine) -> None:
        engine.install(other)

    calls = tuple(at(3 + 2 * rank, rank, install) for rank in range(4))
    late = tuple(Ask(f"late{a.name}", a.rank, a.length, at=14) for a in other.asks)
    sim.rollout(Script((*asks([12, 1, 1, 12]), *late), calls=calls))
    assert [engine.steps[9:11] for engine in sim.ranks] == [[9, 15]] * 4
    assert [c[1] for c in sim.commits()] == [2]


# -- topology restore, wake, weights -------------------------------------------------------------------


def test_topology_restore_leaves_the_sleepers_asleep_and_wake_all_brings_them_back(sim: Sim) -> None:
    sim.rollout(Script(asks(LONG), (4, 2, 1), end="topology"))
    assert [engine.session.asleep for engine in sim.ranks] == [{0, 1, 2}] * 4
    assert [engine.worker.memory for engine in sim.ranks] == [False, False, False, True]
    assert "refill" in sim.ranks[0].worker.calls
    assert sim.named("wake_end") == []
    with pytest.raises(ProtocolError, match="restore and wake it first"):
        sim.ranks[3].install(Script((), (4, 2)))
    sim.all(lambda engine: engine.session.wake_all())
    assert len(sim.named("wake_start")) == len(sim.named("wake_end")) == 3
    assert [engine.session.asleep for engine in sim.ranks] == [set()] * 4
    sim.all(lambda engine: engine.session.wake_all())
    assert len(sim.named("wake_end")) == 3, "idempotent"
    sim.rollout(Script(asks(LONG), (4, 2, 1)))
    assert len(sim.commits()) == 4


def test_weights_are_refused_while_ranks_have_no_memory(sim: Sim) -> None:
    sim.rollout(Script(asks(LONG), (4, 2), end="topology"))
    asleep = [engine.session.asleep for engine in sim.ranks]
    for engine in sim.ranks:
        with pytest.raises(ProtocolError, match="wake all first"):
            engine.session.loaded()
    assert [engine.session.asleep for engine in sim.ranks] == asleep, "nothing changes where it raises"
    sim.all(lambda engine: engine.session.wake_all())
    sim.all(lambda engine: engine.session.loaded())
    sim.rollout(Script(asks(LONG), (4, 2)))


def test_loaded_weights_outdate_spare_copies(sim: Sim) -> None:
    sim.rollout(Script(asks(LONG), (4, 2), end="topology"))
    sim.all(lambda engine: engine.session.wake_all())
    for engine in sim.ranks:
        worker = engine.worker
        worker.released, worker.dense = False, True
        worker.rows = [None] * len(worker.rows)
        for row, expert in sim.base.active[engine.rank].items():
            worker.rows[row] = weight(expert)
        engine.session.loaded()
        assert engine.session.asleep == set()
    sim.rollout(Script(asks(LONG), (4, 2)))
    assert [e.fields["moved_rows"] for e in sim.named("stage_commit")] == [8, 8]


def test_weights_are_refused_outside_of_the_full_world(sim: Sim) -> None:
    seen: list[str] = []

    def load(engine: Engine) -> None:
        with pytest.raises(ProtocolError, match="only in the full world") as error:
            engine.session.loaded()
        seen.append(str(error.value))

    sim.rollout(Script(asks(LONG), (4, 2), calls=(at(12, 0, load), at(12, 3, load))))
    assert len(seen) == 2


def test_waking_that_fails_ends_the_step_with_rank_and_phase(tmp_path: Path) -> None:
    for phase in ("restore_wake", "restore_move"):
        sim = Sim(tmp_path, 4, faults=[f"{phase}:1:raise:2"])
        sim.rollout(Script(asks(LONG), (4, 2), end="topology"))
        with pytest.raises(TransitionError) as error:
            sim.all(lambda engine: engine.session.wake_all())
        assert (error.value.rank, error.value.phase) == (1, phase)
        assert [e.rank for e in sim.named("fault") if "injected" in e.fields["what"]] == [1]
        assert all(isinstance(e, TransitionError) for e in sim.steps.errors.values())


# -- install, withdraw, status ---------------------------------------------------------------------------


def test_a_second_plan_is_refused_while_a_step_is_open(sim: Sim) -> None:
    session = sim.ranks[0].session
    sim.number = 0
    sim.ranks[0].install(Script((), (4, 2)))
    with pytest.raises(ProtocolError, match="step 0 is still open on rank 0"):
        sim.ranks[0].install(Script((), (4, 2)))
    session.withdraw()
    assert session.step is None
    assert not session.held
    sim.ranks[0].install(Script((), (4, 2)))


def test_a_refused_plan_leaves_no_trace(sim: Sim) -> None:
    sim.number = 0
    for ladder in ((4, 3), (2, 1), (8, 4)):
        with pytest.raises(RefusedError):
            sim.ranks[0].install(Script((), ladder))
    with pytest.raises(ProtocolError, match="cannot expect -1"):
        sim.ranks[0].install(Script((), (4, 2), expected=(-1, 0, 0, 0)))
    assert sim.ranks[0].session.step is None
    assert sim.named("plan_installed") == []


def test_a_plan_that_begun_cannot_be_withdrawn(sim: Sim) -> None:
    def withdraw(engine: Engine) -> None:
        with pytest.raises(ProtocolError, match="has begun"):
            engine.session.withdraw()

    sim.rollout(Script(asks(LONG), (4, 2), calls=(at(3, 1, withdraw), at(9, 0, withdraw))))
    assert len(sim.commits()) == 1


def test_an_install_that_fails_leaves_the_rank_as_it_was(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4, faults=["install:1:raise"])
    sim.number = 0
    with pytest.raises(Exception, match="injected in install"):
        sim.ranks[1].install(Script(asks(LONG), (4, 2)))
    assert sim.ranks[1].session.step is None
    sim.number = -1
    sim.rollout(Script(asks(LONG), (4, 2)))


def test_status_and_board_tell_state_stage_and_step_at_any_time(sim: Sim) -> None:
    seen: dict[str, object] = {}

    def look(name: str) -> Callable[[Engine], None]:
        return lambda engine: seen.update({name: (engine.session.status(), sim.board.read(engine.rank))})

    calls = (at(3, 0, look("member")), at(6, 0, look("leaver")), at(9, 0, look("parked")), at(9, 3, look("survivor")))
    sim.rollout(Script(asks(LONG), (4, 2), calls=calls))
    status, line = seen["parked"]  # type: ignore[misc]
    assert (status["state"], line.state) == ("parked", RankState.PARKED)
    assert status["members"] in ([1, 3], [2, 3], [1, 2])
    assert (line.world, line.epoch, line.step, line.phase) == (2, 0, 0, Phase.STEP)
    assert seen["member"][0]["state"] == "member"  # type: ignore[index]
    assert seen["leaver"][0]["state"] == "detaching"  # type: ignore[index]
    assert seen["survivor"][0]["state"] == "member"  # type: ignore[index]
    assert (status["expected"], status["received"], status["open"], status["armed"]) == (1, 1, 0, True)
    after = sim.ranks[0].session.status()
    assert (after["step"], after["epoch"], after["state"], after["armed"]) == (None, None, "full", False)


def test_a_wave_without_work_stops_at_once(sim: Sim) -> None:
    outcomes = sim.all(lambda engine: engine.session.sync(Local()))
    assert [(o.running, o.paused) for o in outcomes] == [(False, False)] * 4


def test_tickets_tell_every_rank_the_same(sim: Sim) -> None:
    tickets: list[list[object]] = [[] for _ in sim.ranks]
    for engine in sim.ranks:
        prepare = engine.worker.prepare
        engine.worker.prepare = lambda t, r=engine.rank, p=prepare: (tickets[r].append(t), p(t))[1]  # type: ignore
    sim.rollout(Script(asks(LONG), (4, 2, 1)))
    assert tickets[0] == tickets[1] == tickets[2] == tickets[3]
    first = tickets[0][0]
    assert (first.serial, first.before, first.after) == (1, (0, 1, 2, 3), (1, 3))  # type: ignore[attr-defined]
    assert all(isinstance(move, Move) for move in first.moves)  # type: ignore[attr-defined]


def test_a_step_of_another_rank_order_keeps_other_ranks(sim: Sim) -> None:
    sim.rollout(Script(asks([1, 1, 1, 20]), (4, 2), rank_order=(2, 1, 0, 3)))
    assert sim.commits()[0][2] == (0, 3)
    step = Step("1" * 64, 0, 0, (4, 2), 0, (0, 1, 2, 3))
    assert (step.gate, step.auto_close, step.end) == (True, True, "full")
