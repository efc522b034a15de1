"""Comparisons and sweeps as one self-contained page: works from a file, without network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io

from flexfloor.errors import InputError
from flexfloor.ledger.html import SCRIPT, STYLE
from flexfloor.simulate.compare import HEADS, Arm, Comparison, arm_cells
from flexfloor.simulate.sweep import VARIABLES, SweepResult

COLOURS = {"verl": "#8d99a6", "ls_tg": "#e0a33a", "fixed": "#a65e9a", "minskew": "#5a9367", "flex": "#2f5d8a"}
INK, GRID = "#1f2933", "#e4e7eb"


def write_page(
    path: str | Path, *, comparison: Comparison | None, sweeps: Sequence[SweepResult], lead: str, notes: Sequence[str]
) -> None:
    """Writes the page.

    Args:
        path: where to.
        comparison: arms to draw as bars, if any.
        sweeps: sweeps to draw as curves.
        lead: one line under the title.
        notes: what is assumed.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        Path(path).write_text(page(comparison, sweeps, lead, notes), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written ({error.strerror}); name a writable place", file=path) from error


def page(comparison: Comparison | None, sweeps: Sequence[SweepResult], lead: str, notes: Sequence[str]) -> str:
    """The page as text; plotly's script stands inside of it."""
    body = [f'<h1>Simulated rollouts</h1><p class="lead">{escape(lead)}</p>']
    if comparison is not None:
        body.append(_section("Methods", _row([_bars(comparison, "Q"), _bars(comparison, "E")]) + _table(comparison)))
    for swept in sweeps:
        name = swept.sweep.variable
        charts = [
            _curves(swept, "Throughput Q against verl", _q_gain, percent=True),
            _curves(swept, "Efficiency E against verl", _e_gain, percent=True),
            _curves(swept, "Rollout time T (s)", lambda arm: arm.ledger.totals.window_seconds),
            _curves(swept, "Occupied rank-time H (rank-s)", lambda arm: arm.ledger.totals.occupied.mid),
        ]
        told = "".join(f'<p class="note">{escape(note)}</p>' for note in swept.notes)
        body.append(_section(f"{name}: {VARIABLES[name]}", _row(charts[:2]) + _row(charts[2:]) + told))
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    body.append(_section("Assumed, not measured here", f"<ul>{listed}</ul>"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Simulated rollouts</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style>'
        f"<script>{plotly.offline.get_plotlyjs()}</script></head><body><main>{''.join(body)}</main>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _q_gain(arm: Arm) -> float:
    return arm.gains.throughput if arm.gains else 0.0


def _e_gain(arm: Arm) -> float:
    return arm.gains.efficiency.mid if arm.gains else 0.0


def _curves(swept: SweepResult, title: str, value: Any, *, percent: bool = False) -> go.Figure:
    figure = go.Figure()
    x = [float(one) for one in swept.sweep.values]
    for name in [arm.name for arm in swept.points[0].arms]:
        y = [value(next(arm for arm in point.arms if arm.name == name)) for point in swept.points]
        colour = COLOURS.get(name, "#2f5d8a")
        figure.add_scatter(x=x, y=y, name=name, mode="lines+markers", line={"color": colour, "width": 2})
    log = swept.sweep.variable != "mu"
    figure.update_xaxes(title=VARIABLES[swept.sweep.variable], gridcolor=GRID, tickvals=x, type="log" if log else None)
    figure.update_xaxes(ticktext=[f"{one:g}" for one in x])
    figure.update_yaxes(gridcolor=GRID, zerolinecolor=GRID, tickformat="+.0%" if percent else None)
    figure.update_layout(**_layout(title), legend={"orientation": "h", "y": -0.28})
    return figure


def _bars(comparison: Comparison, figure_of: str) -> go.Figure:
    arms, totals = comparison.arms, [arm.ledger.totals for arm in comparison.arms]
    efficient = figure_of == "E"
    values = [t.efficiency.mid if efficient else t.throughput for t in totals]
    spread = [(t.efficiency_sd if efficient else t.throughput_sd) or 0.0 for t in totals]
    gains = [(_e_gain(arm) if efficient else _q_gain(arm)) if arm.gains else None for arm in arms]
    figure = go.Figure()
    figure.add_bar(
        x=[arm.name for arm in arms],
        y=values,
        text=["" if gain is None else f"{gain:+.1%}" for gain in gains],
        textposition="outside",
        cliponaxis=False,
        error_y={"type": "data", "array": spread, "visible": any(spread)},
        marker={"color": [COLOURS.get(arm.run.config.method, "#b9c2cc") for arm in arms]},
    )
    figure.update_xaxes(tickangle=-30)
    figure.update_yaxes(gridcolor=GRID)
    figure.update_layout(**_layout("E = W / H (tokens/rank-s)" if efficient else "Q = W / T (tokens/s)"))
    return figure


def _layout(title: str) -> dict[str, Any]:
    return {
        "title": {"text": title, "font": {"size": 14}},
        "height": 320,
        "margin": {"l": 56, "r": 12, "t": 40, "b": 56},
        "font": {"color": INK, "size": 12},
        "plot_bgcolor": "#fff",
        "paper_bgcolor": "#fff",
    }


def _row(figures: Sequence[go.Figure]) -> str:
    config = {"displaylogo": False, "responsive": True, "displayModeBar": False}
    drawn = [plotly.io.to_html(figure, include_plotlyjs=False, full_html=False, config=config) for figure in figures]
    columns = f"grid-template-columns:repeat({len(drawn)},minmax(0,1fr))"
    return f'<div class="row" style="{columns}">{"".join(f"<div>{one}</div>" for one in drawn)}</div>'


def _table(comparison: Comparison) -> str:
    heads = "".join(f"<th{_right(i)}>{escape(head)}</th>" for i, head in enumerate(HEADS))
    rows = [
        "".join(f"<td{_right(i)}>{escape(cell)}</td>" for i, cell in enumerate(arm_cells(arm)))
        for arm in comparison.arms
    ]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{heads}</tr>{body}</table></div>'


def _right(column: int) -> str:
    return ' class="number"' if column else ""


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"
