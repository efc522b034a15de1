"""Small logs for the tests of the ledger, written in one line each."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flexfloor.events import Event, EventLog
from flexfloor.ledger.occupancy import StepOccupancy, step_occupancy
from flexfloor.ledger.run import RunLedger, account
from flexfloor.ledger.windows import split_windows

DATA = Path(__file__).parent / "data" / "ledger"
HEAD = ("seed", "epoch", "step", "replica", "run", "file", "line")


def ev(t: float, event: str, rank: int | None = None, res: float = 0.0, **fields: Any) -> Event:
    """One event of seed 0, epoch 1, step 0; ``from_`` is the field ``from``."""
    head = {"run": "r", "seed": 0, "epoch": 1, "step": 0, **{k: fields.pop(k) for k in HEAD if k in fields}}
    own = {name.rstrip("_"): value for name, value in fields.items()}
    return Event(t=float(t), event=event, res=res, rank=rank, fields=own, **head)


def window(end: float = 100.0, world: int = 4, tokens: int = 7000, start: float = 0.0, **head: Any) -> list[Event]:
    """A rollout from ``start`` to ``end``."""
    closing = {"response_tokens": tokens, "world_size": world}
    return [ev(start, "rollout_start", **head), ev(end, "rollout_end", **closing, **head)]


def leave(rank: int, detach: float, sleep: float, back: float | None = None, **head: Any) -> list[Event]:
    """A rank that leaves and, where ``back`` is given, returns in one second."""
    found = [ev(detach, "detach_end", rank, **head), ev(sleep, "sleep_end", rank, **head)]
    if back is not None:
        found += [ev(back, "restore_start", rank, **head), ev(back + 1, "restore_end", rank, duration=1.0, **head)]
    return found


def worked() -> list[Event]:
    """The worked case of the ledger's specification."""
    return [
        *window(),
        ev(40, "detach_end", 1),
        ev(42, "sleep_end", 1, res=1.0),
        ev(95, "restore_end", 1, res=1.0, duration=3.0, duration_res=0.1),
        ev(60, "detach_end", 3),
        ev(61, "sleep_end", 3),
        ev(90, "restore_start", 3),
    ]


def one_step(events: Iterable[Event]) -> StepOccupancy:
    """Occupancy of a log of one step."""
    (step,) = split_windows(events).steps
    return step_occupancy(step)


def ledger(events: Iterable[Event], name: str = "run") -> RunLedger:
    """Account of a log in memory."""
    return account(EventLog(list(events), []), name=name)


def write_log(path: Path, events: Iterable[Event]) -> Path:
    """Write a log file and return its run folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(event.to_json() + "\n" for event in events), encoding="utf-8")
    return path.parent.parent if path.parent.name == "events" else path.parent
