"""A small world for the tests of the elastic protocol: N sessions and a fake engine loop over the simulated workers.

    Engine     one rank's loop: requests in, model step, sync point
    Sim        N of them, with the checks that must hold after every rollout

At every model step exactly the members step, in the same world, with maps that reach every expert once on a row that
holds it. Tokens are computed from the rows that the maps reach, so a stale row changes a request's result.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_world import EndedError, FakeWorker, HangError, Hub, Lockstep, weight

from flexfloor.elastic.ballot import Ballot
from flexfloor.elastic.board import Board
from flexfloor.elastic.faults import FaultPlan
from flexfloor.elastic.placement import Placement
from flexfloor.elastic.session import Session
from flexfloor.elastic.states import RankState
from flexfloor.elastic.step import Local, Outcome, Step
from flexfloor.events import Event, EventLog, parse_event
from flexfloor.ledger.run import RunLedger, account

LONG = ([3], [10], [5, 5], [30])
"""Response lengths a rank that end in three groups."""
ITERATIONS = 600
STEP_S = 0.01
"""What a model step takes."""


@dataclass(frozen=True)
class Ask:
    """One request of a rollout: ``length`` tokens on ``rank``, arriving at iteration ``at``.

    ``extra`` requests are not part of what the plan expects. ``abort_at`` ends it there (if it still runs). Its token
    limit is ``spare`` tokens beyond its length.
    """

    name: str
    rank: int
    length: int
    at: int = 0
    extra: bool = False
    trajectory: str = ""
    more: bool = False
    abort_at: int = -1
    spare: int = 0


Call = tuple[int, int, Callable[["Engine"], None]]


@dataclass(frozen=True)
class Script:
    """One rollout: requests, the installed step, and calls (iteration, rank, what)."""

    asks: tuple[Ask, ...]
    ladder: tuple[int, ...] = ()
    expected: tuple[int, ...] = ()
    rank_order: tuple[int, ...] = ()
    gate: bool = True
    auto_close: bool = True
    end: str = "full"
    calls: tuple[Call, ...] = ()
    digests: tuple[str, ...] = ()
    predicted: tuple[tuple[int, ...], ...] = ()

    def last(self) -> int:
        """The last iteration at which something comes from outside."""
        return max([ask.at for ask in self.asks] + [at for at, _, _ in self.calls], default=0)


@dataclass
class Running:
    """A request in a rank's scheduler."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)


class Engine:
    """One rank: its session, worker, requests and events."""

    def __init__(self, rank: int, sim: Sim, faults: Sequence[str]) -> None:
        self.rank, self.sim, self.hub = rank, sim, sim.hub
        self.events: list[Event] = []
        self.worker = FakeWorker(rank, sim.hub, sim.base)
        ballot = Ballot(
            rank,
            lambda row: sim.hub.exchange(rank, row),
            self.emit,
            sim.board,
            FaultPlan.of(faults, rank),
            sim.hub.clock,
        )
        self.session = Session(sim.size, sim.base.clone(), self.worker, ballot, deadline_s=sim.deadline_s)
        self.running: dict[str, Running] = {}
        self.tokens: dict[str, list[int]] = {}
        self.worlds: list[tuple[int, ...]] = []
        self.steps: list[int] = []
        self.pause = False
        self.paused_at: list[int] = []

    def emit(self, event: str, **fields: Any) -> None:
        """Check and keep one event."""
        record = {"t": self.hub.clock(), "res": 0.0, "run": "r", "seed": 0, "epoch": 0, "step": self.sim.number}
        record |= {"rank": self.rank, "event": event, **fields}
        self.events.append(parse_event(json.loads(json.dumps(record))))

    def named(self, *names: str) -> list[Event]:
        """The events of these names, in order."""
        return [event for event in self.events if event.event in names]

    def install(self, script: Script) -> None:
        """Install the script's step, as the driver would."""
        digest = script.digests[self.rank] if script.digests else f"{self.sim.number + 1:064x}"
        expected = Counter(ask.rank for ask in script.asks if not ask.extra and not ask.trajectory)
        expected += Counter(rank for _, rank in {(a.trajectory, a.rank) for a in script.asks if a.trajectory})
        self.session.install(
            Step(
                digest=digest,
                epoch=0,
                step=self.sim.number,
                ladder=script.ladder,
                expected=script.expected[self.rank] if script.expected else expected[self.rank],
                rank_order=script.rank_order or tuple(range(self.sim.size)),
                gate=script.gate,
                auto_close=script.auto_close,
                end=script.end,
                predicted=script.predicted,
            )
        )

    def generate(self, script: Script) -> None:
        """The engine loop until the wave ends and nothing comes any more."""
        if script.ladder:
            self.install(script)
        iteration, last = 0, script.last()
        outcome = Outcome(running=True, paused=False)
        while True:
            self._inputs(script, iteration)
            self._step(iteration)
            if self.session.due(len(self.running)):
                before = self.session.world.members
                outcome = self.session.sync(self._local())
                self._check(before)
                if outcome.paused:
                    self.pause = False
                    self.paused_at.append(iteration)
            self.worlds.append(tuple(self.session.world.members))
            iteration += 1
            if not outcome.running and iteration > last:
                return
            if iteration > ITERATIONS:
                raise HangError(f"rank {self.rank} runs for ever: {self.session.status()}")

    def _local(self) -> Local:
        left = max((r.ask.length + r.ask.spare - len(r.tokens) for r in self.running.values()), default=0)
        return Local(len(self.running), 100, self.pause, left if self.session.world.armed else 0)

    def _inputs(self, script: Script, iteration: int) -> None:
        for at, rank, call in script.calls:
            if at == iteration and rank == self.rank:
                call(self)
        for ask in script.asks:
            if ask.rank != self.rank:
                continue
            if ask.at == iteration:
                if self.session.step is not None:
                    self.session.trajectories.arrive(ask.trajectory or ask.name, more=ask.more)
                self.running[ask.name] = Running(ask)
            if ask.abort_at == iteration:
                self.running.pop(ask.name, None)

    def _step(self, iteration: int) -> None:
        if self.session.idle:
            return
        members = tuple(self.session.world.members)
        assert self.worker.group == members, f"rank {self.rank} is in {self.worker.group}, members are {members}"
        weights = self.worker.forward("step")
        self.hub.stepped = members
        self.hub.now += STEP_S / len(members)
        self.steps.append(iteration)
        asked = list(self.running.items())
        self.worker.land()
        self.worker.flying.append(lambda: self._deliver(asked, weights))
        if not self.sim.flight:
            self.worker.land()

    def _deliver(self, asked: Sequence[tuple[str, Running]], weights: dict[int, str]) -> None:
        """The step's tokens; that of a request that has ended meanwhile is thrown away."""
        for name, request in asked:
            if name not in self.running:
                continue
            request.tokens.append(token(request.ask, len(request.tokens), weights))
            if len(request.tokens) == request.ask.length:
                self.tokens[name] = request.tokens
                del self.running[name]

    def _check(self, before: list[int]) -> None:
        """What must hold after every sync point."""
        session = self.session
        now = session.world.members
        if session.step is not None and len(now) < len(before):
            assert len(now) in session.step.ladder
            if self.rank in before and self.rank not in now:
                assert not self.running, f"rank {self.rank} left with {list(self.running)}"
                assert session.state is RankState.DETACHING
        if len(now) == len(before):
            assert now == before
        if not session.asleep:
            session.placement.check()
        shown = self.sim.board.read(self.rank)
        assert (shown.state, shown.world, shown.serial) == (session.state, len(now), session.serial)


class Sim:
    """N ranks that live as long as the test.

    Args:
        size: N.
        experts: E.
        floor: smallest size (gives the rows of a rank).
        faults: faults to inject, as text.
        seed: order in which ranks run.
        folder: where the board lies.
        polls: how often a release is asked for before it is done.
        deadline_s: longest wait inside a transition.
        buckets: decode batch sizes that graphs are captured for; none: the device has no graphs.
        flight: a step's tokens are known after the next step has begun only (asynchronous scheduling).
    """

    def __init__(
        self,
        folder: Path,
        size: int = 4,
        experts: int = 16,
        floor: int = 1,
        *,
        faults: Sequence[str] = (),
        seed: int = 0,
        polls: int = 1,
        deadline_s: float = 5.0,
        buckets: Sequence[int] = (),
        flight: bool = False,
    ) -> None:
        self.size, self.deadline_s, self.number, self.flight = size, deadline_s, -1, flight
        self.steps = Lockstep(seed)
        self.hub = Hub(size, self.steps)
        self.base = Placement.linear(experts, size, experts // floor)
        self.board = Board(folder / f"board-{id(self)}", size)
        self.driver: list[Event] = []
        self.ranks = [Engine(rank, self, faults) for rank in range(size)]
        for engine in self.ranks:
            engine.worker.release_polls = polls
            engine.worker.buckets = tuple(buckets)
            engine.worker.graphs[tuple(range(size))].update(buckets)

    def all(self, call: Callable[[Engine], Any]) -> list[Any]:
        """``call`` on every rank at once; raises the first rank's own error."""
        results = self.steps.run([lambda engine=engine: call(engine) for engine in self.ranks])
        assert not self.hub.broken, self.hub.broken
        own = [e for _, e in sorted(self.steps.errors.items()) if not isinstance(e, EndedError)]
        if own:
            raise own[0]
        return results

    def rollout(self, script: Script) -> RunLedger | None:
        """One rollout; checks results, final states and the log, and gives the log's account."""
        self.number += 1
        self._note("rollout_start")
        self.hub.stepped = ()
        for engine in self.ranks:
            engine.tokens, engine.worlds, engine.steps, engine.paused_at = {}, [], [], []
        self.all(lambda engine: engine.generate(script))
        tokens = {name: list(t) for engine in self.ranks for name, t in engine.tokens.items()}
        self._note("rollout_end", response_tokens=sum(map(len, tokens.values())) or 1, world_size=self.size)
        self.check(script)
        return self.account() if script.ladder else None

    def check(self, script: Script) -> None:
        """Every request that was not aborted has its own tokens; every rank is back in the full world."""
        version = self.ranks[0].session.version
        weights = {expert: weight(expert, version) for expert in range(self.base.experts)}
        for ask in script.asks:
            got = self.ranks[ask.rank].tokens.get(ask.name)
            if got is None and ask.abort_at >= 0:
                continue
            assert got == [token(ask, place, weights) for place in range(ask.length)], f"{ask} gave {got}"
        for engine in self.ranks:
            session = engine.session
            assert not engine.running
            if session.step is not None:
                continue
            assert session.state is RankState.FULL
            assert session.world.members == list(range(self.size))
            assert not session.world.armed
            assert engine.worker.group == tuple(range(self.size))
            assert engine.worker.map == self.base.expert_map(engine.rank)
            assert session.placement == self.ranks[0].session.placement
            assert engine.worker.memory != (engine.rank in session.asleep)
            for row, expert in session.placement.copies[engine.rank].items():
                assert engine.worker.rows[row] == weight(expert, version), (
                    f"row {row} of rank {engine.rank} is noted wrongly"
                )

    def account(self) -> RunLedger:
        """The ledger's account of all that was logged; no check of it may fail."""
        events = sorted([*self.driver, *(e for engine in self.ranks for e in engine.events)], key=lambda e: e.t)
        ledger = account(EventLog(events, []))
        assert not ledger.problems, ledger.problems
        for engine in self.ranks:
            check_order(engine)
        return ledger

    def commits(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """(from, to, survivors) of all commits."""
        found = sorted((e for r in self.ranks for e in r.named("stage_commit")), key=lambda e: e.t)
        return [(e.fields["from"], e.fields["to"], tuple(e.fields["survivors"])) for e in found]

    def named(self, *names: str) -> list[Event]:
        """Events of all ranks in order of time."""
        return sorted((e for engine in self.ranks for e in engine.named(*names)), key=lambda e: e.t)

    def _note(self, event: str, **fields: Any) -> None:
        record = {"t": self.hub.clock(), "res": 0.0, "run": "r", "seed": 0, "epoch": 0, "step": self.number}
        self.driver.append(parse_event({**record, "event": event, **fields}))


NEXT: dict[str, set[str]] = {
    "": {"detach_start", "restore_start", "wake_start"},
    "detach_start": {"detach_start", "detach_end", "restore_start"},
    "detach_end": {"sleep_start"},
    "sleep_start": {"sleep_end", "restore_start"},
    "sleep_end": {"restore_start", "wake_start", "restore_end"},
    "restore_start": {"sleep_end", "wake_start", "wake_end", "restore_end", "restore_start", "detach_start"},
    "wake_start": {"wake_end", "restore_start"},
    "wake_end": {"restore_end", "detach_start", "restore_start", "wake_start"},
    "restore_end": {"detach_start", "restore_start", "wake_start"},
}
"""Which event of a rank's way out and back may follow which."""


def check_order(engine: Engine) -> None:
    """A rank's events of leaving and returning follow each other as :data:`NEXT` says."""
    last = ""
    for event in engine.named(*NEXT):
        assert event.event in NEXT[last], f"rank {engine.rank}: {event.event} after {last or 'nothing'}"
        last = event.event


def token(ask: Ask, place: int, weights: dict[int, str]) -> int:
    """The token at ``place``: depends on the request and on what two experts' rows hold."""
    chosen = [(sum(ask.name.encode()) * k + place) % len(weights) for k in (3, 7)]
    return hash((ask.name, place, *(weights[expert] for expert in chosen)))


def asks(lengths: Sequence[Sequence[int] | int]) -> tuple[Ask, ...]:
    """Requests from lengths (tokens) a rank."""
    lists = [[own] if isinstance(own, int) else own for own in lengths]
    return tuple(
        Ask(f"r{rank}.{i}", rank, length) for rank, own in enumerate(lists) for i, length in enumerate(own) if length
    )


def at(iteration: int, rank: int, call: Callable[[Engine], None]) -> tuple[int, int, Callable[[Engine], None]]:
    return iteration, rank, call


def wish(engine: Engine) -> None:
    engine.session.request_restore()
