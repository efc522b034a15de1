"""Draws the paper's figure 3 from what the planner really plans, as one SVG.

    python tools/draw_figure3.py --out docs/figures/quorum.svg

Eight prompts of two responses, four ranks, 144 KV tokens a rank, floors 4 and 2. Peaks come from the planner's
admission, the two matchings from its methods ``minskew`` and ``flex``; no number in the drawing is written by hand.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Annotated

import typer

from flexfloor.config import FlexFloorConfig, config_from_mapping
from flexfloor.history import LengthHistory, Observation, replay
from flexfloor.plan import StepPlan
from flexfloor.planner import plan_epoch
from flexfloor.planner.admission import group_peak
from flexfloor.planner.epoch import predict
from flexfloor.planner.step import StepPlanner

LENGTHS = {
    "p0": (21, 19),
    "p1": (22, 4),
    "p2": (47, 7),
    "p3": (50, 39),
    "p4": (52, 48),
    "p5": (60, 16),
    "p6": (73, 68),
    "p7": (93, 16),
}
RANKS, FLOOR, CAPACITY = 4, 2, 144
INK, SOFT, BLUE, AMBER, RED, GREEN = "#1f2933", "#9aa5b1", "#2f5d8a", "#e0a33a", "#c8553d", "#cfe8d5"
WIDTH, LEFT, ROW = 900, 40, 20


def configuration(method: str) -> FlexFloorConfig:
    """The toy world with one planning method."""
    return config_from_mapping(
        {
            "world_size": RANKS,
            "responses_per_prompt": 2,
            "step_prompts": len(LENGTHS),
            "floors": {"natural": [FLOOR, RANKS]},
            "mu": 1,
            "kv": {"block_tokens": 1, "capacity": {"natural": {FLOOR: CAPACITY, RANKS: CAPACITY}}},
            "tail_guard": {"enabled": False},
            "method": method,
        }
    )


def history() -> LengthHistory:
    """The toy lengths as one observed epoch."""
    return replay([Observation(item, 0, 0, lengths) for item, lengths in LENGTHS.items()], 0.3)


def peaks() -> dict[tuple[str, str], int]:
    """Active-token peak of every pair, by the planner's admission."""
    config, known = configuration("flex"), history()
    demand = StepPlanner(config, None).demand(predict(config, known, list(known.items)))
    names = demand.items
    return {
        (names[i], names[j]): group_peak(demand, (i, j)) for i in range(len(names)) for j in range(i + 1, len(names))
    }


class Drawing:
    """SVG elements from top to bottom."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.y = 0.0

    def text(self, x: float, y: float, told: str, *, size: int = 12, colour: str = INK, anchor: str = "start") -> None:
        """One line of text."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{escape(told)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> None:
        """A rectangle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{stroke}"/>'
        )

    def line(self, x: float, y: float, x2: float, y2: float, colour: str = INK, *, dashed: bool = False) -> None:
        """A line."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="1.4"{dash}/>'
        )

    def arrow_down(self, x: float, y: float, length: float, told: str) -> None:
        """An arrow that runs down, with a word beside it."""
        self.line(x, y, x, y + length - 7)
        self.parts.append(f'<path d="M{x - 5:g} {y + length - 8:g} h10 l-5 8 z" fill="{INK}"/>')
        self.text(x + 12, y + length / 2 + 2, told, size=11)

    def svg(self, height: float) -> str:
        """The whole file."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
            f'height="{height:g}" font-family="system-ui, sans-serif">\n'
            '<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(self.parts) + "\n</svg>\n"
        )


def prompts(out: Drawing, top: float) -> float:
    """Panel 1: the prompts; returns where it ends."""
    out.text(LEFT, top, "1  Eight prompts, two responses each (tokens). The longer one is the predicted tail.", size=14)
    scale, y = 6.0, top + 14
    for name, lengths in LENGTHS.items():
        out.text(LEFT, y + 13, name)
        for k, length in enumerate(lengths):
            out.box(LEFT + 30, y + 2 + 8 * k, length * scale, 6, BLUE if k == 0 else SOFT)
        out.text(LEFT + 38 + max(lengths) * scale, y + 13, f"{lengths[0]}, {lengths[1]}", size=11)
        y += ROW
    return y


def admission(out: Drawing, top: float) -> float:
    """Panel 2: the active-token peak of every pair."""
    found = peaks()
    refused = sum(peak > CAPACITY for peak in found.values())
    told = f"2  Active-token peak of each pair; {refused} of {len(found)} exceed {CAPACITY} and may not share a rank."
    out.text(LEFT, top, told, size=14)
    cell, names = 46, list(LENGTHS)
    y = top + 12
    for column, name in enumerate(names[1:], start=1):
        out.text(LEFT + 30 + cell * (column - 1) + cell / 2, y + 12, name, anchor="middle")
    for row, first in enumerate(names[:-1]):
        line = y + 18 + ROW * row
        out.text(LEFT, line + 14, first)
        for column, second in enumerate(names[1:], start=1):
            if column <= row:
                continue
            x, peak = LEFT + 30 + cell * (column - 1), found[first, second]
            bad = peak > CAPACITY
            out.box(x + 1, line + 1, cell - 2, ROW - 2, RED if bad else "#eef2f6")
            out.text(x + cell / 2, line + 14, str(peak), size=11, colour="#fff" if bad else INK, anchor="middle")
    return y + 18 + ROW * (len(names) - 1)


def matching(out: Drawing, x: float, top: float, title: str, step: StepPlan) -> float:
    """Panel 3, one half: the ranks of a plan, its quorum and what is released."""
    out.text(x, top, title, size=14)
    scale, y = 3.0, top + 16
    left = x + 74
    ranks = sorted(step.ranks, key=lambda entry: entry.completion)
    quorum = step.quorum_times[0]
    for place, entry in enumerate(ranks):
        line = y + 26 * place
        out.text(x, line + 14, " + ".join(entry.items))
        if place < RANKS - FLOOR:
            out.box(left + float(quorum) * scale, line, float(step.tail - quorum) * scale, 20, GREEN)
        out.box(left, line, float(entry.completion) * scale, 20, BLUE)
        if entry.completion < quorum and place < RANKS - FLOOR:
            out.box(left + entry.completion * scale, line, float(quorum - entry.completion) * scale, 20, AMBER)
        out.text(
            left + entry.completion * scale - 4,
            line + 14,
            f"{entry.completion:g}",
            size=11,
            colour="#fff",
            anchor="end",
        )
    bottom = y + 26 * RANKS
    at = left + float(quorum) * scale
    out.line(at, y - 6, at, bottom + 2, INK, dashed=True)
    out.text(at, bottom + 16, f"quorum of {RANKS - FLOOR} at {quorum:g}", anchor="middle")
    area = f"released: {RANKS - FLOOR} x ({step.tail:g} - {quorum:g}) = {step.release_area:g} rank-tokens"
    out.text(x, bottom + 38, area, size=13)
    return bottom + 44


def drawing() -> str:
    """The figure."""
    out = Drawing()
    skew, flex = (plan_epoch(configuration(method), history()).steps[0] for method in ("minskew", "flex"))
    end = prompts(out, 26)
    out.arrow_down(
        LEFT + 60, end + 6, 30, "admission: peak of a pair = max over tau of tau x (responses of at least tau)"
    )
    end = admission(out, end + 60)
    out.arrow_down(LEFT + 60, end + 6, 30, "matching on the pairs that are left")
    top = end + 60
    half = LEFT + (WIDTH - LEFT) / 2
    end = matching(out, LEFT, top, "3  Least total skew (method minskew)", skew)
    matching(out, half, top, "4  Earliest quorum (method flex)", flex)
    out.box(LEFT, end + 8, 12, 12, BLUE)
    out.text(LEFT + 18, end + 18, "generating", size=11)
    out.box(LEFT + 100, end + 8, 12, 12, AMBER)
    out.text(LEFT + 118, end + 18, "complete, waits for the quorum", size=11)
    out.box(LEFT + 310, end + 8, 12, 12, GREEN)
    out.text(LEFT + 328, end + 18, "released", size=11)
    return out.svg(end + 34)


def main(out: Annotated[Path, typer.Option(help="Where the SVG goes.")]) -> None:
    """Draw figure 3."""
    out.write_text(drawing(), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
