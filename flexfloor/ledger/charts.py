"""The figures of the HTML page: rank timeline, Q and E bars, response lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from flexfloor.ledger.aggregate import StepEntry
from flexfloor.ledger.run import RunLedger
from flexfloor.ledger.timeline import (
    FREE,
    GENERATING,
    LEAVING,
    RETURNING,
    SILENT,
    STATES,
    WAITING,
    WINDING_UP,
    lay_out,
)

RUN, BASELINE = "#2f5d8a", "#b9c2cc"
COLOURS = {
    GENERATING: "#2f5d8a",
    WAITING: "#e0a33a",
    LEAVING: "#a65e9a",
    FREE: "#cfe8d5",
    RETURNING: "#c8553d",
    WINDING_UP: "#8d99a6",
    SILENT: "#5a7fa3",
}
INK, GRID = "#1f2933", "#e4e7eb"
_ROW = 26


def timeline(entries: Sequence[StepEntry], span: float | None = None) -> go.Figure:
    """Ranks over the glued windows of one seed.

    Args:
        entries: steps of one seed in order of time.
        span: length of the axis (seconds), so that two runs can be drawn at one scale.
    """
    frames, segments, ranks = lay_out(entries)
    figure = go.Figure()
    for state in STATES:
        own = [segment for segment in segments if segment.state == state]
        if own:
            figure.add_bar(
                orientation="h",
                name=state,
                y=[segment.rank for segment in own],
                x=[segment.end - segment.start for segment in own],
                base=[segment.start for segment in own],
                marker={"color": COLOURS[state], "line": {"width": 0}},
                customdata=[[str(s.step), s.at, s.at + s.end - s.start, s.end - s.start] for s in own],
                hovertemplate="%{y}: "
                + state
                + "<br>%{customdata[1]:.3f} to %{customdata[2]:.3f} s of %{customdata[0]}"
                + "<br>%{customdata[3]:.3f} s<extra></extra>",
            )
    end = max(frame.end for frame in frames)
    for frame in frames:
        named = ((f"e{frame.step.epoch}", frame.step.epoch), (f"s{frame.step.step}", frame.step.step))
        short = " ".join(name for name, value in named if value is not None)
        if len(frames) > 1:
            figure.add_vrect(x0=frame.start, x1=frame.end, fillcolor="#f5f7fa", line_width=0, layer="below")
        if short and (frame.end - frame.start) > 0.03 * end:
            middle = (frame.start + frame.end) / 2
            figure.add_annotation(x=middle, y=1, yref="paper", yanchor="bottom", text=short, showarrow=False)
    figure.update_layout(
        **_layout(height=72 + _ROW * len(ranks), margin={"l": 70, "r": 16, "t": 26, "b": 44}),
        barmode="overlay",
        bargap=0.22,
        showlegend=False,
    )
    figure.update_xaxes(title="rollout time, windows glued (s)", range=[0, span or end], showgrid=True, gridcolor=GRID)
    figure.update_yaxes(
        categoryorder="array", categoryarray=ranks[::-1], ticklabelstandoff=6, range=[-0.6, len(ranks) - 0.4]
    )
    return figure


def glued_seconds(entries: Sequence[StepEntry]) -> float:
    """Length of the glued axis of one seed (seconds)."""
    return max(frame.end for frame in lay_out(entries)[0])


def throughput_bars(run: RunLedger, baseline: RunLedger | None) -> go.Figure:
    """Mean Q with its sample SD over seeds."""
    ledgers = [ledger for ledger in (run, baseline) if ledger]
    values = [ledger.totals.throughput for ledger in ledgers]
    spread = [ledger.totals.throughput_sd or 0.0 for ledger in ledgers]
    return _bars("Q = W / T", "response tokens / s", ledgers, values, (spread, spread))


def efficiency_bars(run: RunLedger, baseline: RunLedger | None) -> go.Figure:
    """Midpoints of mean E; whiskers are the clock's bounds, or the sample SD where there are several seeds."""
    ledgers = [ledger for ledger in (run, baseline) if ledger]
    bounds = [ledger.totals.efficiency for ledger in ledgers]
    values = [bound.mid for bound in bounds]
    deviations = [ledger.totals.efficiency_sd for ledger in ledgers]
    up = [b.hi - b.mid if sd is None else sd for b, sd in zip(bounds, deviations, strict=True)]
    down = [b.mid - b.lo if sd is None else sd for b, sd in zip(bounds, deviations, strict=True)]
    return _bars("E = W / H", "response tokens / rank-s", ledgers, values, (up, down))


def length_histogram(run: RunLedger, baseline: RunLedger | None) -> go.Figure | None:
    """Response lengths; None where neither run folder holds any."""
    figure = go.Figure()
    longest = max((max(ledger.lengths, default=0) for ledger in (run, baseline) if ledger), default=0)
    bins = {"start": 0, "end": longest + 1, "size": max(1, -(-(longest + 1) // 30))}
    for ledger, colour in ((baseline, BASELINE), (run, RUN)):
        if ledger and ledger.lengths:
            figure.add_histogram(
                x=list(ledger.lengths), name=ledger.name, marker_color=colour, xbins=bins, opacity=0.85
            )
    if not figure.data:
        return None
    figure.update_layout(**_layout(height=300, title="Response lengths"), barmode="overlay", bargap=0.06)
    figure.update_layout(showlegend=len(figure.data) > 1, legend={"x": 1, "xanchor": "right", "y": 1, "yanchor": "top"})
    figure.update_xaxes(title="tokens", showgrid=False, range=[0, longest + bins["size"]])
    figure.update_yaxes(title="responses", gridcolor=GRID)
    return figure


def _bars(
    title: str, unit: str, ledgers: list[RunLedger], values: list[float], whiskers: tuple[list[float], list[float]]
) -> go.Figure:
    up, down = whiskers
    figure = go.Figure(
        go.Bar(
            x=[ledger.name for ledger in ledgers],
            y=values,
            marker_color=[RUN, BASELINE][: len(ledgers)],
            error_y={
                "type": "data",
                "array": up,
                "arrayminus": down,
                "color": INK,
                "thickness": 1.2,
                "width": 5,
                "visible": any(up),
            },
            text=[f"{value:,.{1 if value >= 100 else 2}f}" for value in values],
            textposition="inside",
            insidetextanchor="middle",
            width=0.55,
            hovertemplate="%{x}: %{y:,.3f} " + unit + "<extra></extra>",
        )
    )
    figure.update_layout(**_layout(height=300, title=title), showlegend=False)
    figure.update_xaxes(type="category")
    figure.update_yaxes(
        title=unit, gridcolor=GRID, range=[0, 1.1 * max(v + w for v, w in zip(values, up, strict=True)) or 1]
    )
    return figure


def _layout(height: int, title: str = "", margin: dict[str, int] | None = None) -> dict[str, Any]:
    return {
        "height": height,
        "title": {"text": title, "font": {"size": 14}, "x": 0.02, "xanchor": "left"} if title else None,
        "margin": margin or {"l": 60, "r": 16, "t": 44, "b": 44},
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
        "plot_bgcolor": "white",
        "paper_bgcolor": "white",
        "hoverlabel": {"font": {"family": "system-ui, sans-serif"}},
    }
