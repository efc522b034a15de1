"""Writes events: one file a process, one write a line."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexfloor.events.event import plain
from flexfloor.events.names import EVENT_NAMES


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
            line = json.dumps(record, allow_nan=False, default=plain) + "\n"
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
