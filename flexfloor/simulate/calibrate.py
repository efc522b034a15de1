"""Costs from a real run: step times by (EP size, batch) and transition parts, out of RUN_DIR alone.

The log does not hold step times. But the saved responses tell how many tokens each rank generated for each of them, so
`batching` tells what every iteration held, and ``local_complete`` and ``stage_commit`` tell when certain iterations
were over. Each pair of neighbouring marks gives one equation

    seconds between = sum over the iterations between of t(EP size, batch)  [+ start, once a step]

and t, piecewise linear and never falling in the batch, minimises the sum of the absolute errors (each over the square
root of its iterations). Absolute errors let single stalls of a busy machine pass. The first mark of a step follows its
prefill, so ``start`` is installation and prefill together. The batch is the largest of the world's ranks or the mean
over its members, whichever leaves the smaller errors.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flexfloor.config import FlexFloorConfig, load_config
from flexfloor.errors import InputError
from flexfloor.events import PARTS, Event, read_events
from flexfloor.history import read_lengths
from flexfloor.ledger.windows import StepLog, split_windows
from flexfloor.simulate.batching import RankTrace, Request, run_rank
from flexfloor.simulate.costs import Costs, Load, ResidencyCosts, ShrinkCosts
from flexfloor.simulate.fitting import LOADS, Floats, Interval, Knot, fitted
from flexfloor.simulate.run import limits_of
from flexfloor.step_times import Row, StepTimes

NO_PREFILL = 1e12
CLEARLY = 0.95
"""The mean batch is taken where its errors are below this share of those with the largest batch."""


@dataclass(frozen=True)
class Calibration:
    """What a run tells.

    Attributes:
        table: step times.
        costs: everything else; what the run did not show stays 0.
        knots: the table with its evidence.
        equations: intervals between marks that were used.
        unknowns: step times and start time that were fitted to them.
        explained: predicted seconds over measured seconds of all intervals.
        error: median of the absolute relative errors of the intervals.
        notes: what the run does not tell.
    """

    table: StepTimes
    costs: Costs
    knots: tuple[Knot, ...]
    equations: int
    unknowns: int
    explained: float
    error: float
    notes: tuple[str, ...]


class _Response(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    item_id: str
    epoch: int = Field(ge=0)
    step: int = Field(ge=0)
    sample: int = Field(ge=0)
    rank: int = Field(ge=0)
    token_ids: list[int] = Field(min_length=1)


def calibrate(run_dir: str | Path) -> Calibration:
    """Step times and transition costs from a run folder.

    Raises:
        InputError: the folder lacks what the equations need; says what.
    """
    root = Path(run_dir)
    log = read_events(root)
    for name, why in (
        ("responses.jsonl", "without the tokens of each response nobody knows how many steps a rank made"),
        ("config.yaml", "it says how requests are batched"),
        ("lengths.jsonl", "it holds the prompts' lengths"),
    ):
        if not (root / name).is_file():
            raise InputError(f"has no {name}: {why}; calibrate from a RUN_DIR of `flexfloor rollout`", file=root)
    config = load_config(root / "config.yaml")
    prompts = {(seen.item_id, seen.epoch): seen.prompt_tokens for seen in read_lengths(root / "lengths.jsonl")}
    requests = _requests(root / "responses.jsonl", prompts)
    steps = split_windows(log.events).steps
    notes: list[str] = list(log.problems)
    intervals: list[Interval] = []
    for step in steps:
        key = (step.key.epoch or 0, step.key.step or 0)
        if key not in requests:
            notes.append(f"{step.key}: no saved responses; left out")
            continue
        intervals += _intervals(step, requests[key], config, notes)
    if not intervals:
        told = "; ".join(dict.fromkeys(notes)) or "no local_complete event"
        raise InputError(f"does not carry enough to calibrate step times: {told}", file=root)
    fits = {load: fitted(intervals, load) for load in LOADS}
    load: Load = "mean" if fits["mean"].miss < CLEARLY * fits["largest"].miss else "largest"
    knots, start, errors = fits[load].knots, fits[load].start, fits[load].errors
    predicted = sum(interval.seconds + error for interval, error in zip(intervals, errors, strict=True))
    unknowns = len(knots) + 1
    largest, mean = (fits[one].miss / max(1e-12, sum(i.seconds for i in intervals)) for one in LOADS)
    notes.append(
        f"a step is charged for the {load} batch of its ranks: absolute errors sum up to {largest:.1%} of the time "
        f"with the largest, {mean:.1%} with the mean"
    )
    if len(intervals) < unknowns:
        notes.append(
            f"{len(intervals)} intervals for {unknowns} unknown times: the table is not determined by this run alone; "
            "use a longer one"
        )
    table = StepTimes([Row(k.ep, k.batch, k.seconds) for k in knots], root.name)
    for ep in table.sizes:
        own = [knot for knot in knots if knot.ep == ep]
        if len(own) == 1:
            notes.append(f"EP {ep}: one batch only ({own[0].batch}) was seen, the table is flat there")
    relative = [abs(e) / i.seconds for i, e in zip(intervals, errors, strict=True) if i.seconds > 0]
    return Calibration(
        table,
        transition_costs(steps, config, table, start, notes).model_copy(update={"load": load}),
        tuple(knots),
        len(intervals),
        unknowns,
        predicted / sum(interval.seconds for interval in intervals),
        statistics.median(relative),
        tuple(dict.fromkeys(notes)),
    )


def _requests(path: Path, prompts: dict[tuple[str, int], int]) -> dict[tuple[int, int], dict[int, list[Request]]]:
    """By (epoch, step) and rank, in the order in which the driver sends them: by item, then by sample."""
    lines: dict[tuple[int, int], list[_Response]] = defaultdict(list)
    raw = path.read_bytes().split(b"\n")
    for number, text in enumerate(raw, 1):
        if not text.strip():
            continue
        try:
            line = _Response.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            if first["type"] == "json_invalid" and number == len(raw):
                continue
            where = ".".join(map(str, first["loc"])) or None
            raise InputError(first["msg"], file=path, line=number, field=where) from None
        lines[line.epoch, line.step].append(line)
    found: dict[tuple[int, int], dict[int, list[Request]]] = {}
    for key, own in lines.items():
        by_rank = found.setdefault(key, {})
        for line in sorted(own, key=lambda line: (line.rank, line.item_id, line.sample)):
            tokens = prompts.get((line.item_id, line.epoch), 1)
            by_rank.setdefault(line.rank, []).append(Request(line.item_id, tokens, len(line.token_ids)))
    return found


def _intervals(
    step: StepLog, requests: dict[int, list[Request]], config: FlexFloorConfig, notes: list[str]
) -> list[Interval]:
    """The step's marks in pairs, with the iterations between them by (EP size, largest batch)."""
    limits = limits_of(config, config.capacity.get(step.world_size))
    traces = {rank: run_rank(own, limits) for rank, own in requests.items()}
    if any(trace.preemptions for trace in traces.values()) or step.named("preemption"):
        notes.append(f"{step.key}: requests were preempted, its iterations are not known for certain; left out")
        return []
    if step.named("fault", "plan_skipped") or len(step.named("restore_start")) > step.world_size:
        notes.append(f"{step.key}: faults, abandoned transitions or a restore in mid-rollout; left out")
        return []
    completed = {event.rank: event.t for event in step.named("local_complete")}
    lacking = [rank for rank in traces if rank not in completed]
    if lacking:
        notes.append(f"{step.key}: rank {lacking[0]} logs no local_complete; left out")
        return []
    marks = sorted((completed[rank], trace.end) for rank, trace in traces.items())
    if any(late < early for (_, early), (_, late) in pairwise(marks)):
        notes.append(f"{step.key}: ranks complete in another order than their tokens tell; left out")
        return []
    switches = _switches(step, marks)
    largest, total = _batches(list(traces.values()))
    found: list[Interval] = []
    size, at, since = step.world_size, 0, step.start
    for moment, end in marks:
        for commit, reached in switches:
            if commit.t <= moment and at <= reached and commit.fields["from"] == size:
                size, at, since = int(commit.fields["to"]), reached + 1, commit.t
        if end > at:
            inside = {"largest": largest[at:end], "mean": total[at:end] / size}
            counts = {load: _counted(size, inside[load]) for load in LOADS}
            found.append(Interval(moment - since, at == 0, counts))
        at, since = end, moment
    return [interval for interval in found if interval.iterations and interval.seconds > 0]


def _switches(step: StepLog, marks: Sequence[tuple[float, int]]) -> list[tuple[Event, int]]:
    """Commits in order, each with the iterations that were over when the ranks agreed on it."""
    seen: dict[int, Event] = {}
    for event in step.named("stage_commit"):
        seen.setdefault(int(event.fields["to"]), event)
    found = []
    for event in seen.values():
        agreed = event.t - float(event.fields.get("first_step", 0.0))
        known = max((end for moment, end in marks if moment <= agreed), default=0)
        found.append((event, int(event.fields.get("iterations", known))))
    return found


def _batches(traces: Sequence[RankTrace]) -> tuple[Floats, Floats]:
    """Largest and summed decode batch over the ranks in each iteration; 0 where all of them prefill."""
    largest = np.zeros(max(trace.end for trace in traces))
    total = np.zeros(len(largest))
    for trace in traces:
        for phase in trace.phases:
            inside = slice(phase.start, phase.end)
            np.maximum(largest[inside], phase.decode, out=largest[inside])
            total[inside] += phase.decode
    return largest, total


def _counted(size: int, batches: Floats) -> dict[tuple[int, float], int]:
    values, counts = np.unique(batches[batches > 0], return_counts=True)
    return {(size, value): count for value, count in zip(values.tolist(), counts.tolist(), strict=True)}


def transition_costs(
    steps: Sequence[StepLog], config: FlexFloorConfig, table: StepTimes, start: float, notes: list[str]
) -> Costs:
    """Medians of what a log says of shrinks, sleeps, restores and the end of a step.

    Args:
        steps: the steps of the log.
        config: the run's configuration.
        table: its step times: what the first step in a new world takes beyond them is a cost.
        start: seconds from rollout_start to the first step.
        notes: what the log does not tell is added here.
    """
    parts: dict[str, list[float]] = defaultdict(list)
    rest: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        opened = {event.rank: event.t for event in step.named("detach_start")}
        left = {event.rank: event.t for event in step.named("detach_end")}
        for event in step.named("stage_commit"):
            told = {name: float(event.fields[name]) for name in PARTS if name in event.fields}
            first = told.pop("first_step", 0.0)
            told.pop("vote", None)  # counted with all that lies between the parts
            for name, seconds in told.items():
                parts[name].append(seconds)
            survivors = event.fields.get("survivors", ())
            begun = [t for rank, t in opened.items() if rank not in survivors and t < event.t]
            if begun:
                parts["unnamed"].append(max(0.0, event.t - first - max(begun) - sum(told.values())))
            ep = int(event.fields["to"])
            if ep in table.sizes:
                rest["first_step_extra"].append(max(0.0, first - table.curve(ep, extrapolate=True).seconds(1)))
        rest["sleep_s"] += [e.t - left[e.rank] for e in step.named("sleep_end") if e.rank in left]
        begin, end = (step.named(name) for name in ("restore_start", "restore_end"))
        asleep = max((e.t for e in step.named("sleep_end")), default=0.0)
        over = max((e.t for e in [*end, *step.named("generation_end")]), default=step.end)
        if begin and end:
            opened_at = min(e.t for e in begin)
            settled = max(asleep, opened_at)
            waited = max(float(e.fields.get("restore_wake", 0.0)) for e in end)
            leads = [max(0.0, settled - e.t) for e in step.named("wake_start")]
            if leads:
                rest["wake_s"].append(max(leads) + waited)
            rest["restore_s"].append(max(e.t for e in end) - settled - waited)
        rest["finish_s"].append(step.end - over)
    median = {name: statistics.median(values) for name, values in rest.items() if values}
    if not parts:
        notes.append("the run holds no transition: shrinks cost nothing in costs.yaml; calibrate from an elastic run")
    named = {name: statistics.median(values) for name, values in parts.items() if values}
    kept = {name: named[name] for name in ShrinkCosts.model_fields if name in named}
    kept["switch"] = named.get("switch", 0.0) + named.get("unnamed", 0.0)
    shrink = ShrinkCosts.model_validate({**kept, "first_step_extra": median.pop("first_step_extra", 0.0)})
    return Costs(
        prefill_tokens_per_s=NO_PREFILL,
        pad_to_captures=not config.engine.enforce_eager and bool(table.rows) and _captures(steps),
        start_s=start,
        natural=ResidencyCosts(shrink=shrink),
        planned=ResidencyCosts(shrink=shrink),
        notes=("calibrated from a run; start_s holds installation and the first prefill, later prefills are free",),
        **{name: max(0.0, value) for name, value in median.items()},
    )


def _captures(steps: Sequence[StepLog]) -> bool:
    return any(event.fields["full"] for step in steps for event in step.named("decode_audit"))


def save_report(found: Calibration, path: str | Path) -> None:
    """Writes the evidence as JSON."""
    data = {
        "knots": [vars(knot) for knot in found.knots],
        "equations": found.equations,
        "unknowns": found.unknowns,
        "explained": found.explained,
        "median_error": found.error,
        "notes": list(found.notes),
    }
    Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
