"""The report for people: one table, checks, transitions and problems on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flexfloor.ledger.aggregate import Gains, compare
from flexfloor.ledger.cells import (
    BOUNDS_NOTE,
    LISTED,
    NONE,
    SUMMARY_HEADS,
    TRANSITION_HEADS,
    figure_rows,
    gain_cells,
    summary_cells,
    transition_cells,
)
from flexfloor.ledger.report import all_problems, check_statuses
from flexfloor.ledger.run import RunLedger
from flexfloor.ledger.transitions import Transition
from flexfloor.ledger.validate import CHECKS

_STYLES = {"ok": "green", "failed": "bold red", "not checked": "yellow"}


def report_table(run: RunLedger, baseline: RunLedger | None = None, notes: Sequence[str] = ()) -> RenderableType:
    """All that ``flexfloor report`` prints, ready for a rich console."""
    gains = compare(run.totals, baseline.totals) if baseline else None
    parts: list[RenderableType] = [_figures(run, baseline, gains), Text(BOUNDS_NOTE, style="dim")]
    lines = dict.fromkeys([*notes, *run.notes, *(baseline.notes if baseline else ())])
    parts += [Text(f"Note: {line}") for line in lines]
    if len(run.totals.seeds) > 1:
        parts.append(_seeds(run))
    if gains and any(difference.low is not None for difference in gains.paired.values()):
        parts.append(_paired(gains))
    if run.transitions:
        parts += _transitions(run.transitions)
    parts.append(_checks(run, gains))
    parts += [Text(f"Abandoned transition: {line}", style="yellow") for line in run.skipped]
    parts += [Text(f"Fault: {line}", style="red") for line in run.faults]
    problems = all_problems(run, baseline, gains)
    parts += [Text(f"Problem: {line}", style="red") for line in problems]
    return Group(*parts)


def _figures(run: RunLedger, baseline: RunLedger | None, gains: Gains | None) -> Table:
    names = [run.name] if baseline is None else [run.name, f"baseline {baseline.name}"]
    seeds, steps = len(run.totals.seeds), len(run.entries)
    title = f"{steps} {'step' if steps == 1 else 'steps'}, {seeds} {'seed' if seeds == 1 else 'seeds'}"
    table = Table(title=f"Rollout ledger: {escape(run.name)} ({title})", title_justify="left")
    table.add_column("Figure", no_wrap=True)
    table.add_column("Unit", style="dim")
    for name in names:
        table.add_column(escape(name), justify="right")
    rows = figure_rows(run.totals)
    theirs = {name: value for name, _, value in figure_rows(baseline.totals)} if baseline else {}
    cells = gain_cells(run.totals, baseline.totals, gains) if baseline and gains else {}
    if baseline:
        table.add_column("Run against baseline", justify="right")
    for index, (name, unit, value) in enumerate(rows):
        beside = [theirs.get(name, NONE), cells.get(name, "")] if baseline else []
        style = "bold" if index < 2 else None
        table.add_row(
            name, unit, *(escape(cell) for cell in (value, *beside)), style=style, end_section=index in (1, 6)
        )
    return table


def _seeds(run: RunLedger) -> Table:
    table = Table(title="Seeds", title_justify="left")
    for head in ("Seed", "T s", "W tokens", "H rank-s", "Q tokens/s", "E tokens/rank-s"):
        table.add_column(head, justify="right")
    for seed in run.totals.seeds:
        cells = [f"{seed.window_seconds:,.2f}", f"{seed.response_tokens:,}", seed.occupied.text(2)]
        cells += [f"{seed.throughput:,.2f}", seed.efficiency.text(2)]
        table.add_row(str(seed.seed), *map(escape, cells))
    return table


def _paired(gains: Gains) -> Table:
    table = Table(title="Paired differences, run minus baseline, 95 % Student t over seeds", title_justify="left")
    for head in ("Figure", "Seeds", "Mean", "Interval"):
        table.add_column(head, justify="left" if head == "Figure" else "right")
    names = {"window_seconds": "T s", "throughput": "Q tokens/s", "efficiency": "E tokens/rank-s (midpoints)"}
    for name, difference in gains.paired.items():
        low, high = difference.low, difference.high
        interval = NONE if low is None or high is None else f"[{low:+,.2f}, {high:+,.2f}]"
        table.add_row(names[name], str(difference.seeds), f"{difference.mean:+,.2f}", escape(interval))
    return table


def _transitions(transitions: Sequence[Transition]) -> list[Table]:
    summary = Table(title="Transitions, milliseconds as median / max", title_justify="left")
    for head in SUMMARY_HEADS:
        summary.add_column(head, justify="left" if head == "ms by part" else "right")
    for cells in summary_cells(transitions):
        summary.add_row(*cells)
    if len(transitions) > LISTED:
        return [summary]
    table = Table(title="Each transition", title_justify="left")
    for head in TRANSITION_HEADS:
        table.add_column(head, justify="left" if head in ("Step", "Survivors", "ms by part") else "right")
    for transition in transitions:
        table.add_row(*transition_cells(transition))
    return [summary, table]


def _checks(run: RunLedger, gains: Gains | None) -> Table:
    table = Table(title="Checks", title_justify="left")
    for head in ("Check", "Status", "Remark"):
        table.add_column(head)
    for check, (status, remark) in check_statuses(run).items():
        table.add_row(CHECKS[check][1], Text(status, style=_STYLES[status]), escape(remark))
    if gains is not None:
        status = "failed" if gains.problems else "ok"
        remark = f"{len(gains.problems)} found" if gains.problems else ""
        table.add_row("Same work as the baseline", Text(status, style=_STYLES[status]), remark)
    return table
