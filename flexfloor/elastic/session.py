"""One rank's side of the protocol: plans in, sync points, decisions carried out.

Who waits for whom: all N ranks meet at every sync point and after every phase of a
transition; nothing else blocks on another rank except the joint phases (``stage``,
``refill``) and the trial step, and those carry the ticket's deadline.

    sync point --> decide --> shrink   (shrinking.py; worlds made ready beforehand: rehearsal.py)
                          --> restore  (restoring.py)
                          --> finish:  restore if needed, then disarm

No decision uses a local clock or a prediction.
"""

from __future__ import annotations

from typing import Any

from flexfloor.elastic.ballot import Ballot
from flexfloor.elastic.decision import Action, Decision, World, complete, decide, gate_opens
from flexfloor.elastic.early_wake import tokens_left
from flexfloor.elastic.loading import Rows, load
from flexfloor.elastic.placement import Placement
from flexfloor.elastic.recapture import Recapture
from flexfloor.elastic.rehearsal import rehearse
from flexfloor.elastic.restoring import restore, wake_all
from flexfloor.elastic.seat import Seat
from flexfloor.elastic.shrinking import shrink
from flexfloor.elastic.states import Phase, RankState
from flexfloor.elastic.step import Local, Outcome, Step, check_ladder, check_predicted
from flexfloor.elastic.ticket import Worker
from flexfloor.elastic.trajectories import Trajectories
from flexfloor.elastic.vector import Row, digest_number
from flexfloor.errors import ProtocolError


class Session(Seat):
    """The protocol of one rank; see :class:`flexfloor.elastic.seat.Seat` for its arguments."""

    def __init__(
        self, size: int, placement: Placement, worker: Worker, ballot: Ballot, *, deadline_s: float = 60.0
    ) -> None:
        self.trajectories = Trajectories()
        self._want_restore = False
        self._completed = False
        self._running = False
        self._unrehearsed = False
        self._resident: Rows = {}
        self._rows = self._fewest_rows = placement.capacity
        super().__init__(size, placement, worker, ballot, deadline_s=deadline_s)
        self._recapture = Recapture(self)

    # -- what the engine asks ------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """True when this rank must not run the model: outside of the current world, or held."""
        return self.rank not in self.world.members or self.held

    @property
    def eager(self) -> bool:
        """True when the protocol says when this rank syncs: a plan is armed, or installed and no wave runs.

        In a running wave others may not have the plan yet, so all keep vLLM's interval until it is armed.
        """
        return self.world.armed or (self.step is not None and not self._running)

    @property
    def held(self) -> bool:
        """True while the installed step waits for all its trajectories."""
        return self.eager and self.step is not None and self.step.gate and (self.world.gate or not self.world.armed)

    def status(self) -> dict[str, Any]:
        """State, stage and step of this rank, as plain values."""
        return {
            "rank": self.rank,
            "state": self.state.name.lower(),
            "phase": self.ballot.phase.label,
            "members": list(self.world.members),
            "armed": self.world.armed,
            "serial": self.serial,
            "step": None if self.step is None else self.step.step,
            "epoch": None if self.step is None else self.step.epoch,
            "expected": self.trajectories.expected,
            "received": self.trajectories.received,
            "open": self.trajectories.open,
            "asleep": sorted(self.asleep),
            "version": self.version,
        }

    # -- what the driver tells -----------------------------------------------------------

    def check(self, step: Step) -> None:
        """Whether the plan of the next step can be accepted now.

        Raises:
            ProtocolError: a step is still open, or ranks are not in the full world.
            RefusedError: the ladder cannot run here.
        """
        if self.step is not None:
            raise ProtocolError(f"step {self.step.step} is still open on rank {self.rank}")
        if len(self.world.members) != self.world.size or self.asleep:
            raise ProtocolError("a plan is installed in the full world only: restore and wake it first")
        check_ladder(step.ladder, self.world.size, self.base.experts, self.base.capacity)
        check_predicted(step.predicted, step.ladder)

    def backed(self, rows: int) -> None:
        """From now on only the first ``rows`` expert rows of this rank have memory (between steps).

        The others learn it when the next step is armed: until then no transition, and so no copy, depends on it.
        """
        self._rows = rows
        self._fewest_rows = min(self._fewest_rows, rows)
        self._resident = {
            rank: {row: expert for row, expert in held.items() if row < rows} for rank, held in self._resident.items()
        }

    def install(self, step: Step, **told: int) -> None:
        """Accept the plan of the next step; nothing changes where it raises.

        Every rank must have it before a request of the step is sent: an idle engine that joins a wave with the plan
        is held at the gate from its first iteration.

        Args:
            step: the step.
            told: further fields of the event.

        Raises:
            ProtocolError, RefusedError: see :meth:`check`.
        """
        self.check(step)
        self.ballot.enter(Phase.INSTALL)
        self.trajectories.begin(step.expected, closed=step.auto_close)
        self.step = step
        self.ballot.show(Phase.INSTALL)
        self.ballot.emit("plan_installed", ladder=list(step.ladder), expected=step.expected, **told)

    def withdraw(self, digest: str | None = None) -> None:
        """Take back an installed step that has not begun: some rank refused it. Every rank is told, that one too.

        Args:
            digest: of the step; another one that is open stays. None: whichever is installed.

        Raises:
            ProtocolError: the step has begun.
        """
        self._resident = {}
        if digest is not None and self.step is not None and self.step.digest != digest:
            return
        if self.world.armed:
            raise ProtocolError("the step has begun and cannot be withdrawn")
        self.step = None
        self.trajectories.begin(0, closed=True)
        self.ballot.show(Phase.IDLE)

    def request_restore(self) -> None:
        """Ask for the full world at the next sync point; done at once where it stands."""
        self._want_restore = True

    def wake_all(self) -> None:
        """See :func:`flexfloor.elastic.restoring.wake_all`."""
        wake_all(self)

    def loaded(self, version: int | None = None) -> None:
        """New weights are in every row of the full world; see :func:`flexfloor.elastic.loading.load`.

        Args:
            version: which weights these are; None: the next ones.

        Raises:
            ProtocolError: ranks are not in the full world, or have no memory.
        """
        if len(self.world.members) != self.world.size:
            raise ProtocolError("weights are accepted only in the full world")
        if self.asleep:
            raise ProtocolError(
                f"weights came while ranks {sorted(self.asleep)} have no memory for them: wake all first"
            )
        load(self, self.version + 1 if version is None else version, self._resident)

    # -- one sync point --------------------------------------------------------------------

    def due(self, unfinished: int) -> bool:
        """Called once an iteration: whether it ends with a sync point; see :mod:`flexfloor.elastic.cadence`.

        Args:
            unfinished: requests of this rank that are not finished; its completion is logged when it is, not when the
                others learn it.
        """
        self._note_completion(unfinished)
        due = self.pace.tick(self.world)
        if not due:
            self.ballot.show(self.ballot.phase)  # a sign of life
        return due

    def sync(self, local: Local) -> Outcome:
        """Meet the other ranks once, decide, and carry the decision out.

        Raises:
            TransitionError: something failed that cannot be undone; names rank and phase.
        """
        self.parking.follow()
        if self.unproven:
            self.worker.drain()
            self.unproven = False
        self.ballot.enter(Phase.AGREE)
        rows, agreed_s = self.ballot.meet(self._row(local))
        self._after_first_step()
        decision = self._decide(rows)
        self._note_completion(local.unfinished)
        members = tuple(self.world.members)
        rehearsal = self._unrehearsed and not any(row.pause for row in rows)
        recapture = decision.action is Action.RUN and self._recapture.due(rows)
        if rehearsal or recapture or decision.action in (Action.SHRINK, Action.RESTORE, Action.FINISH):
            self.worker.drain()
        if decision.action is Action.SHRINK:
            load = max(rows[rank].unfinished for rank in self.world.members)
            shrink(self, decision, agreed_s, self._rank_order(), load)
        elif decision.action is Action.RESTORE:
            restore(self, "full", f"rank {decision.rank} asked for the full world")
        elif decision.action is Action.FINISH:
            self._finish()
        elif rehearsal:
            self._rehearse(rows)
        elif recapture:
            self._recapture.carry_out()
        self._recapture.learn(rows)
        changed = decision.action in (Action.SHRINK, Action.RESTORE) or tuple(self.world.members) != members
        passed = self.pace.met(self.world, rows, changed=changed)
        if decision.action is Action.RUN:
            self._wake_early(rows, passed)
        else:
            self.early_wake.forget()
        if len(self.world.members) == self.world.size:
            self._want_restore = False
        self._running = decision.running
        self.ballot.show(Phase.STEP if decision.running else Phase.IDLE)
        return Outcome(decision.running, decision.paused)

    def _row(self, local: Local) -> Row:
        counts = self.trajectories
        return Row(
            digest=0 if self.step is None else digest_number(self.step.digest),
            unfinished=local.unfinished,
            received=counts.received,
            expected=counts.expected,
            open=counts.open,
            closed=int(counts.closed),
            kv_free=local.kv_free,
            want_restore=int(self._want_restore),
            pause=int(local.pause),
            capture=self._recapture.wish(self.pace.passed),
            rows=self._fewest_rows,
            tokens_left=local.tokens_left,
            phase=int(Phase.AGREE),
        )

    def _decide(self, rows: list[Row]) -> Decision:
        decision = decide(self.world, rows)
        if decision.action is Action.ARM:
            self._arm(min(row.rows for row in rows))
        if self.world.armed:
            self.world.syncs += 1
            if self.world.gate and gate_opens(self.world, rows):
                self.world.gate = False
            decision = decide(self.world, rows)
        return decision

    def _arm(self, backed: int) -> None:
        if self.step is None:
            raise ProtocolError("armed without a step")
        self.placement.trim(backed)
        self._fewest_rows = self._rows
        self.world = World(self.world.size, self.world.members, list(self.step.ladder), armed=True, gate=self.step.gate)
        self._unrehearsed, self._resident = bool(self.step.predicted), {}
        self._recapture.begin()
        self.pace.begin()
        self.go(RankState.MEMBER)

    def _rehearse(self, rows: list[Row]) -> None:
        """Once a step, at the first sync point after it is armed."""
        self._unrehearsed = False
        if self.step is not None and len(self.world.members) == self.world.size:
            rehearse(self, self.step.predicted, max(row.expected for row in rows))
            self._resident = self.placement.spares()

    def _rank_order(self) -> tuple[int, ...]:
        return tuple(range(self.world.size)) if self.step is None else self.step.rank_order

    def _note_completion(self, unfinished: int) -> None:
        """local_complete once a step, and again after late work."""
        counts = self.trajectories
        own = Row(unfinished=unfinished, received=counts.received, expected=counts.expected, open=counts.open)
        done = self.world.armed and complete(own)
        if done and not self._completed:
            self.ballot.emit("local_complete")
        self._completed = done

    def _after_first_step(self) -> None:
        """The exchange after a commit proves that every survivor made its first step."""
        if self.committed is not None:
            began = self.committed.pop("began")
            self.ballot.emit("stage_commit", **self.committed, first_step=self.ballot.clock() - began)
            self.committed = None
        if self.leaving:
            self.leaving = False
            self.go(RankState.PARKED)
            self.parking.begin()
            self.early_wake.reset()

    def _wake_early(self, rows: list[Row], passed: int) -> None:
        """On a parked rank whose memory the end of the step brings back."""
        asleep = self.state is RankState.PARKED and not self.parking.releasing
        if asleep and self.step is not None and self.step.end == "full":
            self.early_wake.follow(tokens_left(rows, self.world.members), passed, self.pace.coming)

    def _finish(self) -> None:
        self.ballot.emit("generation_end")
        kind = "full" if self.step is None else self.step.end
        while len(self.world.members) != self.world.size:
            restore(self, kind, "the step is complete")
        self.step, self._unrehearsed = None, False
        self.trajectories.begin(0, closed=True)
        self.world = World(self.world.size, self.world.members)
        self.go(RankState.RESTORING)
        self.go(RankState.FULL)
        self._completed = False
