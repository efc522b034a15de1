"""FlexFloor's figures of one step as a flat dict for verl's logger (console, TensorBoard, wandb).

All values are numbers, since TensorBoard takes nothing else; the reasons of skipped transitions are counted by their
text in the key and printed once. E and what derives from it come as bounds, lo and hi: clock resolution, not
confidence.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from flexfloor.errors import InputError
from flexfloor.events import Event, EventLog, parse_event
from flexfloor.ledger import account
from flexfloor.ledger.run import RunLedger

PREFIX = "flexfloor"


class EventTail:
    """Reads what event files grew since the last look.

    Args:
        folder: of the event files.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._offsets: dict[Path, int] = {}
        self._lines: dict[Path, int] = {}

    def skip(self) -> None:
        """Leaves out what is there now (an earlier run's)."""
        for path in self._folder.glob("*.jsonl"):
            data = path.read_bytes()
            self._offsets[path], self._lines[path] = len(data), data.count(b"\n")

    def read(self) -> list[Event]:
        """Whole new lines, in file order."""
        import json

        found: list[Event] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            for line in whole.splitlines():
                number = self._lines[path] = self._lines.get(path, 0) + 1
                found.append(parse_event(json.loads(line), file=path, line=number))
        return found


def step_metrics(events: list[Event], epoch: int, step: int) -> dict[str, float]:
    """Figures of one finished step; empty where its window is not whole."""
    own = [event for event in events if (event.epoch, event.step) == (epoch, step)]
    try:
        ledger = account(EventLog(own, []))
    except InputError:
        return {}
    return {f"{PREFIX}/{name}": float(value) for name, value in _figures(ledger, own).items()}


def _figures(ledger: RunLedger, events: list[Event]) -> dict[str, float]:
    entry, totals = ledger.entries[-1], ledger.totals.seeds[-1]
    step = entry.occupancy
    ladders = [event.fields["ladder"] for event in events if event.event == "plan_installed"]
    reached = [int(event.fields["to"]) for event in events if event.event == "stage_commit"]
    world = max((int(ladder[0]) for ladder in ladders), default=step.log.world_size)
    found: dict[str, float] = {
        "throughput_q": totals.throughput,
        "efficiency_e/lo": totals.efficiency.lo,
        "efficiency_e/hi": totals.efficiency.hi,
        "occupied_rank_seconds/lo": step.occupied.lo,
        "occupied_rank_seconds/hi": step.occupied.hi,
        "released_rank_seconds/lo": step.free.lo,
        "released_rank_seconds/hi": step.free.hi,
        "rollout_seconds": step.log.seconds,
        "response_tokens": step.log.response_tokens,
        "world_size": world,
        "floor_planned": min((int(ladder[-1]) for ladder in ladders), default=world),
        "floor_reached": min(reached, default=world),
        "transitions": len(ledger.transitions),
        "transitions_skipped": len(ledger.skipped),
        "preemptions": entry.preemptions,
        "problems": len(ledger.problems),
    }
    share = totals.dummy_share
    if share is not None:
        found |= {"dummy_share/lo": share.lo, "dummy_share/hi": share.hi}
    if totals.dummy_seconds is not None:
        found["dummy_rank_seconds"] = totals.dummy_seconds
    if totals.waiting is not None:
        found["waiting_rank_seconds"] = totals.waiting
    if totals.reuse is not None:
        found |= {
            "free_between_workers/lo": totals.reuse.inter.lo,
            "free_between_workers/hi": totals.reuse.inter.hi,
            "free_within_workers/lo": totals.reuse.intra.lo,
            "free_within_workers/hi": totals.reuse.intra.hi,
        }
    for reason, count in Counter(skip_reasons(events)).items():
        found[f"skipped/{reason}"] = count
    return found


def skip_reasons(events: list[Event]) -> list[str]:
    """Reason of each abandoned transition, as a word for a metric's name."""
    reasons = [str(event.fields.get("reason", "unknown")) for event in events if event.event == "plan_skipped"]
    return [re.sub(r"[^a-z0-9]+", "_", re.sub(r", attempt.*", "", reason).lower()).strip("_") for reason in reasons]
