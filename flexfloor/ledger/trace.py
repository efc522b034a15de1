"""The run as a Chrome trace: open it in Perfetto or chrome://tracing. One track a rank, one process a replica."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flexfloor.events import Event
from flexfloor.ledger.occupancy import StepOccupancy, began
from flexfloor.ledger.run import RunLedger
from flexfloor.ledger.windows import RankKey

DRIVER = 0
_PAIRS = {name: name.removesuffix("_end") for name in ("detach_end", "sleep_end", "restore_end", "wake_end")}
_SPANNED = {"rollout_start", "rollout_end", *_PAIRS, *(f"{name}_start" for name in _PAIRS.values())}


def trace_json(run: RunLedger) -> dict[str, Any]:
    """Trace events of all steps; times in microseconds since the first rollout_start.

    Spans: rollout windows (driver), detach, sleep, restore, wake and free time (ranks); free time is what is free
    whatever the clock rounded away. Every other event is an instant with its fields.
    """
    origin = min(entry.occupancy.log.start for entry in run.entries)
    events: list[dict[str, Any]] = []
    tracks: dict[tuple[int, int], str] = {(DRIVER, 0): "driver"}
    for entry in run.entries:
        step = entry.occupancy
        events.append(_span("rollout", step.log.start, step.log.end, origin, (DRIVER, 0), {"step": str(step.log.key)}))
        for key in step.ranks:
            tracks[_track(key)] = str(key)
        events += _rank_spans(step, origin)
        events += [
            {
                "name": event.event,
                "ph": "i",
                "s": "t",
                "ts": _micro(event.t - origin),
                **_where(step, event),
                "args": _args(event),
            }
            for event in step.log.events
            if event.event not in _SPANNED
        ]
    return {"displayTimeUnit": "ms", "traceEvents": [*_names(tracks), *sorted(events, key=lambda e: e["ts"])]}


def write_trace(run: RunLedger, path: str | Path) -> None:
    """Write ``trace_json`` to a file."""
    Path(path).write_text(json.dumps(trace_json(run)), encoding="utf-8")


def _rank_spans(step: StepOccupancy, origin: float) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for key, events in step.log.ranks.items():
        track = _track(key)
        opened: dict[str, Event] = {}
        for event in events:
            phase = event.event.rsplit("_", 1)[0]
            if event.event == "restore_start" and "wake" in opened:
                # Memory that came back early: spans of a track may lie inside each other, but not overlap.
                spans.append(_span("wake", opened.pop("wake").t, event.t, origin, track, {}))
                opened["rest of wake"] = event
            if event.event == "wake_end" and opened.pop("rest of wake", None) is not None:
                continue
            if event.event in _SPANNED and event.event.endswith("_start"):
                opened[phase] = event
            elif event.event in _PAIRS:
                start = opened.pop(phase).t if phase in opened else _start_of_end(event)
                spans.append(_span(phase, start, event.t, origin, track, _args(event)))
        if step.credited:
            surely = step.ranks[key].surely_free
            spans += [_span("free", a, b, origin, track, {"rank_seconds": b - a}) for a, b in surely]
    return spans


def _start_of_end(event: Event) -> float:
    start = began(event) if event.event in ("restore_end", "wake_end") else None
    return event.t if start is None else start.lo


def _span(name: str, start: float, end: float, origin: float, track: tuple[int, int], args: Any) -> dict[str, Any]:
    at = _micro(start - origin)
    process, thread = track
    return {
        "name": name,
        "ph": "X",
        "ts": at,
        "dur": max(0, _micro(end - origin) - at),
        "pid": process,
        "tid": thread,
        "args": args,
    }


def _names(tracks: dict[tuple[int, int], str]) -> list[dict[str, Any]]:
    processes = {process: "driver" if process == DRIVER else f"replica {process - 1}" for process, _ in tracks}
    named = [
        {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": n}} for pid, n in processes.items()
    ]
    return named + [
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
        for (pid, tid), name in tracks.items()
    ]


def _track(key: RankKey) -> tuple[int, int]:
    return 1 + (key.replica or 0), key.rank


def _where(step: StepOccupancy, event: Event) -> dict[str, int]:
    replica = event.replica if step.log.several_replicas else None
    process, thread = (DRIVER, 0) if event.rank is None else _track(RankKey(replica, event.rank))
    return {"pid": process, "tid": thread}


def _args(event: Event) -> dict[str, Any]:
    return {"res": event.res, **event.fields}


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)
