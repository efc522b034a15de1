"""The report as one self-contained page: works from a file, without network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import plotly.io
from plotly.graph_objects import Figure

from flexfloor.ledger.aggregate import Gains, StepEntry, compare
from flexfloor.ledger.cells import (
    BOUNDS_NOTE,
    LISTED,
    SUMMARY_HEADS,
    TRANSITION_HEADS,
    figure_rows,
    gain_cells,
    summary_cells,
    transition_cells,
)
from flexfloor.ledger.charts import (
    COLOURS,
    efficiency_bars,
    glued_seconds,
    length_histogram,
    throughput_bars,
    timeline,
)
from flexfloor.ledger.report import all_problems, check_statuses
from flexfloor.ledger.run import RunLedger
from flexfloor.ledger.validate import CHECKS

STYLE = """
:root { --ink:#1f2933; --soft:#5f6c7b; --line:#e4e7eb; --run:#2f5d8a; }
* { box-sizing:border-box; }
body { margin:0; background:#f5f7fa; color:var(--ink); font:14px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif; }
main { max-width:1180px; margin:0 auto; padding:28px 20px 60px; }
h1 { font-size:22px; margin:0 0 2px; } h2 { font-size:15px; margin:0 0 10px; }
p.lead { color:var(--soft); margin:0 0 18px; }
section { background:#fff; border:1px solid var(--line); border-radius:8px; padding:16px 18px; margin:0 0 16px; }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(210px,1fr)); gap:12px; margin:0 0 16px; }
.tile { background:#fff; border:1px solid var(--line); border-radius:8px; padding:12px 16px; }
.tile .name { color:var(--soft); font-size:12px; }
.tile .value { font-size:16px; font-weight:600; color:var(--run); }
.tile .unit { color:var(--soft); font-size:12px; }
.row { display:grid; gap:8px; }
@media (max-width:800px) { .row { grid-template-columns:minmax(0,1fr) !important; } }
.scroll { overflow-x:auto; }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums; }
th { text-align:left; color:var(--soft); font-weight:500; font-size:12px; }
th,td { padding:5px 10px 5px 0; border-bottom:1px solid var(--line); vertical-align:top; }
tr:last-child td { border-bottom:0; }
.number { text-align:right; } .number,.short { white-space:nowrap; } .strong td { font-weight:600; }
.ok { color:#2b7a4b; } .failed { color:#b42318; font-weight:600; } .unchecked { color:#8a6d1a; }
.row > div { min-width:0; } h3 { font-size:13px; font-weight:600; margin:6px 0 0; }
.legend { display:flex; flex-wrap:wrap; gap:4px 16px; margin:10px 0 0; font-size:12px; }
.legend i { display:inline-block; width:11px; height:11px; margin-right:6px; border-radius:2px; }
details { margin:10px 0 0; } summary { cursor:pointer; color:var(--run); }
.note { color:var(--soft); margin:8px 0 12px; } ul { margin:0; padding-left:18px; }
"""


SCRIPT = """
const fit = part => part.querySelectorAll(".plotly-graph-div").forEach(chart => {
  if (chart.offsetParent) Plotly.Plots.resize(chart);
});
document.querySelectorAll("details").forEach(fold => fold.addEventListener("toggle", () => fit(fold)));
window.addEventListener("load", () => fit(document));
"""


def write_html(
    run: RunLedger, path: str | Path, *, baseline: RunLedger | None = None, notes: Sequence[str] = ()
) -> None:
    """Write the page of a run, beside a baseline where one is given."""
    Path(path).write_text(page(run, baseline, notes), encoding="utf-8")


def page(run: RunLedger, baseline: RunLedger | None = None, notes: Sequence[str] = ()) -> str:
    """The page as text; plotly's script stands inside of it."""
    gains = compare(run.totals, baseline.totals) if baseline else None
    title = f"Rollout ledger: {run.name}" + (f" against {baseline.name}" if baseline else "")
    theirs = [f"baseline: {line}" for line in baseline.notes if line not in run.notes] if baseline else []
    lines = list(dict.fromkeys([*notes, *run.notes, *theirs]))
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{_lead(run)}</p>',
        _tiles(run, baseline, gains),
        _notes(lines),
        _timelines(run, baseline),
        _section("Throughput, efficiency, lengths", _charts(run, baseline)),
        _section("Figures", _figures(run, baseline, gains)),
        _transitions(run),
        _section("Checks", _checks(run, gains)),
        _problems(run, baseline, gains),
    ]
    script = plotly.offline.get_plotlyjs()
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style>'
        f"<script>{script}</script></head><body><main>{''.join(body)}</main><script>{SCRIPT}</script></body></html>\n"
    )


def _notes(lines: Sequence[str]) -> str:
    """One or two notes as they are; more of them as a list of their own."""
    if len(lines) <= 2:
        return "".join(f'<p class="note">{escape(line)}</p>' for line in lines)
    return _section("Notes", f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>")


def _lead(run: RunLedger) -> str:
    seeds, steps, ranks = len(run.totals.seeds), len(run.entries), run.totals.ranks
    counts = ((ranks, "rank"), (steps, "step"), (seeds, "seed"))
    told = ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for count, name in counts)
    return f"{told}. {escape(BOUNDS_NOTE)}"


def _tiles(run: RunLedger, baseline: RunLedger | None, gains: Gains | None) -> str:
    cells = gain_cells(run.totals, baseline.totals, gains) if baseline and gains else {}
    shown = ("Throughput Q", "Efficiency E", "Occupied rank-time H", "Mean occupied ranks", "Response tokens W")
    tiles = [
        f'<div class="tile"><div class="name">{escape(name)}</div><div class="value">{escape(value)}</div>'
        f'<div class="unit">{escape(unit)}{" · " + escape(cells[name]) if name in cells else ""}</div></div>'
        for name, unit, value in figure_rows(run.totals)
        if name in shown
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _timelines(run: RunLedger, baseline: RunLedger | None) -> str:
    parts: list[str] = []
    for seed in run.totals.seeds:
        own = _of_seed(run, seed.seed)
        theirs = _of_seed(baseline, seed.seed) if baseline else []
        span = max(glued_seconds(entries) for entries in (own, theirs) if entries)
        charts = f"<h3>{escape(run.name)}</h3>{_chart(timeline(own, span))}"
        if theirs and baseline:
            charts += f"<h3>{escape(baseline.name)}</h3>{_chart(timeline(theirs, span))}"
        several = len(run.totals.seeds) > 1
        parts.append(_folded(f"seed {seed.seed}", charts, unfolded=not parts) if several else charts)
    chips = "".join(
        f'<span><i style="background:{colour}"></i>{escape(state)}</span>' for state, colour in COLOURS.items()
    )
    told = "Drag to zoom, double-click to go back. Free is what is free for certain."
    hint = f'<div class="legend">{chips}</div><p class="note">{told}</p>'
    return _section("Ranks over time", "".join(parts) + hint)


def _charts(run: RunLedger, baseline: RunLedger | None) -> str:
    figures = [throughput_bars(run, baseline), efficiency_bars(run, baseline), length_histogram(run, baseline)]
    drawn = [f"<div>{_chart(figure)}</div>" for figure in figures if figure]
    columns = f"grid-template-columns:repeat({len(drawn)},minmax(0,1fr))"
    return f'<div class="row" style="{columns}">{"".join(drawn)}</div>'


def _figures(run: RunLedger, baseline: RunLedger | None, gains: Gains | None) -> str:
    theirs = {name: value for name, _, value in figure_rows(baseline.totals)} if baseline else {}
    cells = gain_cells(run.totals, baseline.totals, gains) if baseline and gains else {}
    heads = ["Figure", "Unit", run.name, *([f"baseline {baseline.name}", "Run against baseline"] if baseline else [])]
    rows = [
        [name, unit, value, *([theirs.get(name, "-"), cells.get(name, "")] if baseline else [])]
        for name, unit, value in figure_rows(run.totals)
    ]
    return _table(heads, rows, numbers=range(2, len(heads)), strong=range(2))


def _transitions(run: RunLedger) -> str:
    notes = [f"Abandoned: {line}" for line in run.skipped] + [f"Fault: {line}" for line in run.faults]
    listed = f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in notes)}</ul>" if notes else ""
    if not run.transitions:
        return _section("Transitions", listed) if listed else ""
    summary = _table(SUMMARY_HEADS, summary_cells(run.transitions), numbers=(1, 2, 4, 5))
    each = _table(TRANSITION_HEADS, [transition_cells(t) for t in run.transitions], numbers=(3, 4, 6, 7))
    unfolded = len(run.transitions) <= LISTED
    folded = _folded(f"Each of the {len(run.transitions)} transitions", each, unfolded=unfolded)
    return _section("Transitions, milliseconds as median / max", summary + folded + listed)


def _checks(run: RunLedger, gains: Gains | None) -> str:
    rows = [(CHECKS[check][1], status, remark) for check, (status, remark) in check_statuses(run).items()]
    if gains is not None:
        rows.append(("Same work as the baseline", "failed" if gains.problems else "ok", ""))
    classes = {"ok": "ok", "failed": "failed", "not checked": "unchecked"}
    cells = [
        f'<tr><td>{escape(name)}</td><td class="{classes[status]}">{status}</td><td>{escape(remark)}</td></tr>'
        for name, status, remark in rows
    ]
    return f"<table><tr><th>Check</th><th>Status</th><th>Remark</th></tr>{''.join(cells)}</table>"


def _problems(run: RunLedger, baseline: RunLedger | None, gains: Gains | None) -> str:
    problems = all_problems(run, baseline, gains)
    items = "".join(f"<li>{escape(line)}</li>" for line in problems)
    return _section("Problems", f"<ul>{items}</ul>" if items else '<p class="note">None found.</p>')


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[int], strong: Iterable[int] = ()
) -> str:
    right, bold = set(numbers), set(strong)

    def cells(tag: str, values: Sequence[str]) -> str:
        marked = (
            (' class="number"' if i in right else ' class="short"' if len(value) < 24 else "", escape(value))
            for i, value in enumerate(values)
        )
        return "".join(f"<{tag}{mark}>{value}</{tag}>" for mark, value in marked)

    strongly = ' class="strong"'
    lines = [f"<tr{strongly if i in bold else ''}>{cells('td', row)}</tr>" for i, row in enumerate(rows)]
    return f'<div class="scroll"><table><tr>{cells("th", heads)}</tr>{"".join(lines)}</table></div>'


def _folded(title: str, body: str, *, unfolded: bool = False) -> str:
    return f"<details{' open' if unfolded else ''}><summary>{escape(title)}</summary>{body}</details>"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _chart(figure: Figure) -> str:
    config = {"displaylogo": False, "responsive": True, "displayModeBar": False}
    return str(plotly.io.to_html(figure, include_plotlyjs=False, full_html=False, config=config))


def _of_seed(run: RunLedger, seed: int) -> list[StepEntry]:
    return [entry for entry in run.entries if entry.occupancy.log.key.seed == seed]
