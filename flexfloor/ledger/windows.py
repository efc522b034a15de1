"""From one flat log to rollout windows: which events belong to which step, and in which order.

T sums the windows rollout_start .. rollout_end. Training, the trainer's weight transfer, validation, checkpoints and
planning lie outside of them (seed 001 section 5.1).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from flexfloor.events import Event


class StepKey(NamedTuple):
    """Name of one step of one run."""

    run: str
    seed: int
    epoch: int | None
    step: int | None

    def __str__(self) -> str:
        shown = [f"seed {self.seed}"]
        shown += [
            f"{name} {value}" for name, value in (("epoch", self.epoch), ("step", self.step)) if value is not None
        ]
        return " ".join(shown)


class RankKey(NamedTuple):
    """A rank of a replica; replica is None where the log names none."""

    replica: int | None
    rank: int

    def __str__(self) -> str:
        return f"rank {self.rank}" if self.replica is None else f"replica {self.replica} rank {self.rank}"


@dataclass(frozen=True)
class StepLog:
    """One rollout window and the events that belong to it.

    Attributes:
        key: run, seed, epoch, step.
        start: time of rollout_start (seconds, the log's clock).
        end: time of rollout_end.
        world_size: ranks that the window charges (N, over all replicas).
        response_tokens: response tokens generated and kept (W).
        responses: responses of the step, where rollout_end says so.
        cap_hits: responses stopped by a short cap and by the global limit, where rollout_end says so.
        events: all events of the step in order of time.
    """

    key: StepKey
    start: float
    end: float
    world_size: int
    response_tokens: int
    responses: int | None
    cap_hits: Mapping[str, int] | None
    events: tuple[Event, ...] = field(repr=False)

    @property
    def seconds(self) -> float:
        """Length of the window (seconds)."""
        return self.end - self.start

    @cached_property
    def ranks(self) -> dict[RankKey, list[Event]]:
        """Events of each rank that speaks, in order of time."""
        found: dict[RankKey, list[Event]] = defaultdict(list)
        for event in self.events:
            if event.rank is not None:
                found[RankKey(event.replica if self.several_replicas else None, event.rank)].append(event)
        return dict(sorted(found.items(), key=lambda item: (item[0].replica or 0, item[0].rank)))

    @cached_property
    def replicas(self) -> list[int]:
        """Replicas that ranks of this step name."""
        return sorted({event.replica for event in self.events if event.replica is not None})

    @property
    def several_replicas(self) -> bool:
        """Whether ranks must be told apart by replica."""
        return len(self.replicas) > 1

    def named(self, *names: str) -> list[Event]:
        """Events of these names in order of time."""
        return [event for event in self.events if event.event in names]


class Windows(NamedTuple):
    """Finished steps in order of time, and one line for each rollout that was left out."""

    steps: list[StepLog]
    problems: list[str]


@dataclass(frozen=True)
class _Span:
    start: Event
    end: Event


@dataclass(frozen=True)
class _Frame:
    key: StepKey
    start: float
    end: float
    spans: list[_Span]


def split_windows(events: Iterable[Event]) -> Windows:
    """Group a log by rollout window.

    A rollout without its end (a killed step) has no W: it is left out and reported. A step that was rolled out twice
    is charged twice, as it was. Events that name no step belong to the window of their run that holds their time.
    """
    ordered = in_order(events)
    by_key: dict[StepKey, list[Event]] = defaultdict(list)
    for event in ordered:
        by_key[StepKey(event.run, event.seed, event.epoch, event.step)].append(event)
    problems: list[str] = []
    found: list[tuple[StepKey, list[_Span]]] = []
    killed: dict[StepKey, list[float]] = {}
    for key, own in by_key.items():
        marks = [event for event in own if event.event in ("rollout_start", "rollout_end")]
        spans, killed[key] = _pair_windows(key, marks, problems)
        found += [(key, own_spans) for own_spans in spans]
    frames = [_Frame(key, min(s.start.t for s in spans), max(s.end.t for s in spans), spans) for key, spans in found]
    members: list[list[Event]] = [[] for _ in frames]
    for key, own in by_key.items():
        named = [index for index, frame in enumerate(frames) if frame.key == key]
        if key.epoch is not None and key.step is not None and not named:
            if not any(event.event == "rollout_start" for event in own):
                problems.append(f"log: {key}: {len(own)} events but no rollout window of run {key.run!r}; left out")
            continue
        for event in own:
            index = _window_of(event, frames, named, killed.get(key, []))
            if index is not None:
                members[index].append(event)
    steps = [_step(frame, tuple(in_order(own))) for frame, own in zip(frames, members, strict=True)]
    return Windows(sorted(steps, key=lambda step: (step.key.seed, step.start)), problems)


def in_order(events: Iterable[Event]) -> list[Event]:
    """Sort by time; within one file the order of lines settles what the resolution leaves open."""
    keyed: list[tuple[float, str, int, int, Event]] = []
    latest: dict[str, float] = {}
    numbered = sorted(enumerate(events), key=lambda item: (item[1].file, item[1].line, item[0]))
    for index, event in numbered:
        at = event.t
        if event.file:
            at = max(event.t, min(latest.get(event.file, -math.inf), event.end))
            latest[event.file] = at
        keyed.append((at, event.file, event.line, index, event))
    return [item[-1] for item in sorted(keyed, key=lambda item: item[:-1])]


def _pair_windows(key: StepKey, marks: list[Event], problems: list[str]) -> tuple[list[list[_Span]], list[float]]:
    """Windows of one step, each as the spans of its replicas or of its driver, and starts that have no end."""
    sources: dict[int | None, list[Event]] = defaultdict(list)
    for mark in marks:
        sources[mark.replica].append(mark)
    if {mark.event for mark in sources.get(None, [])} == {"rollout_start", "rollout_end"}:
        sources = {None: sources[None]}
    killed: list[float] = []
    paired = [
        _pair_source(key, sources[name], killed, problems) for name in sorted(sources, key=lambda name: name or 0)
    ]
    rounds = max((len(spans) for spans in paired), default=0)
    return [[spans[index] for spans in paired if index < len(spans)] for index in range(rounds)], killed


def _pair_source(key: StepKey, marks: list[Event], killed: list[float], problems: list[str]) -> list[_Span]:
    spans: list[_Span] = []
    opened: Event | None = None
    for mark in marks:
        if mark.event == "rollout_end" and opened is not None:
            spans.append(_Span(opened, mark))
            opened = None
        elif mark.event == "rollout_end":
            problems.append(f"log: {key}: rollout_end at {mark.t:g} has no rollout_start before it; left out")
        else:
            if opened is not None:
                _leave_out(key, opened, killed, problems)
            opened = mark
    if opened is not None:
        _leave_out(key, opened, killed, problems)
    return spans


def _leave_out(key: StepKey, start: Event, killed: list[float], problems: list[str]) -> None:
    killed.append(start.t)
    problems.append(f"log: {key}: rollout_start at {start.t:.3f} has no rollout_end (killed); left out")


def _window_of(event: Event, frames: list[_Frame], named: list[int], killed: list[float]) -> int | None:
    """The window of an event: the latest of its step that had begun; None for a rollout that was killed."""
    if named:
        begun = [(start, -1) for start in killed if start <= event.end]
        begun += [(frames[index].start, index) for index in named if frames[index].start <= event.end]
        index = max(begun)[1] if begun else named[0]
        return index if index >= 0 else None
    holding = (i for i, f in enumerate(frames) if f.key.run == event.run and f.start <= event.t <= f.end)
    return next(holding, None)


def _step(frame: _Frame, events: tuple[Event, ...]) -> StepLog:
    ends = [span.end.fields for span in frame.spans]
    return StepLog(
        key=frame.key,
        start=frame.start,
        end=frame.end,
        world_size=sum(int(fields["world_size"]) for fields in ends),
        response_tokens=sum(int(fields["response_tokens"]) for fields in ends),
        responses=sum(fields["responses"] for fields in ends)
        if all("responses" in fields for fields in ends)
        else None,
        cap_hits=_summed([fields.get("cap_hits") for fields in ends]),
        events=events,
    )


def _summed(hits: list[Any]) -> dict[str, int] | None:
    if any(item is None for item in hits):
        return None
    return {name: sum(item[name] for item in hits) for name in ("short", "global")}
