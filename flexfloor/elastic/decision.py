"""From the rows of all ranks to one decision, the same on every rank.

A prediction never authorises an exit: only completed ranks count towards a quorum
(paper, sections 3.4 and 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from flexfloor.elastic.vector import Row


class Action(Enum):
    """What every rank does at this sync point."""

    RUN = "run"
    """Go on in the current world."""
    ARM = "arm"
    """All ranks hold the same plan: from now on they meet as :mod:`flexfloor.elastic.cadence` says."""
    SHRINK = "shrink"
    RESTORE = "restore"
    """Full world in mid-rollout (a parked rank has a request, or someone asked)."""
    FINISH = "finish"
    """The step is closed and nothing is unfinished: restore if needed, then disarm."""
    STOP = "stop"
    """Nothing is unfinished anywhere and no step is open: the wave ends."""


@dataclass
class World:
    """What all ranks agree on between two sync points.

    Attributes:
        size: ranks of the full world N.
        members: ranks of the current EP group, ascending.
        ladder: installed sizes, strictly decreasing, starting at N.
        armed: a plan is agreed on and its step is not finished.
        gate: no rank steps until every expected trajectory has been received.
        attempts: target size -> failed attempts.
        syncs: sync points since the plan was armed.
        retry_at: no transition is tried before this sync point.
    """

    size: int
    members: list[int]
    ladder: list[int] = field(default_factory=list)
    armed: bool = False
    gate: bool = False
    attempts: dict[int, int] = field(default_factory=dict)
    syncs: int = 0
    retry_at: int = 0


@dataclass(frozen=True)
class Decision:
    """The outcome of one sync point.

    Attributes:
        action: what to do.
        running: whether anything is or may become unfinished.
        target: size of the next world (SHRINK).
        busy: members with unfinished work (SHRINK).
        idle: members that are complete (SHRINK).
        rank: the rank that asked (RESTORE).
        paused: every rank has pause pending (vLLM's two-phase pause).
    """

    action: Action
    running: bool
    target: int = 0
    busy: tuple[int, ...] = ()
    idle: tuple[int, ...] = ()
    rank: int = -1
    paused: bool = False


MAX_ATTEMPTS = 3


def complete(row: Row) -> bool:
    """A rank is complete when it received what it expects and all of it is finished or aborted."""
    return row.received >= row.expected and row.unfinished == 0 and row.open == 0


def decide(world: World, rows: Sequence[Row]) -> Decision:
    """The decision of this sync point; a pure function of ``world`` and ``rows``."""
    unfinished = any(row.unfinished for row in rows)
    paused = all(row.pause for row in rows)
    pausing = any(row.pause for row in rows)
    if not world.armed:
        if rows[0].digest and all(row.digest == rows[0].digest for row in rows):
            return Decision(Action.ARM, True, paused=paused)
        running = unfinished or (pausing and not paused)
        return Decision(Action.RUN if running else Action.STOP, running, paused=paused)
    everyone = all(complete(row) for row in rows)
    if everyone and all(row.closed for row in rows):
        return Decision(Action.FINISH, pausing and not paused, paused=paused)
    if paused:
        return Decision(Action.RUN, unfinished, paused=True)
    if pausing:
        return Decision(Action.RUN, True)
    parked = [rank for rank in range(world.size) if rank not in world.members]
    for rank in parked:
        if rows[rank].unfinished or rows[rank].want_restore:
            return Decision(Action.RESTORE, True, rank=rank)
    wishing = [rank for rank in world.members if rows[rank].want_restore]
    if wishing:
        return Decision(Action.RESTORE, True, rank=wishing[0]) if parked else Decision(Action.RUN, True)
    return _shrink(world, rows) or Decision(Action.RUN, True)


def _shrink(world: World, rows: Sequence[Row]) -> Decision | None:
    """SHRINK to the deepest installed size whose quorum of completed members is reached."""
    if world.gate or world.syncs < world.retry_at:
        return None
    idle = tuple(rank for rank in world.members if complete(rows[rank]))
    busy = tuple(rank for rank in world.members if rank not in idle)
    sizes = [s for s in world.ladder if len(busy) <= s < len(world.members)]
    sizes = [s for s in sizes if world.attempts.get(s, 0) < MAX_ATTEMPTS]
    if not sizes or not busy:
        return None
    return Decision(Action.SHRINK, True, target=min(sizes), busy=busy, idle=idle)


def gate_opens(world: World, rows: Sequence[Row]) -> bool:
    """Every expected trajectory has arrived on every rank."""
    return world.armed and all(row.received >= row.expected for row in rows)
