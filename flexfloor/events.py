"""One event, its writer and its reader: all that engine, driver, simulator and ledger share.

A log is JSON lines, append-only, one file a process, flushed at each line::

    {"t": 12.5, "res": 1e-06, "run": "r", "seed": 0, "epoch": 1, "step": 0, "rank": 3, "event": "detach_end"}

An event stamped ``t`` with resolution ``res`` happened in ``[t, t + res]`` (seconds, one clock for all processes of
a host). ``rank`` is null for the driver; ``replica`` and ``host`` may stand on every event. Further fields lie flat
beside these. Source: seed 001 section 5.2 and appendix C.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from flexfloor.errors import InputError

HEADER = ("t", "res", "run", "seed", "epoch", "step", "rank", "replica", "host", "event")

Check = Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_span(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(_is_count(item) for item in value)


def _is_expected(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(str(key).isdigit() and _is_count(item) for key, item in value.items())
    return _is_count(value) or _is_counts(value)


def _is_cap_hits(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_count(value.get(key)) for key in ("short", "global"))


KINDS: Mapping[str, tuple[Check, str]] = {
    "count": (_is_count, "a whole number of at least 0"),
    "span": (_is_span, "a finite number of at least 0"),
    "number": (_is_number, "a finite number"),
    "text": (_is_text, "a string"),
    "counts": (_is_counts, "a list of whole numbers of at least 0"),
    "expected": (_is_expected, "a list of counts, one a rank, or a map of rank to count, or this rank's count"),
    "cap_hits": (_is_cap_hits, 'an object with whole numbers "short" and "global"'),
}


class EventSpec(NamedTuple):
    """Fields of one event name, each mapped to a kind in ``KINDS``; fields that are not named are kept unchecked."""

    required: Mapping[str, str] = {}
    optional: Mapping[str, str] = {}


PARTS = ("agree", "prepare", "channel", "move", "groups", "switch", "capture", "trial", "vote", "first_step")
_LASTED = {"duration": "span", "duration_res": "span"}

EVENT_NAMES: Mapping[str, EventSpec] = {
    "rollout_start": EventSpec({}, {"world_size": "count"}),
    "rollout_end": EventSpec(
        {"response_tokens": "count", "world_size": "count"}, {"responses": "count", "cap_hits": "cap_hits"}
    ),
    "plan_installed": EventSpec({"ladder": "counts"}, {"expected": "expected", "kv_tokens": "count", "rows": "count"}),
    "generation_end": EventSpec(),
    "local_complete": EventSpec(),
    # One a transition and replica, with PARTS in seconds. Where several ranks state the same commit, the ledger takes
    # the longest of each part and the sum of moved_bytes: each rank states its own.
    "stage_commit": EventSpec(
        {"from": "count", "to": "count"},
        {
            "stage": "count",
            "survivors": "counts",
            "moved_bytes": "count",
            "iterations": "count",
            **dict.fromkeys(PARTS, "span"),
        },
    ),
    # Planned residency: worlds made ready after rollout_start and before the first token (elastic/rehearsal.py).
    "rehearsal": EventSpec(
        {}, {"seconds": "span", "moved_rows": "count", "moved_bytes": "count", "captured": "counts"}
    ),
    "detach_start": EventSpec(),
    "detach_end": EventSpec(),
    "sleep_start": EventSpec({}, {"tag": "text"}),
    "sleep_end": EventSpec({}, {"tag": "text", "released_bytes": "count"}),
    "restore_start": EventSpec(),
    "restore_end": EventSpec({}, _LASTED),
    "wake_start": EventSpec({}, {"tag": "text"}),
    "wake_end": EventSpec({}, {"tag": "text", "kv_tokens": "count", "floor": "count", **_LASTED}),
    "capture_end": EventSpec({}, {"sizes": "counts", "seconds": "span"}),
    "capture_release": EventSpec(),
    # Counts since the rank's previous audit; a leaver states its own before detach_end.
    # graphs: 1 where the engine has captured decode graphs, so that an eager step is a fallback.
    "decode_audit": EventSpec({"full": "count", "eager": "count"}, {"prefill": "count", "graphs": "count"}),
    "dummy_steps": EventSpec({"count": "count", "seconds": "span"}),
    "active_batch": EventSpec({"sizes": "counts"}),
    "preemption": EventSpec({}, {"recomputed_tokens": "count"}),
    "plan_skipped": EventSpec({}, {"stage": "count", "reason": "text"}),
    "sidecar_start": EventSpec(),
    "sidecar_ready": EventSpec(),
    "sidecar_stop": EventSpec(),
    "sidecar_exit": EventSpec(),
    "sidecar_ack": EventSpec(),
    "weights_loaded": EventSpec(),
    "fault": EventSpec({}, {"where": "text", "what": "text"}),
}


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a log.

    Attributes:
        t: earliest time it can have happened (seconds).
        event: a name in ``EVENT_NAMES``.
        res: clock resolution (seconds); the event happened in ``[t, t + res]``.
        run: name of the run.
        seed: seed of the run; 0 where the log names none.
        epoch: epoch, or None outside of a step.
        step: step within the epoch, or None outside of a step.
        rank: rank the event speaks of, or None for the driver.
        replica: rollout replica of the rank, or None.
        host: name of the host, or None.
        fields: the event's own fields.
        file: log file it was read from ("" if made in memory).
        line: 1-based line in ``file``.
    """

    t: float
    event: str
    res: float = 0.0
    run: str = ""
    seed: int = 0
    epoch: int | None = None
    step: int | None = None
    rank: int | None = None
    replica: int | None = None
    host: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""
    line: int = 0

    @property
    def end(self) -> float:
        """Latest time it can have happened (seconds)."""
        return self.t + self.res

    def to_json(self) -> str:
        """The event as one line of a log, without the line feed."""
        head = {name: getattr(self, name) for name in HEADER}
        kept = {name: value for name, value in head.items() if value is not None or name not in ("replica", "host")}
        return json.dumps({**kept, **self.fields}, allow_nan=False, default=_plain)


class EventLog(NamedTuple):
    """What ``read_events`` found: the events in file order, and one line for each half-written end that was skipped."""

    events: list[Event]
    problems: list[str]


class EventWriter:
    """Appends events to one file of one process, each line in a single write; any thread may emit.

    Args:
        path: file to append to; missing folders are made. A half-written last line of an earlier process is cut off.
        run: name of the run.
        rank: rank this process speaks for, None for the driver; ``emit(..., rank=3)`` speaks for another one.
        replica: replica of that rank.
        host: name of the host.
        clock: seconds on a clock shared by all processes of the host.
        res: resolution of ``clock`` (seconds); add a known offset between hosts here.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        run: str,
        rank: int | None = None,
        replica: int | None = None,
        host: str | None = None,
        clock: Callable[[], float] = time.time,
        res: float = 1e-6,
    ) -> None:
        self.path = Path(path)
        self.clock, self.res = clock, res
        self._head: dict[str, Any] = {"run": run, "seed": 0, "epoch": None, "step": None, "rank": rank}
        self._head |= {name: value for name, value in (("replica", replica), ("host", host)) if value is not None}
        self._lock = threading.Lock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o644)
        self._cut_half_line()

    def set_step(self, epoch: int | None, step: int | None, seed: int | None = None) -> None:
        """Events from here on belong to this step; a seed of None keeps the present one."""
        with self._lock:
            self._head |= {"epoch": epoch, "step": step}
            if seed is not None:
                self._head["seed"] = seed

    def emit(
        self,
        event: str,
        *,
        epoch: int | None = None,
        step: int | None = None,
        seed: int | None = None,
        t: float | None = None,
        res: float | None = None,
        **fields: Any,
    ) -> None:
        """Write one event now. ``from_`` is written as ``from``; a given ``rank``, ``replica`` or ``host`` wins.

        Args:
            event: a name in ``EVENT_NAMES``.
            epoch: overrides the epoch of ``set_step``.
            step: overrides the step of ``set_step``.
            seed: overrides the seed of ``set_step``.
            t: time of the event (seconds); the clock's present time where None.
            res: resolution of ``t`` (seconds); the writer's where None.
            **fields: the event's own fields; arrays and array scalars become plain numbers.

        Raises:
            ValueError: unknown name, missing required field, or a number that is not finite.
        """
        stamp = self.clock() if t is None else t
        own = {name.rstrip("_"): value for name, value in fields.items()}
        spec = EVENT_NAMES.get(event)
        missing = sorted(spec.required.keys() - own.keys()) if spec else None
        if missing is None or missing:
            raise ValueError(f"unknown event {event!r}" if missing is None else f"{event} lacks {', '.join(missing)}")
        given = {name: v for name, v in (("epoch", epoch), ("step", step), ("seed", seed)) if v is not None}
        with self._lock:
            if self._fd < 0:
                raise ValueError(f"{self.path} is closed; {event} is lost")
            record = {"t": stamp, "res": self.res if res is None else res, **self._head, **given, "event": event, **own}
            line = json.dumps(record, allow_nan=False, default=_plain) + "\n"
            os.write(self._fd, line.encode())

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _cut_half_line(self) -> None:
        data = self.path.read_bytes()
        if data and not data.endswith(b"\n"):
            os.ftruncate(self._fd, data.rfind(b"\n") + 1)


def event_file(folder: str | Path, rank: int, replica: int = 0) -> Path:
    """The file that a rank of a replica writes its events to."""
    return Path(folder) / (f"replica-{replica}-rank-{rank}.jsonl" if replica else f"rank-{rank}.jsonl")


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


def _plain(value: Any) -> Any:
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot stand in an event")
