"""What the simulated ranks of the protocol's tests share, and their workers that obey tickets.

One thread a rank, but only one of them runs at a time: a rank that has to wait hands on to another that can go on,
drawn from a seed. So every run repeats, and a hang is known at once and named: nobody can go on.

    Lockstep   threads and hand-over
    Hub        what ranks share: the exchange, joint collectives, messages, the clock
    FakeWorker one rank's rows, memory, world and map
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flexfloor.elastic.placement import Placement
from flexfloor.elastic.ticket import Ticket
from flexfloor.elastic.vector import Row, decode, encode
from flexfloor.errors import PeerLostError, ProtocolError

LIMIT_S = 60.0


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
        self.dead: set[tuple[int, ...]] = set()
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
        self.version = 0
        self.wake_s, self.waking = 0.0, False
        self.park_error = ""
        self.group: tuple[int, ...] = tuple(range(hub.size))
        self.map = base.expert_map(rank)
        self.buckets: tuple[int, ...] = ()
        self.graphs: dict[tuple[int, ...], set[int]] = defaultdict(set)
        self.calls: list[str] = []
        self._forwards, self._met = 0, -1
        self.flying: list[Callable[[], None]] = []
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

    def drain(self) -> None:
        self._called("drain")
        self.land()

    def land(self) -> None:
        """Results of the batch in flight."""
        while self.flying:
            self.flying.pop(0)()

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
            try:
                self.hub.joint(self.rank, ("capture", ticket.serial), ticket.after, made)
            except AbsentError:
                self.hub.dead.add(ticket.after)  # as gloo closes a group in which somebody waited in vain
                raise
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
        self.hub.dead.discard(self._next or ())
        self._before = self._next = None

    def confirm(self, ticket: Ticket) -> None:
        self._called("confirm")
        self._before = self._next = None
        self.hub.dead.discard(ticket.broken)

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

    def start_wake(self) -> None:
        self._called("start_wake")
        self.hub.must(self._polls is None, "memory is still being released")
        self.waking = self.released

    def wake_seconds(self) -> float:
        return self.wake_s

    def wake(self, ticket: Ticket) -> None:
        self._called("wake")
        if self.rank not in ticket.woken:
            return
        self.waking = False
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

    def loaded(self, version: int) -> None:
        """The trainer writes the rows of the full world and empties the others."""
        self._called("loaded")
        if not self.memory:
            raise ProtocolError(f"weights came for rank {self.rank}, which has no memory")
        self.rows = [None] * len(self.rows)
        for row, expert in self.base.active[self.rank].items():
            self.rows[row] = weight(expert, version)
        self.dense, self.version = True, version

    # -- model ---------------------------------------------------------------------------------

    def forward(self, kind: str) -> dict[int, str]:
        """One model step with the ranks of this rank's world: expert -> what its row holds."""
        self.hub.must(self.memory and self.dense, f"rank {self.rank} steps without weights")
        self.hub.must(self.group not in self.hub.dead, f"a step over the broken groups of {self.group}")
        mine = (self.group, list(self.map), list(self.rows))
        self._forwards = self._forwards + 1 if self._met == self.hub.entered[self.rank] else 0
        self._met = self.hub.entered[self.rank]
        seen = self.hub.joint(self.rank, (kind, self.group, self._forwards), self.group, mine)
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
                self.hub.must(
                    rows[row] == weight(expert, self.version),
                    f"rank {rank} row {row}: {rows[row]} is not expert {expert}",
                )
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
                self.hub.must(self.memory and content == weight(move.expert, ticket.version), f"{move} sends {content}")
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
        if method not in ("drain", "start_wake"):
            self.hub.must(not self.flying, f"rank {self.rank} is in {method} with a batch in flight")
        if method in self.breaks:
            raise self.breaks.pop(method)


def weight(expert: int, version: int = 0) -> str:
    """What a row of ``expert`` holds."""
    return f"w{expert}.{version}"
