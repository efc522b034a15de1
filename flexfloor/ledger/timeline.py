"""What each rank did over the rollout windows, as coloured spans of one state each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexfloor.ledger.aggregate import StepEntry
from flexfloor.ledger.figures import generation_end
from flexfloor.ledger.occupancy import StepOccupancy
from flexfloor.ledger.windows import RankKey, StepKey

GENERATING = "generating (and preparation)"
WAITING = "complete, still coupled"
LEAVING = "leaving"
FREE = "free"
RETURNING = "returning"
WINDING_UP = "after generation"
SILENT = "charged, no events"
STATES = (GENERATING, WAITING, LEAVING, FREE, RETURNING, WINDING_UP, SILENT)

_ENTERED = {"local_complete": WAITING, "detach_start": LEAVING, "detach_end": LEAVING}


@dataclass(frozen=True)
class Segment:
    """A rank in one state from ``start`` to ``end`` on the glued axis; ``at`` is the start after rollout_start (s)."""

    step: StepKey
    rank: str
    state: str
    start: float
    end: float
    at: float


@dataclass(frozen=True)
class Frame:
    """One rollout window on the glued axis (seconds)."""

    step: StepKey
    start: float
    end: float


def lay_out(entries: Sequence[StepEntry]) -> tuple[list[Frame], list[Segment], list[str]]:
    """Glue the windows of one seed one after the other, what lies between them left out.

    Returns:
        The windows, the segments, and the ranks from first to last. Ranks without events are named where their
        numbers follow from the world (one replica), and left out otherwise.
    """
    frames: list[Frame] = []
    segments: list[Segment] = []
    offset = 0.0
    gap = 0.004 * sum(entry.occupancy.log.seconds for entry in entries)
    for entry in entries:
        step = entry.occupancy
        frames.append(Frame(step.log.key, offset, offset + step.log.seconds))
        for key in _ranks(step):
            for state, start, end in rank_states(step, key):
                at = start - step.log.start
                segments.append(
                    Segment(step.log.key, label(key), state, offset + at, offset + end - step.log.start, at)
                )
        offset = frames[-1].end + gap
    keys = {key for entry in entries for key in _ranks(entry.occupancy)}
    names = [label(key) for key in sorted(keys, key=lambda key: (key.replica or 0, key.rank))]
    return frames, segments, list(dict.fromkeys(names))


def rank_states(step: StepOccupancy, key: RankKey) -> list[tuple[str, float, float]]:
    """States of one rank that cover its window without gap or overlap; free is what is free for certain."""
    start, end = step.log.start, step.log.end
    if key not in step.ranks:
        return [(SILENT, start, end)]
    marks = [(start, GENERATING)]
    output = generation_end(step.log, key)
    for event in step.log.ranks[key]:
        if event.event in _ENTERED:
            marks.append((event.t, _ENTERED[event.event]))
        elif event.event in ("restore_end", "wake_end"):
            marks.append((event.t, GENERATING if output is None or event.t < output else WINDING_UP))
    free = step.ranks[key].surely_free if step.credited else ()
    marks += [mark for a, b in free for mark in ((a, FREE), (b, RETURNING))]
    if output is not None and not any(a <= output < b for a, b in free):
        marks.append((output, WINDING_UP))
    marks.sort(key=lambda mark: mark[0])
    states: list[tuple[str, float, float]] = []
    for index, (at, state) in enumerate(marks):
        until = marks[index + 1][0] if index + 1 < len(marks) else end
        low, high = max(at, start), min(until, end)
        if high <= low:
            continue
        name = FREE if any(a <= low and high <= b for a, b in free) else state
        if states and states[-1][0] == name:
            states[-1] = (name, states[-1][1], high)
        else:
            states.append((name, low, high))
    return states


def label(key: RankKey) -> str:
    """Short name of a rank for an axis."""
    return f"rank {key.rank}" if key.replica is None else f"replica {key.replica} rank {key.rank}"


def _ranks(step: StepOccupancy) -> list[RankKey]:
    silent = [] if step.log.several_replicas else [RankKey(None, rank) for rank in range(step.log.world_size)]
    return list(dict.fromkeys([*step.ranks, *silent]))
