"""Occupied rank-time of one rollout window, with the bounds that clock resolution leaves (seed 001 eq. 1, 15, 16).

Every rank is charged from rollout_start, less its free intervals. A free interval opens when both the rank's detach
and its sleep are complete, and closes at the earliest of restore start, wake start and rollout_end:

    detach_end ─┐
                ├─ later of both ──── free ──── earlier of ─┬─ restore start (explicit, or end minus duration)
    sleep_end ──┘                                           ├─ wake start
                                                            └─ rollout_end

A rank that left and came back needs both a new detach and a new sleep before it is free again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from flexfloor.events import Event
from flexfloor.ledger.bounds import ZERO, Bounds, total
from flexfloor.ledger.windows import RankKey, StepLog

Span = tuple[float, float]
_CLOSING = ("restore_start", "restore_end", "wake_start", "wake_end")


@dataclass
class Cycle:
    """One leave and return of a rank, as far as the log tells it.

    Attributes:
        exit_start: start of the detach, where logged.
        detach: detach_end.
        sleeps: sleep_end events; where tags are given all of them must have ended once.
        closers: events that begin or end the return.
        reopened_by: a second detach with no return logged between the two: the rank came back at an unknown time.
    """

    exit_start: Event | None = None
    detach: Event | None = None
    sleeps: list[Event] = field(default_factory=list)
    closers: list[Event] = field(default_factory=list)
    reopened_by: Event | None = None

    @property
    def asleep(self) -> Bounds | None:
        """When the sleep was complete: the first end of each tag, the latest of these; None without a sleep."""
        first: dict[object, Event] = {}
        for sleep in self.sleeps:
            first.setdefault(sleep.fields.get("tag"), sleep)
        return _latest(first.values())

    @property
    def release(self) -> Bounds | None:
        """When detach and sleep were both complete; None where either is missing: that is never free."""
        asleep = self.asleep
        if self.detach is None or asleep is None:
            return None
        return Bounds(max(self.detach.t, asleep.lo), max(self.detach.end, asleep.hi))

    @property
    def reacquired(self) -> Bounds | None:
        """When the return began: the earliest of all evidence, bounds by minimum; None where no return is logged.

        A return whose start the log does not tell can have begun at any time before its end.
        """
        known = [start for closer in self.closers if (start := began(closer)) is not None]
        ends = [closer.end for closer in self.closers] + ([self.reopened_by.end] if self.reopened_by else [])
        if not ends:
            return None
        lows = [-math.inf] if self.reopened_by or self.startless else [start.lo for start in known]
        return Bounds(min(lows), min([start.hi for start in known] + ends))

    @property
    def startless(self) -> list[Event]:
        """Ends of a return that tell neither its start nor its duration."""
        named = {closer.event for closer in self.closers if began(closer) is not None}
        return [
            closer
            for closer in self.closers
            if began(closer) is None and closer.event.replace("_end", "_start") not in named
        ]

    @property
    def released_bytes(self) -> int:
        """Bytes that the sleep gave back, as measured."""
        return sum(int(sleep.fields.get("released_bytes", 0)) for sleep in self.sleeps)


@dataclass(frozen=True)
class RankOccupancy:
    """Occupied and free time of one rank in one window.

    Attributes:
        key: the rank.
        cycles: its leaves and returns in order.
        surely_free: disjoint spans in which the rank was free whatever the clock rounded away.
        possibly_free: disjoint spans outside of which it was surely occupied.
        free: F, rank-seconds.
        occupied: window length less F, rank-seconds.
    """

    key: RankKey
    cycles: tuple[Cycle, ...]
    surely_free: tuple[Span, ...]
    possibly_free: tuple[Span, ...]
    free: Bounds
    occupied: Bounds


@dataclass(frozen=True)
class StepOccupancy:
    """Occupied rank-time of one window.

    Attributes:
        log: the window.
        ranks: ranks that speak in the log; all others are charged whole.
        credited: False where more ranks speak than the window's world holds: then nothing is credited.
        free: sum of F over the ranks, rank-seconds.
        occupied: H, rank-seconds.
    """

    log: StepLog
    ranks: dict[RankKey, RankOccupancy]
    credited: bool
    free: Bounds
    occupied: Bounds


def step_occupancy(log: StepLog) -> StepOccupancy:
    """H of one window: ``[N*T - sum F+, N*T - sum F-]`` rank-seconds (seed 001 eq. 16)."""
    ranks = {key: rank_occupancy(key, events, log.start, log.end) for key, events in log.ranks.items()}
    credited = not strangers(log)
    free = total(rank.free for rank in ranks.values()) if credited else ZERO
    whole = log.world_size * log.seconds
    return StepOccupancy(log, ranks, credited, free, Bounds(whole - free.hi, whole - free.lo))


def rank_occupancy(key: RankKey, events: Iterable[Event], start: float, end: float) -> RankOccupancy:
    """Free intervals of one rank, each bounded by ``F- = max(0, u- - l+)``, ``F+ = max(0, u+ - l-)`` (eq. 15).

    Args:
        key: the rank.
        events: its events in order of time.
        start: rollout_start (seconds).
        end: rollout_end (seconds).
    """
    cycles = tuple(split_cycles(events))
    surely: list[Span] = []
    possibly: list[Span] = []
    for cycle in cycles:
        release, back = cycle.release, cycle.reacquired or Bounds.exact(end)
        if release is not None:
            surely.append((release.hi, back.lo))
            possibly.append((release.lo, back.hi))
    inner, outer = _merged(surely, start, end), _merged(possibly, start, end)
    free = Bounds(sum(b - a for a, b in inner), sum(b - a for a, b in outer))
    length = end - start
    return RankOccupancy(key, cycles, inner, outer, free, Bounds(length - free.hi, length - free.lo))


def split_cycles(events: Iterable[Event]) -> list[Cycle]:
    """Cut a rank's events, in order of time, into leaves and returns."""
    cycles = [Cycle()]
    for event in events:
        present = cycles[-1]
        if event.event in _CLOSING:
            present.closers.append(event)
            continue
        if event.event not in ("detach_start", "detach_end", "sleep_end"):
            continue
        again = event.event != "sleep_end" and present.detach is not None
        if again and not present.closers:
            present.reopened_by = event
        if again or present.closers:
            present = Cycle()
            cycles.append(present)
        if event.event == "detach_start":
            present.exit_start = event
        elif event.event == "detach_end":
            present.detach = event
        else:
            present.sleeps.append(event)
    return cycles


def began(closer: Event) -> Bounds | None:
    """When a return began: its own stamp, or ``[t - d - dres, t + res - d]`` from an end and its duration."""
    if closer.event in ("restore_start", "wake_start"):
        return Bounds(closer.t, closer.end)
    duration = closer.fields.get("duration")
    if duration is None:
        return None
    return Bounds(closer.t - duration - closer.fields.get("duration_res", 0.0), closer.end - duration)


def strangers(log: StepLog) -> list[RankKey]:
    """Ranks that cannot be of the window's world: beyond its size, or more of them than it holds."""
    keys = list(log.ranks)
    beyond = [key for key in keys if key.rank >= log.world_size]
    return beyond or keys[log.world_size :]


def _latest(events: Iterable[Event]) -> Bounds | None:
    found = list(events)
    return Bounds(max(e.t for e in found), max(e.end for e in found)) if found else None


def _merged(spans: list[Span], start: float, end: float) -> tuple[Span, ...]:
    clipped = sorted((max(a, start), min(b, end)) for a, b in spans)
    merged: list[Span] = []
    for a, b in clipped:
        if b <= a:
            continue
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], b))
        else:
            merged.append((a, b))
    return tuple(merged)
