"""A small world for the tests of the elastic protocol: N sessions, workers that obey tickets, a fake engine loop.

One thread a rank, but only one of them runs at a time: a rank that has to wait hands on to another that can go on,
drawn from a seed. So every run repeats, and a hang is known at once and named: nobody can go on.

    Lockstep   threads and hand-over
    Hub        what ranks share: the exchange, joint collectives, messages, the clock
    FakeWorker one rank's rows, memory, world and map
    Engine     one rank's loop: requests in, model step, sync point

At every model step exactly the members step, in the same world, with maps that reach every expert once on a row that
holds it. Tokens are computed from the rows that the maps reach, so a stale row changes a request's result.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexfloor.elastic.ballot import Ballot
from flexfloor.elastic.board import Board
from flexfloor.elastic.faults import FaultPlan
from flexfloor.elastic.placement import Placement
from flexfloor.elastic.session import Session
from flexfloor.elastic.states import RankState
from flexfloor.elastic.step import Local, Step
from flexfloor.elastic.ticket import Ticket
from flexfloor.elastic.vector import Row, decode, encode
from flexfloor.errors import PeerLostError, ProtocolError
from flexfloor.events import Event, EventLog, parse_event
from flexfloor.ledger.run import RunLedger, account

LIMIT_S = 60.0
ITERATIONS = 600


class HangError(AssertionError):
    """Nobody can go on; the message says who waits for what."""


class EndedError(Exception):
    """A rank ended with an error while this one waited for it (the watchdog would end this one)."""


class AbsentError(PeerLostError):
    """A rank went to the next sync point without taking part in a joint operation."""


class Lockstep:
    """Runs one function a rank, one at a time."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.errors: dict[int, BaseException] = {}
        self._hang = ""

    def run(self, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        """Results of all functions, None where one raised; :attr:`errors` holds what they raised."""
        self.errors, self._hang = {}, ""
        self._turn = [threading.Semaphore(0) for _ in bodies]
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = dict.fromkeys(
            range(len(bodies)), (lambda: True, "its start")
        )
        self._over = threading.Event()
        results: list[Any] = [None] * len(bodies)

        def body(rank: int) -> None:
            self._turn[rank].acquire()
            try:
                results[rank] = bodies[rank]()
            except BaseException as error:  # noqa: BLE001 - handed to the test
                self.errors[rank] = error
            self._hand_on()

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(len(bodies))]
        for thread in threads:
            thread.start()
        self._hand_on()
        if not self._over.wait(LIMIT_S):
            raise HangError(f"some rank neither ends nor waits; waiting: {self._whereabouts()}")
        for thread in threads:
            thread.join()
        return results

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Let others run until ``ready``; HangError when that will never be."""
        if ready():
            return
        self._waiting[rank] = (ready, what)
        self._hand_on()
        self._turn[rank].acquire()
        if not ready():
            raise HangError(self._hang) if self._hang else EndedError(f"rank {rank} waited for {what}")

    def _hand_on(self) -> None:
        able = [rank for rank, (ready, _) in self._waiting.items() if ready()]
        if not able and self._waiting:
            if not self.errors:
                self._hang = f"nobody can go on: {self._whereabouts()}"
            able = [min(self._waiting)]
        if not able:
            self._over.set()
            return
        chosen = self._random.choice(able)
        del self._waiting[chosen]
        self._turn[chosen].release()

    def _whereabouts(self) -> str:
        return "; ".join(f"rank {rank} waits for {what}" for rank, (_, what) in sorted(self._waiting.items()))


class Hub:
    """What the ranks share."""

    def __init__(self, size: int, steps: Lockstep) -> None:
        self.size, self.steps = size, steps
        self.entered = [0] * size
        self.now = 0.0
        self.stepped: tuple[int, ...] = ()
        self.broken: list[str] = []
        self._rows: dict[int, Row] = {}
        self._agreed: list[Row] = []
        self._round = 0
        self._tables: dict[Any, dict[int, Any]] = {}
        self._mail: dict[Any, Any] = {}

    def must(self, holds: bool, what: str) -> None:
        """An invariant. Kept as well as raised, because the protocol makes a vote of what a phase raises."""
        if not holds:
            self.broken.append(what)
            raise AssertionError(what)

    def clock(self) -> float:
        """Seconds that pass with every look at the clock."""
        self.now += 0.001
        return self.now

    def exchange(self, rank: int, row: Row) -> list[Row]:
        """The all-reduce over the full world."""
        self._rows[rank] = row
        self.entered[rank] += 1
        mine = self._round
        if len(self._rows) == self.size:
            flat = [encode(self._rows[r], r, self.size) for r in range(self.size)]
            self._agreed = decode([sum(column) for column in zip(*flat, strict=True)], self.size)
            self._rows = {}
            self._round += 1
            self._tables.clear()
            self._mail.clear()
        self.steps.wait(rank, lambda: self._round > mine, "the exchange of rows")
        return list(self._agreed)

    def joint(self, rank: int, key: Any, ranks: Iterable[int], payload: Any) -> dict[int, Any]:
        """A collective over ``ranks``: what each of them brought; AbsentError when one will not come."""
        table, mark = self._tables.setdefault((key, self.entered[rank]), {}), self.entered[rank]
        table[rank] = payload

        def missing() -> list[int]:
            return [r for r in ranks if r not in table]

        def decided() -> bool:
            return not missing() or any(self.entered[r] > mark for r in missing())

        self.steps.wait(rank, decided, f"ranks {missing()} in {key}")
        if missing():
            raise AbsentError(f"rank {rank} entered {key}, ranks {missing()} did not")
        return table

    def send(self, key: Any, content: Any) -> None:
        """Post a message."""
        self._mail[key] = content

    def receive(self, rank: int, source: int, key: Any) -> Any:
        """The message under ``key``; AbsentError when ``source`` went on without sending it."""
        mark = self.entered[rank]
        self.steps.wait(rank, lambda: key in self._mail or self.entered[source] > mark, f"rank {source} to send {key}")
        if key not in self._mail:
            raise AbsentError(f"rank {source} never sent {key}")
        return self._mail[key]


class FakeWorker:
    """One rank's device side; memory behaves like the engine's (see flexfloor.engine.memory)."""

    def __init__(self, rank: int, hub: Hub, base: Placement) -> None:
        self.rank, self.hub, self.base = rank, hub, base
        self.rows: list[str | None] = [None] * base.capacity
        for row, expert in base.active[rank].items():
            self.rows[row] = weight(expert)
        self.dense, self.released, self.release_polls = True, False, 1
        self.park_error = ""
        self.group: tuple[int, ...] = tuple(range(hub.size))
        self.map = base.expert_map(rank)
        self.buckets: tuple[int, ...] = ()
        self.graphs: dict[tuple[int, ...], set[int]] = defaultdict(set)
        self.calls: list[str] = []
        self.moved = 0
        self.breaks: dict[str, Exception] = {}
        self._before: tuple[tuple[int, ...], list[int]] | None = None
        self._next: tuple[int, ...] | None = None
        self._polls: int | None = None

    @property
    def memory(self) -> bool:
        """Weights and KV are there, whatever they hold."""
        return not self.released and self._polls is None

    # -- shrink --------------------------------------------------------------------------------

    def prepare(self, ticket: Ticket) -> None:
        self._called("prepare")
        if self.rank in ticket.before and not self.memory:
            raise ProtocolError(f"rank {self.rank} is a member without memory")
        self.hub.must(set(ticket.after) < set(ticket.before), "set(ticket.after) < set(ticket.before)")
        self.hub.must(set(ticket.maps) == set(ticket.after), "set(ticket.maps) == set(ticket.after)")

    def stage(self, ticket: Ticket) -> dict[str, float]:
        self._called("stage")
        self._transfer(ticket)
        if self.rank in ticket.after:
            self.hub.joint(self.rank, ("groups", ticket.serial), ticket.after, None)
            self._next = ticket.after
        return {"move": 0.5, "moved_bytes": 10 * len(ticket.moves)}

    def switch(self, ticket: Ticket) -> None:
        self._called("switch")
        if self.rank in ticket.after:
            self.hub.must(self._next == ticket.after, "the groups of the next world were not staged")
            self._before = (self.group, self.map)
            self.group, self.map = ticket.after, ticket.maps[self.rank]

    def capture(self, ticket: Ticket) -> dict[str, Any]:
        self._called("capture")
        if self.rank not in ticket.after or not self.buckets:
            return {}
        fitting = [size for size in self.buckets if size <= self._bucket(ticket.load)]
        made = [size for size in (fitting[-1:] if ticket.lean else fitting) if size not in self.graphs[ticket.after]]
        if made:
            self.hub.joint(self.rank, ("capture", ticket.serial), ticket.after, made)
        self.graphs[ticket.after].update(made)
        return {"captured": made}

    def capture_wanted(self, load: int) -> int:
        needed = self._bucket(load)
        return 0 if not self.buckets or needed in self.graphs[self.group] else needed

    def _bucket(self, load: int) -> int:
        return next((size for size in self.buckets if size >= load), self.buckets[-1] if self.buckets else 0)

    def trial(self, ticket: Ticket) -> None:
        self._called("trial")
        if self.rank in ticket.after:
            self.forward("trial")

    def undo(self, ticket: Ticket) -> None:
        self._called("undo")
        if self._before is not None:
            self.group, self.map = self._before
        self._before = self._next = None

    def confirm(self, ticket: Ticket) -> None:
        self._called("confirm")
        self._before = self._next = None

    # -- memory --------------------------------------------------------------------------------

    def park(self) -> None:
        self._called("park")
        first = self.hub.stepped
        self.hub.must(
            bool(first) and self.rank not in first, f"rank {self.rank} parks before the survivors' first step"
        )
        self._start_release()

    def park_report(self) -> dict[str, Any] | None:
        if self._polls is None:
            return None
        self._polls -= 1
        if self._polls >= 0:
            return None
        self._polls = None
        if self.park_error:
            return {"error": self.park_error}
        self.released = True
        return {"released_bytes": 100, "start": self.hub.now, "end": self.hub.clock()}

    def _start_release(self) -> None:
        if self.released or self._polls is not None:
            return
        self.rows, self.dense, self._polls = [None] * len(self.rows), False, self.release_polls

    # -- restore -------------------------------------------------------------------------------

    def wake(self, ticket: Ticket) -> None:
        self._called("wake")
        if self.rank not in ticket.woken:
            return
        if self._polls is not None:
            raise ProtocolError("memory is still being released")
        if self.released:
            self.released, self.dense, self.rows = False, False, [None] * len(self.rows)

    def refill(self, ticket: Ticket) -> dict[str, float]:
        self._called("refill")
        for place, woken in enumerate(ticket.woken):
            donor = ticket.before[place % len(ticket.before)]
            if self.rank == donor:
                self.hub.must(self.dense, f"donor {donor} holds no weights")
                self.hub.send(("dense", ticket.serial, woken), self.dense)
            elif self.rank == woken:
                self.dense = self.hub.receive(self.rank, donor, ("dense", ticket.serial, woken))
        self._transfer(ticket)
        return {"move": 0.5}

    def switch_back(self, ticket: Ticket) -> None:
        self._called("switch_back")
        self._before = (self.group, self.map)
        self.group, self.map = tuple(range(self.hub.size)), self.base.expert_map(self.rank)

    # -- model ---------------------------------------------------------------------------------

    def forward(self, kind: str) -> dict[int, str]:
        """One model step with the ranks of this rank's world: expert -> what its row holds."""
        self.hub.must(self.memory and self.dense, f"rank {self.rank} steps without weights")
        mine = (self.group, list(self.map), list(self.rows))
        seen = self.hub.joint(self.rank, (kind, self.group), self.group, mine)
        worlds = {rank: group for rank, (group, _, _) in seen.items()}
        self.hub.must(set(worlds.values()) == {tuple(sorted(seen))}, f"unequal worlds {worlds}")
        reached: dict[int, str] = {}
        per = self.base.experts // len(self.group)
        for rank, (_, table, rows) in seen.items():
            for expert, row in enumerate(table):
                if row < 0:
                    continue
                self.hub.must(row < per, f"row {row} of rank {rank} is no row of a world of {len(self.group)}")
                self.hub.must(expert not in reached, f"expert {expert} is reached twice")
                self.hub.must(rows[row] == weight(expert), f"rank {rank} row {row}: {rows[row]} is not expert {expert}")
                reached[expert] = rows[row] or ""
        self.hub.must(
            len(reached) == self.base.experts, f"{self.base.experts - len(reached)} experts are not reachable"
        )
        return reached

    def _transfer(self, ticket: Ticket) -> None:
        """Sends first, then receives, as messages: what arrives is what the row held when it was sent."""
        for move in ticket.moves:
            if move.source == self.rank:
                content = self.rows[move.source_row]
                self.hub.must(self.memory and content == weight(move.expert), f"{move} sends {content}")
                self.hub.send((ticket.serial, move), content)
        for move in ticket.moves:
            if move.target == self.rank:
                self.hub.must(self.memory, f"{move} goes to released memory")
                active = self.rank in ticket.before and move.target_row in self.map
                self.hub.must(not active, f"{move} overwrites a row in use")
                self.rows[move.target_row] = None
                self.rows[move.target_row] = self.hub.receive(self.rank, move.source, (ticket.serial, move))
                self.moved += 1

    def _called(self, method: str) -> None:
        self.calls.append(method)
        if method in self.breaks:
            raise self.breaks.pop(method)


def weight(expert: int) -> str:
    """What a row of ``expert`` holds."""
    return f"w{expert}"


@dataclass(frozen=True)
class Ask:
    """One request of a rollout: ``length`` tokens on ``rank``, arriving at iteration ``at``.

    ``extra`` requests are not part of what the plan expects. ``abort_at`` ends it there (if it still runs).
    """

    name: str
    rank: int
    length: int
    at: int = 0
    extra: bool = False
    trajectory: str = ""
    more: bool = False
    abort_at: int = -1


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
        self.pause = self.busy = False
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
        while True:
            self._inputs(script, iteration)
            self._step(iteration)
            before = self.session.world.members
            outcome = self.session.sync(Local(len(self.running), 100, self.pause, self.busy))
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
        self.steps.append(iteration)
        for name, request in list(self.running.items()):
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
    ) -> None:
        self.size, self.deadline_s, self.number = size, deadline_s, -1
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
        weights = {expert: weight(expert) for expert in range(self.base.experts)}
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
                assert engine.worker.rows[row] == weight(expert), f"row {row} of rank {engine.rank} is noted wrongly"

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
    "restore_start": {"sleep_end", "wake_start", "restore_end", "restore_start", "detach_start"},
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
