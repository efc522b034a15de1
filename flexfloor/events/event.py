"""One line of a log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HEADER = ("t", "res", "run", "seed", "epoch", "step", "rank", "replica", "host", "event")


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
        return json.dumps({**kept, **self.fields}, allow_nan=False, default=plain)


def plain(value: Any) -> Any:
    """What JSON can hold of an array, an array scalar or a set."""
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot stand in an event")
