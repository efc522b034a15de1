"""Runs a calibration on engines and writes what it found (the points and the arithmetic are in `calibration`).

OUT/step_times.csv    decode step times, for `rate.table` and `flexfloor simulate --table`
OUT/costs.yaml        everything else that takes time, for `flexfloor simulate --costs`
OUT/capacity.yaml     KV tokens a rank by floor, to be copied into the `flexfloor:` section
OUT/calibration.json  every single measurement
OUT/events/, OUT/logs/
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flexfloor.config import FlexFloorConfig
from flexfloor.driver.calibration import Findings, Grid, Point, Room, order_of, points, rounds, step_seconds
from flexfloor.driver.checks import ModelFacts
from flexfloor.driver.handles import Server
from flexfloor.driver.orders import Response
from flexfloor.driver.rollout import logged_step
from flexfloor.driver.room import kv_tokens
from flexfloor.errors import InputError
from flexfloor.events import Event, EventWriter, read_events
from flexfloor.ledger.windows import StepLog, split_windows
from flexfloor.simulate.calibrate import transition_costs
from flexfloor.simulate.costs import Costs, save_costs
from flexfloor.step_times import StepTimes

RUN = "calibration"

Started = Callable[[int], tuple[Server, list[dict[str, Any]]]]
"""Starts engines with expert rows for a floor; the server and each rank's status."""


class Watcher:
    """Learns how a calibration goes on; the base class keeps quiet."""

    def planned(self, steps: int) -> None:
        """So many steps will be run."""

    def measured(self, point: Point) -> None:
        """One of them is done."""

    def observe(self, progress: Any) -> None:
        """Several times a second."""


@dataclass(frozen=True)
class Calibrated:
    """What a calibration found.

    Attributes:
        table: decode step times.
        costs: everything else.
        capacity: KV tokens a rank by floor, for the configured residency.
        findings: all measurements.
        notes: what was left out or should be known.
    """

    table: StepTimes
    costs: Costs
    capacity: dict[int, int]
    findings: Findings
    notes: tuple[str, ...] = field(default=())


def capacities(sizes: tuple[int, ...], start: Started) -> dict[int, int]:
    """KV tokens a rank when the engines hold the expert rows of each floor, where these cannot change: a start each."""
    found: dict[int, int] = {}
    for floor in sorted(sizes, reverse=True):
        server, statuses = start(floor)
        try:
            found[floor] = kv_tokens(statuses)
        finally:
            server.close()
    return found


class Campaign:
    """Step times and transition costs of started engines, round by round or all at once.

    Args:
        server: a started server whose rows suffice for the smallest floor.
        statuses: what its start returned.
        config: the configuration.
        model: the model's facts.
        grid: what is measured.
        events_dir: existing folder of the event files.
        watcher: learns how it goes on.

    Raises:
        InputError: no point of the grid can be measured on these engines.
    """

    def __init__(
        self,
        server: Server,
        statuses: list[dict[str, Any]],
        config: FlexFloorConfig,
        model: ModelFacts,
        grid: Grid,
        events_dir: Path,
        watcher: Watcher,
    ) -> None:
        self._server, self._config, self._grid, self._watcher = server, config, grid, watcher
        self._notes: list[str] = []
        self._room = Room.of(config, kv_tokens(statuses), model.positions, model.vocabulary)
        self.wanted = points(config, grid, self._room, self._notes)
        if not any(point.kind == "decode" for point in self.wanted):
            raise InputError(self._notes[0] if self._notes else "no batch to measure", field="batches")
        self._rounds = rounds(self.wanted, grid)
        self._events_dir = events_dir
        self._visited: list[Point] = []
        self._answers: dict[int, list[Response]] = {}

    def run(self) -> Calibrated:
        """All rounds of the grid, one after another.

        Raises:
            InputError: no point has an answer.
            EngineLostError, TransitionError, RefusedError: see `Server.run_step`.
        """
        self._watcher.planned(len(self.wanted) * (1 + self._grid.rounds))
        self.warm_up()
        for _ in range(self._grid.rounds):
            self.round()
        return self.conclude()

    def warm_up(self) -> None:
        """Visits every point once and forgets the answers: kernels, groups and graphs are made at the first visit."""
        self._visit(self.wanted, keep=False)

    def round(self) -> None:
        """Visits every point once."""
        self._visit(next(self._rounds), keep=True)

    def _visit(self, order: Sequence[Point], *, keep: bool) -> None:
        events = EventWriter(self._events_dir / "driver.jsonl", run=RUN)
        try:
            for point in order:
                index = len(self._visited)
                step = order_of(point, index, self._config, self._grid, self._room, str(self._events_dir))
                responses = logged_step(step, self._server, events, self._watcher.observe)
                self._visited.append(point)
                if keep:
                    self._answers[index] = responses
                self._watcher.measured(point)
        finally:
            events.close()

    def conclude(self) -> Calibrated:
        """Tables and costs from all rounds so far.

        Raises:
            InputError: no point has an answer.
        """
        notes, config = list(self._notes), self._config
        log: dict[int | None, list[Event]] = defaultdict(list)
        for event in read_events(self._events_dir.parent).events:
            log[event.step].append(event)
        findings = Findings()
        for index, responses in self._answers.items():
            _note(findings, self._visited[index], config.world_size, responses, log[index])
        lost = sorted({p for p in self.wanted if p.kind != "prefill" and not findings.seconds.get(p)})
        notes += [
            f"EP {p.ep}, batch {p.batch} ({p.kind}): too few steps fell into the window; raise --tokens" for p in lost
        ]
        if not findings.measured("decode"):
            raise InputError("too few steps to measure any point; raise it", field="tokens")
        steps = split_windows(event for index in self._answers for event in log[index]).steps
        return _concluded(findings, config, self._grid, self._room, steps, notes)


def _note(findings: Findings, point: Point, world_size: int, responses: list[Response], log: list[Event]) -> None:
    if point.kind == "prefill":
        began = min(event.t for event in log if event.event == "rollout_start")
        findings.first_token[point].append(max(response.times[0] for response in responses) - began)
        return
    commits = [event.t for event in log if event.event == "stage_commit"]
    if point.ep < world_size and not commits:
        return
    most = max(response.request.max_tokens for response in responses)
    busy = [response for response in responses if response.request.max_tokens == most]
    seconds = step_seconds(busy, max(commits, default=0.0))
    if seconds is not None:
        findings.seconds[point].append(seconds)


def _concluded(
    findings: Findings, config: FlexFloorConfig, grid: Grid, room: Room, steps: list[StepLog], notes: list[str]
) -> Calibrated:
    load = findings.load()
    table = findings.table(load, grid, room, "calibration")
    rate, start = findings.prefill(table, config.world_size)
    costs = transition_costs(steps, config, table, start, notes)
    if rate is None:
        notes.append("prefill was not seen to take time; later prefills are free in costs.yaml")
    changed: dict[str, Any] = {
        "load": load,
        "notes": ("measured by flexfloor calibrate; start_s holds installation, without the first prefill",),
    }
    if rate is not None:
        changed["prefill_tokens_per_s"] = rate
    spreads = [findings.spread(point) for point in findings.measured("decode")]
    notes.append(
        f"a step is charged for the {load} batch of its ranks; between rounds a step time moved by up to "
        f"{max(spreads) - 1:.0%}, {statistics.median(spreads) - 1:.0%} at the median point"
    )
    return Calibrated(table, costs.model_copy(update=changed), {}, findings, tuple(dict.fromkeys(notes)))


def save(found: Calibrated, out: Path, residency: str, model: str) -> list[Path]:
    """Writes the files named in the module's text, but for events and logs; returns their paths.

    Raises:
        InputError: a file cannot be written.
    """
    paths = [out / name for name in ("step_times.csv", "costs.yaml", "capacity.yaml", "calibration.json")]
    found.table.save(paths[0], [f"measured by flexfloor calibrate on {model}"])
    save_costs(found.costs, paths[1])
    capacity = {"kv": {"capacity": {residency: found.capacity}}}
    try:
        if found.capacity:
            paths[2].write_text(yaml.safe_dump({"flexfloor": capacity}, sort_keys=False), encoding="utf-8")
        else:
            paths.pop(2)
        paths[-1].write_text(json.dumps(evidence(found), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written ({error.strerror}); name a writable place", file=out) from error
    return paths


def evidence(found: Calibrated) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "step_times": [
            {**point._asdict(), "seconds": answers} for point, answers in sorted(found.findings.seconds.items())
        ],
        "first_token": [
            {**point._asdict(), "seconds": answers} for point, answers in sorted(found.findings.first_token.items())
        ],
        "capacity": found.capacity,
        "costs": found.costs.model_dump(mode="json"),
        "notes": list(found.notes),
    }
