"""Reads the logs of a run and checks every line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from flexfloor.errors import InputError
from flexfloor.events.event import HEADER, Event
from flexfloor.events.names import EVENT_NAMES, KINDS


class EventLog(NamedTuple):
    """What ``read_events`` found: the events in file order, and one line for each half-written end that was skipped."""

    events: list[Event]
    problems: list[str]


def read_events(run_dir: str | Path) -> EventLog:
    """Read ``RUN_DIR/events*.jsonl`` and ``RUN_DIR/events/*.jsonl``.

    A half-written last line (a killed process) is reported in ``problems`` and skipped.

    Raises:
        InputError: no such folder, no log in it, or anything else malformed; names file, line and field.
    """
    root = Path(run_dir)
    if not root.is_dir():
        raise InputError("no such run folder; give the RUN_DIR of a rollout", file=root)
    files = sorted([*root.glob("events*.jsonl"), *root.glob("events/*.jsonl")])
    if not files:
        raise InputError("no events*.jsonl and no events/*.jsonl here; give the RUN_DIR of a rollout", file=root)
    problems: list[str] = []
    return EventLog([event for path in files for event in _read_file(path, problems)], problems)


def parse_event(record: Any, *, file: str | Path = "", line: int = 0) -> Event:
    """Check one decoded line and return its event.

    Raises:
        InputError: not an object, an unknown name, or a field that is missing or of the wrong kind.
    """

    def refuse(name: str | None, what: str) -> NoReturn:
        raise InputError(what, file=file or None, line=line or None, field=name)

    def take(source: Mapping[str, Any], name: str, kind: str, *, default: Any = None, needed: bool = False) -> Any:
        value = source.get(name)
        if value is None:
            return refuse(name, f"is missing; give {KINDS[kind][1]}") if needed else default
        accepts, words = KINDS[kind]
        return value if accepts(value) else refuse(name, f"is {value!r:.60}; must be {words}")

    if not isinstance(record, dict):
        refuse(None, "must be one JSON object a line")
    name = take(record, "event", "text", needed=True)
    spec = EVENT_NAMES.get(name)
    if spec is None:
        refuse("event", f"unknown event {name!r:.60}; known: {', '.join(EVENT_NAMES)}")
    for own, kind in spec.required.items():
        take(record, own, kind, needed=True)
    for own, kind in spec.optional.items():
        take(record, own, kind)
    return Event(
        t=float(take(record, "t", "number", needed=True)),
        event=name,
        res=float(take(record, "res", "span", default=0.0)),
        run=take(record, "run", "text", default=""),
        seed=take(record, "seed", "count", default=0),
        epoch=take(record, "epoch", "count"),
        step=take(record, "step", "count"),
        rank=take(record, "rank", "count"),
        replica=take(record, "replica", "count"),
        host=take(record, "host", "text"),
        fields={key: value for key, value in record.items() if key not in HEADER and value is not None},
        file=str(file),
        line=line,
    )


def _read_file(path: Path, problems: list[str]) -> Iterator[Event]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=path) from None
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        try:
            record = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                problems.append(f"{path}:{number}: half-written last line skipped (the process was killed)")
                continue
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise InputError(f"not a JSON line: {why}", file=path, line=number) from None
        yield parse_event(record, file=path, line=number)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")
