"""One rank's side of the protocol: sync points, transitions, restores.

Who waits for whom: all N ranks meet in ``exchange`` at every sync point and after every
phase of a transition; nothing else blocks on another rank except the two joint phases
(``stage``, ``refill``) and the trial step, and those carry the ticket's deadline.

    sync point --> decide --> shrink:  prepare | stage | switch | capture | trial --> confirm
                          --> restore: wake | refill | switch_back ----------------> confirm
                 a vote stands at every bar; one failed vote undoes the whole ticket

Invariants: every rank calls ``exchange`` the same number of times; leavers keep memory and
groups until the sync point after the survivors' first step; no decision uses a local clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from flexfloor.elastic import placement as rows_of
from flexfloor.elastic.board import Board, Status, beat
from flexfloor.elastic.decision import MAX_ATTEMPTS, Action, Decision, World, complete, decide, gate_opens
from flexfloor.elastic.faults import FaultPlan
from flexfloor.elastic.placement import Placement
from flexfloor.elastic.states import Phase, RankState, moved
from flexfloor.elastic.ticket import Exchange, Ticket, Worker
from flexfloor.elastic.trajectories import Trajectories
from flexfloor.elastic.vector import Row, digest_number
from flexfloor.errors import ProtocolError, RefusedError, TransitionError


class Emit(Protocol):
    """Writes one event (see the ledger specification)."""

    def __call__(self, event: str, **fields: Any) -> None:
        """Append ``event`` with its fields."""


@dataclass(frozen=True)
class Step:
    """The part of a plan's step that a rank needs.

    Attributes:
        digest: hexadecimal digest of the step's plan, equal on all ranks.
        epoch: epoch of the plan.
        step: step within the epoch.
        ladder: sizes from N down to the floor.
        expected: trajectories this rank will get.
        rank_order: all ranks, first to leave in front.
        gate: wait for every trajectory on every rank before the first step.
        auto_close: the step ends by itself when everything expected is complete.
        end: ``full`` or ``topology``: what the restore after generation brings back.
    """

    digest: str
    epoch: int
    step: int
    ladder: tuple[int, ...]
    expected: int
    rank_order: tuple[int, ...]
    gate: bool = True
    auto_close: bool = True
    end: str = "full"


@dataclass(frozen=True)
class Local:
    """What the engine knows about its own rank at a sync point."""

    unfinished: int = 0
    kv_free: int = 0
    pause: bool = False
    busy: bool = False


@dataclass(frozen=True)
class Outcome:
    """What the engine loop does next: go on or end the wave; whether a pause is agreed."""

    running: bool
    paused: bool


class Session:
    """The protocol of one rank.

    Args:
        rank: this rank in the full world.
        placement: the full world's expert placement.
        worker: the device side.
        exchange: the all-reduce of one row.
        emit: the event writer.
        board: the status board.
        faults: faults to inject (tests).
        deadline_s: longest wait inside a transition.
    """

    def __init__(
        self,
        rank: int,
        placement: Placement,
        worker: Worker,
        exchange: Exchange,
        emit: Emit,
        board: Board,
        faults: FaultPlan,
        *,
        deadline_s: float = 60.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        size = board.ranks
        self.rank = rank
        self.world = World(size, list(range(size)))
        self.base = placement.clone()
        self.placement = placement
        self.trajectories = Trajectories()
        self.state = RankState.FULL
        self.step: Step | None = None
        self.asleep: set[int] = set()
        self._worker, self._exchange, self._emit, self._board = worker, exchange, emit, board
        self._faults, self._deadline_s, self._clock = faults, deadline_s, clock
        self._serial = 0
        self._phase = Phase.IDLE
        self._channel_broken = False
        self._restore_attempts = 0
        self._leaving: Ticket | None = None
        self._committed: dict[str, Any] | None = None
        self._releasing = False
        self._want_restore = False
        self._completed = False
        self._fault = 0
        self._show(Phase.IDLE)

    # -- what the engine asks and tells ------------------------------------------------

    @property
    def idle(self) -> bool:
        """True when this rank must not run the model: outside of the current world, or held at the gate."""
        return self.rank not in self.world.members or self.held

    @property
    def held(self) -> bool:
        """True while the installed step waits for all its trajectories."""
        return self.step is not None and self.step.gate and (self.world.gate or not self.world.armed)

    @property
    def every_iteration(self) -> bool:
        """Sync at each engine iteration instead of vLLM's own interval."""
        return self.step is not None

    def install(self, step: Step) -> None:
        """Accept the plan of the next step.

        Raises:
            ProtocolError: a step is still open, or ranks are not in the full world.
            RefusedError: the ladder cannot run here.
        """
        if self.step is not None:
            raise ProtocolError(f"step {self.step.step} is still open on rank {self.rank}")
        if len(self.world.members) != self.world.size or self.asleep:
            raise ProtocolError("a plan is installed in the full world only: restore and wake it first")
        self._check_ladder(step.ladder)
        self.step = step
        self.trajectories.begin(step.expected, closed=step.auto_close)
        self._show(Phase.INSTALL)
        self._emit("plan_installed", ladder=list(step.ladder), expected=step.expected)

    def _check_ladder(self, ladder: tuple[int, ...]) -> None:
        sizes = list(ladder)
        if not sizes or sizes[0] != self.world.size or sizes != sorted(set(sizes), reverse=True):
            raise RefusedError(
                f"ladder {sizes} does not decrease from {self.world.size}", remedy="plan for this world_size"
            )
        for size in sizes:
            if self.base.experts % size:
                raise RefusedError(
                    f"EP size {size} does not divide {self.base.experts} experts",
                    remedy="choose floors that divide the expert count",
                )
            if self.base.experts // size > self.base.capacity:
                raise RefusedError(
                    f"EP size {size} needs {self.base.experts // size} expert rows a rank, "
                    f"{self.base.capacity} were allocated",
                    remedy=f"start the engines with a smallest floor of {size}",
                )

    def withdraw(self) -> None:
        """Take back an installed step that was not armed (another rank refused it)."""
        if self.world.armed:
            raise ProtocolError("the step has begun and cannot be withdrawn")
        self.step = None
        self.trajectories.begin(0, closed=True)

    def request_restore(self) -> None:
        """Ask for the full world at the next sync point."""
        self._want_restore = True

    def loaded(self) -> None:
        """New weights were loaded into the full world's rows: spare copies are stale."""
        if len(self.world.members) != self.world.size:
            raise ProtocolError("weights are accepted only in the full world")
        self.placement.copies = {rank: dict(rows) for rank, rows in self.base.active.items()}
        self.asleep.clear()

    def status(self) -> dict[str, Any]:
        """State, stage and step of this rank, as plain values."""
        return {
            "rank": self.rank,
            "state": self.state.name.lower(),
            "phase": self._phase.label,
            "members": list(self.world.members),
            "armed": self.world.armed,
            "serial": self._serial,
            "step": None if self.step is None else self.step.step,
            "epoch": None if self.step is None else self.step.epoch,
            "expected": self.trajectories.expected,
            "received": self.trajectories.received,
            "open": self.trajectories.open,
            "asleep": sorted(self.asleep),
        }

    def enter(self, phase: Phase) -> None:
        """Mark a phase on the board and strike the faults planned for it."""
        self._show(phase)
        self._faults.enter(phase)

    def _show(self, phase: Phase) -> None:
        self._phase = phase
        step = self.step
        self._board.write(
            self.rank,
            Status(
                self.state,
                phase,
                len(self.world.members),
                self._serial,
                -1 if step is None else step.epoch,
                -1 if step is None else step.step,
                beat(),
                _pid(),
            ),
        )

    # -- one sync point ----------------------------------------------------------------

    def sync(self, local: Local) -> Outcome:
        """Meet the other ranks once, decide, and carry the decision out.

        Raises:
            TransitionError: something failed that cannot be undone; names rank and phase.
        """
        self._watch_release()
        self.enter(Phase.AGREE)
        began = self._clock()
        rows = self._exchange(self._row(local))
        agreed = self._clock() - began
        self._first_step_done()
        decision = self._decide(rows)
        self._note_completion(rows[self.rank])
        if decision.action is Action.FAIL:
            raise TransitionError(decision.rank, Phase(decision.phase).label, "see that rank's fault event")
        if decision.action is Action.SHRINK:
            self._shrink(decision, agreed)
        elif decision.action is Action.RESTORE:
            self._restore("full", f"rank {decision.rank} asked for the full world")
        elif decision.action is Action.FINISH:
            self._finish()
        self._show(Phase.STEP if decision.running else Phase.IDLE)
        return Outcome(decision.running, decision.paused)

    def _decide(self, rows: list[Row]) -> Decision:
        decision = decide(self.world, rows)
        if decision.action is Action.ARM:
            self._arm()
        if self.world.armed:
            self.world.syncs += 1
            if self.world.gate and gate_opens(self.world, rows):
                self.world.gate = False
            decision = decide(self.world, rows)
        return decision

    def _note_completion(self, row: Row) -> None:
        """local_complete once a step, and again after late work."""
        done = self.world.armed and complete(row)
        if done and not self._completed:
            self._emit("local_complete")
        self._completed = done

    def _row(self, local: Local, vote: int = 0, phase: int = 0) -> Row:
        plan, counts = self.step, self.trajectories
        return Row(
            digest=0 if plan is None else digest_number(plan.digest),
            unfinished=local.unfinished,
            received=counts.received,
            expected=counts.expected,
            open=counts.open,
            closed=int(counts.closed),
            kv_free=local.kv_free,
            fault=self._fault,
            want_restore=int(self._want_restore),
            pause=int(local.pause),
            busy=int(local.busy),
            vote=vote,
            phase=phase,
        )

    def _arm(self) -> None:
        if self.step is None:
            raise ProtocolError("armed without a step")
        self.world = World(
            self.world.size, self.world.members, list(self.step.ladder), armed=True, gate=self.step.gate
        )
        self.state = moved(self.state, RankState.MEMBER)

    # -- a phase and its vote ----------------------------------------------------------

    def _voted(self, phase: Phase, act: Callable[[], dict[str, Any] | None]) -> tuple[list[int], dict[str, Any]]:
        """Run ``act`` on this rank, then learn which ranks failed. Returns (failed ranks, parts)."""
        parts: dict[str, Any] = {}
        vote = 1
        began = self._clock()
        try:
            self.enter(phase)
            parts = act() or {}
        except Exception as error:  # noqa: BLE001 - any failure of a phase becomes a vote
            vote = -1
            self._emit("fault", where=phase.label, what=f"{type(error).__name__}: {error}")
        parts.setdefault(phase.label, self._clock() - began)
        rows = self._exchange(self._row(Local(), vote, int(phase)))
        odd = [rank for rank, row in enumerate(rows) if row.phase != phase]
        if odd:
            raise ProtocolError(f"ranks {odd} are not in phase {phase.label}")
        return [rank for rank, row in enumerate(rows) if row.vote < 0], parts

    def _ticket(self, after: list[int], target: Placement, moves: list[rows_of.Move]) -> Ticket:
        self._serial += 1
        return Ticket(
            serial=self._serial,
            before=tuple(self.world.members),
            after=tuple(after),
            moves=tuple(moves),
            maps={rank: target.expert_map(rank) for rank in after},
            rebuild=tuple(range(self.world.size)) if self._channel_broken else (),
            deadline_s=self._deadline_s,
        )

    # -- shrink --------------------------------------------------------------------------

    def _shrink(self, decision: Decision, agreed: float) -> None:
        order = list(self.step.rank_order) if self.step else list(range(self.world.size))
        survivors = rows_of.choose_survivors(
            self.placement, decision.busy, decision.idle, decision.target, order
        )
        target, moves = rows_of.shrink(self.placement, survivors)
        ticket = self._ticket(survivors, target, moves)
        leaving = self.rank in ticket.before and self.rank not in ticket.after
        if leaving:
            self.state = moved(self.state, RankState.DETACHING)
            self._emit("detach_start")
        worker, parts = self._worker, {"agree": agreed}
        acts: list[tuple[Phase, Callable[[], dict[str, Any] | None]]] = [
            (Phase.PREPARE, lambda: worker.prepare(ticket)),
            (Phase.STAGE, lambda: worker.stage(ticket)),
            (Phase.SWITCH, lambda: worker.switch(ticket)),
            (Phase.CAPTURE, lambda: worker.capture(ticket)),
            (Phase.TRIAL, lambda: worker.trial(ticket)),
        ]
        for phase, act in acts:
            failed, took = self._voted(phase, act)
            parts.update(took)
            if failed:
                self._abandon(ticket, phase, failed, leaving)
                return
        self._channel_broken = False
        self._commit(ticket, target, parts, leaving)

    def _abandon(self, ticket: Ticket, phase: Phase, failed: list[int], leaving: bool) -> None:
        """Undo on every rank; the world stays what it was and the stage may be tried again."""
        if phase >= Phase.STAGE:
            for move in ticket.moves:
                self.placement.copies[move.target].pop(move.target_row, None)
        if phase is Phase.STAGE:
            self._channel_broken = True
        lost, _ = self._voted(Phase.ROLLBACK, lambda: self._worker.undo(ticket))
        if lost:
            raise TransitionError(lost[0], Phase.ROLLBACK.label, f"undoing stage {len(ticket.after)} failed")
        if leaving:
            self.state = moved(moved(self.state, RankState.RESTORING), RankState.MEMBER)
        size = len(ticket.after)
        attempts = self.world.attempts.get(size, 0) + 1
        self.world.attempts[size] = attempts
        self.world.retry_at = self.world.syncs + 4 * attempts
        if self.rank == ticket.before[0]:
            reason = f"rank {failed[0]} failed in {phase.label} (attempt {attempts} of {MAX_ATTEMPTS})"
            self._emit("plan_skipped", stage=size, reason=reason)

    def _commit(self, ticket: Ticket, target: Placement, parts: dict[str, Any], leaving: bool) -> None:
        self.enter(Phase.CONFIRM)
        self._worker.confirm(ticket)
        self.placement = target
        self.world.members = list(ticket.after)
        self._leaving = ticket if leaving else None
        if self.rank == ticket.after[0]:
            self._committed = {
                "stage": self.world.ladder.index(len(ticket.after)),
                "from": len(ticket.before),
                "to": len(ticket.after),
                "survivors": list(ticket.after),
                "moved_rows": len(ticket.moves),
                **parts,
                "began": self._clock(),
            }

    def _first_step_done(self) -> None:
        """The exchange after a commit proves that every survivor made its first step."""
        if self._committed is not None:
            began = self._committed.pop("began")
            self._emit("stage_commit", **self._committed, first_step=self._clock() - began)
            self._committed = None
        if self._leaving is not None:
            self._leaving = None
            self._park()

    # -- park and release ----------------------------------------------------------------

    def _park(self) -> None:
        self._emit("detach_end")
        self.state = moved(self.state, RankState.PARKED)
        try:
            self.enter(Phase.PARK)
            self._worker.park()
        except Exception as error:
            self._emit("fault", where=Phase.PARK.label, what=f"{type(error).__name__}: {error}")
            raise TransitionError(self.rank, Phase.PARK.label, str(error)) from error
        self._releasing = True
        self._emit("sleep_start")

    def _watch_release(self) -> None:
        if not self._releasing:
            return
        report = self._worker.park_report()
        if report is None:
            return
        self._releasing = False
        if "error" in report:
            self._emit("fault", where=Phase.PARK.label, what=report["error"])
            raise TransitionError(self.rank, Phase.PARK.label, report["error"])
        self._emit("sleep_end", t=report["end"], released_bytes=report["released_bytes"])

    def _await_release(self) -> None:
        end = time.monotonic() + self._deadline_s
        while self._releasing:
            self._watch_release()
            if time.monotonic() > end:
                raise TransitionError(self.rank, Phase.PARK.label, f"memory not given back in {self._deadline_s} s")
            if self._releasing:
                time.sleep(0.001)

    # -- restore --------------------------------------------------------------------------

    def _restore(self, kind: str, reason: str) -> bool:
        """Back to the full world. Returns False when it was abandoned and may be tried again."""
        before = self.world.members
        parked = [rank for rank in range(self.world.size) if rank not in before]
        woken = parked if kind == "full" else []
        held = self.placement.clone()
        held.forget(parked)
        target, moves = rows_of.restore(held, self.base, [*before, *woken])
        ticket = replace(
            self._ticket(list(range(self.world.size)), target, moves),
            woken=tuple(woken),
        )
        began = self._clock()
        self._emit("restore_start", kind=kind, reason=reason)
        if self.rank in parked:
            self._await_release()
        self.state = moved(self.state, RankState.RESTORING)
        worker = self._worker
        parts: dict[str, Any] = {}
        acts: list[tuple[Phase, Callable[[], dict[str, Any] | None]]] = [
            (Phase.RESTORE_WAKE, lambda: self._wake(ticket)),
            (Phase.RESTORE_MOVE, lambda: worker.refill(ticket)),
            (Phase.RESTORE_SWITCH, lambda: worker.switch_back(ticket)),
        ]
        for phase, act in acts:
            failed, took = self._voted(phase, act)
            parts.update(took)
            if failed:
                self._abandon_restore(ticket, phase, failed)
                return False
        self._restored(target, parked if kind == "topology" else [], began, parts)
        return True

    def _wake(self, ticket: Ticket) -> None:
        if self.rank in ticket.woken:
            self._emit("wake_start")
        self._worker.wake(ticket)

    def _abandon_restore(self, ticket: Ticket, phase: Phase, failed: list[int]) -> None:
        if phase is Phase.RESTORE_MOVE:
            self._channel_broken = True
        lost, _ = self._voted(Phase.ROLLBACK, lambda: self._worker.undo(ticket))
        self._restore_attempts += 1
        if lost or self._restore_attempts >= MAX_ATTEMPTS:
            raise TransitionError((lost or failed)[0], phase.label, "the full world could not be restored")
        here = RankState.MEMBER if self.rank in self.world.members else RankState.PARKED
        self.state = moved(self.state, here)
        if self.rank == ticket.before[0]:
            self._emit("plan_skipped", stage=self.world.size, reason=f"rank {failed[0]} failed in {phase.label}")

    def _restored(self, target: Placement, asleep: list[int], began: float, parts: dict[str, Any]) -> None:
        self.enter(Phase.RESTORE_CONFIRM)
        woke = self.rank not in self.world.members and self.rank not in asleep
        self.placement = target
        self.world.members = list(range(self.world.size))
        self.world.attempts.clear()
        self.asleep = set(asleep)
        self.state = moved(self.state, RankState.MEMBER)
        self._channel_broken = False
        self._restore_attempts = 0
        self._want_restore = False
        if woke:
            self._emit("wake_end")
        self._emit("restore_end", duration=self._clock() - began, duration_res=1e-6, **parts)

    def _finish(self) -> None:
        kind = "full" if self.step is None else self.step.end
        while len(self.world.members) != self.world.size:
            self._restore(kind, "the step is complete")
        self._emit("generation_end")
        self.step = None
        self.trajectories.begin(0, closed=True)
        self.world = World(self.world.size, self.world.members)
        self.state = moved(moved(self.state, RankState.RESTORING), RankState.FULL)
        self._completed = self._want_restore = False

    def wake_all(self) -> None:
        """After a topology restore: memory and weights of the sleepers come back from their peers.

        Joint: every rank calls it while the engines are idle.

        Raises:
            TransitionError: a rank failed; the replica cannot go on.
        """
        if not self.asleep:
            return
        self._await_release()
        held = self.placement.clone()
        held.forget(self.asleep)
        donors = [rank for rank in range(self.world.size) if rank not in self.asleep]
        target, moves = self._refilled(held, donors)
        ticket = replace(self._ticket(donors, target, moves), woken=tuple(sorted(self.asleep)), before=tuple(donors))
        for phase, act in (
            (Phase.RESTORE_WAKE, lambda: self._wake(ticket)),
            (Phase.RESTORE_MOVE, lambda: self._worker.refill(ticket)),
        ):
            failed, _ = self._voted(phase, act)
            if failed:
                raise TransitionError(failed[0], phase.label, "sleeping ranks could not be woken")
        if self.rank in self.asleep:
            self._emit("wake_end")
        self.placement = target
        self.asleep.clear()

    def _refilled(self, held: Placement, donors: list[int]) -> tuple[Placement, list[rows_of.Move]]:
        """Rows for the sleepers from any awake rank that still holds a copy of the same weights."""
        where = {e: (rank, row) for rank in donors for row, e in held.copies[rank].items()}
        moves, target = [], held.clone()
        for rank in sorted(self.asleep):
            for row, expert in self.base.active[rank].items():
                if expert not in where:
                    raise ProtocolError(f"no awake rank holds expert {expert}: load weights instead of waking")
                source, source_row = where[expert]
                moves.append(rows_of.Move(expert, source, source_row, rank, row))
                target.copies[rank][row] = expert
        return target, moves


def _pid() -> int:
    import os

    return os.getpid()
