"""A run folder, read and accounted for: steps, checks, transitions, totals."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from flexfloor.errors import InputError
from flexfloor.events import EventLog, read_events
from flexfloor.ledger.aggregate import StepEntry, Totals, pool_seeds
from flexfloor.ledger.figures import step_figures
from flexfloor.ledger.occupancy import StepOccupancy, step_occupancy
from flexfloor.ledger.records import RunRecords, StepResponses, read_records
from flexfloor.ledger.reuse import step_reuse
from flexfloor.ledger.transitions import Transition, step_transitions
from flexfloor.ledger.validate import Finding, check_step, response_count
from flexfloor.ledger.windows import split_windows


@dataclass(frozen=True)
class RunLedger:
    """The account of one run.

    Attributes:
        name: name to print, the last part of its folder.
        entries: its steps in order of time.
        totals: its seeds.
        findings: outcome of every check in every step.
        transitions: its committed transitions in order of time.
        problems: failures of checks and of the log, one line each.
        lengths: response lengths where the folder holds them (tokens).
        notes: lines to print under the table.
        skipped: transitions that were abandoned, and why.
        faults: faults that the log names.
    """

    name: str
    entries: tuple[StepEntry, ...]
    totals: Totals
    findings: tuple[Finding, ...]
    transitions: tuple[Transition, ...]
    problems: tuple[str, ...]
    lengths: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


def load_run(run_dir: str | Path) -> RunLedger:
    """Read and account for ``RUN_DIR``: its events, and responses.jsonl, lengths.jsonl and notes.txt where present.

    Raises:
        InputError: nothing to report on, or a malformed file; names file, line and field.
    """
    root = Path(run_dir)
    log, records = read_events(root), read_records(root)
    notes = root / "notes.txt"
    lines = notes.read_text(encoding="utf-8", errors="replace").splitlines() if notes.is_file() else []
    ledger = account(log, records, name=root.resolve().name)
    return replace(ledger, notes=tuple(line.strip() for line in lines if line.strip()))


def account(log: EventLog, records: RunRecords | None = None, *, name: str = "run") -> RunLedger:
    """Account for a log held in memory (the simulator's, for one).

    Raises:
        InputError: no finished rollout in the log.
    """
    records = records or RunRecords()
    windows = split_windows(log.events)
    if not windows.steps:
        raise InputError(
            "no finished rollout: no rollout_start is followed by its rollout_end; nothing to report", file=name
        )
    steps = [step_occupancy(window) for window in windows.steps]
    for seed in {step.log.key.seed for step in steps}:
        if not sum(step.log.seconds for step in steps if step.log.key.seed == seed) > 0:
            raise InputError(f"the rollouts of seed {seed} last no time; check the clock of the log", file=name)
    saved = [_saved(step, steps, records) for step in steps]
    entries = tuple(_entry(step, own) for step, own in zip(steps, saved, strict=True))
    findings = [f for step, own in zip(steps, saved, strict=True) for f in check_step(step, own)]
    failures = [line for finding in findings for line in finding.problems]
    epochs = {step.log.key.epoch for step in steps}
    lengths = [n for own in saved if own for n in own.lengths]
    lengths = lengths or [n for epoch, own in records.lengths.items() if epoch in epochs for n in own]
    return RunLedger(
        name=name,
        entries=entries,
        totals=pool_seeds(entries, _cap_hits(saved, records, epochs)),
        findings=tuple(findings),
        transitions=tuple(t for step in steps for t in step_transitions(step)),
        problems=(*log.problems, *records.problems, *windows.problems, *failures),
        lengths=tuple(lengths),
        skipped=tuple(line for entry in entries for line in entry.figures.skipped),
        faults=tuple(line for entry in entries for line in entry.figures.faults),
    )


def _entry(step: StepOccupancy, saved: StepResponses | None) -> StepEntry:
    figures = step_figures(step)
    return StepEntry(
        occupancy=step,
        figures=figures,
        responses=response_count(step, saved),
        preemptions=max(figures.preemptions, saved.preemptions if saved else 0),
        reuse=step_reuse(step),
    )


def _saved(step: StepOccupancy, steps: list[StepOccupancy], records: RunRecords) -> StepResponses | None:
    """Saved responses of a step; they name epoch and step alone, so only where these tell steps apart."""
    key = step.log.key
    if records.steps is None or key.epoch is None or key.step is None:
        return None
    named = Counter((other.log.key.epoch, other.log.key.step) for other in steps)
    return records.steps.get((key.epoch, key.step), StepResponses()) if named[key.epoch, key.step] == 1 else None


def _cap_hits(
    saved: list[StepResponses | None], records: RunRecords, epochs: set[int | None]
) -> tuple[int, int] | None:
    if records.censored is None or any(own is None for own in saved):
        return None
    short = sum(count for epoch, count in records.censored.items() if epoch in epochs)
    stopped = sum(own.stopped_by_length for own in saved if own)
    return short, max(0, stopped - short)
