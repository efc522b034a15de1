"""Figures, gains and transitions in words: what the terminal and the page both print."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from flexfloor.events import PARTS
from flexfloor.ledger.aggregate import Gains, Totals
from flexfloor.ledger.bounds import Bounds, gain
from flexfloor.ledger.report import known_sum
from flexfloor.ledger.reuse import Reuse
from flexfloor.ledger.transitions import Transition

BOUNDS_NOTE = "[lo, hi] is clock resolution, rounded outward; it is not statistical confidence."
NONE = "-"
LISTED = 12
TRANSITION_HEADS = (
    "Step",
    "World",
    "Survivors",
    "At s",
    "Total ms",
    "ms by part",
    "Moved MiB",
    "Released MiB",
)
SUMMARY_HEADS = ("World", "Times", "Total ms", "ms by part", "Moved MiB", "Released MiB")


def figure_rows(totals: Totals) -> list[tuple[str, str, str]]:
    """Figures of one run as (name, unit, value); "-" where the log has no evidence."""
    seeds, bounds = totals.seeds, totals.occupied
    ranks = bounds.scaled(1 / totals.window_seconds)
    responses = known_sum([seed.responses for seed in seeds]) if all(seed.responses for seed in seeds) else None
    dummy = known_sum([seed.dummy_seconds for seed in seeds])
    hits = [seed.cap_hits for seed in seeds]
    full, eager = (known_sum([getattr(seed, name) for seed in seeds]) for name in ("decode_full", "decode_eager"))
    waits = [seed.waiting for seed in seeds]
    rows = [
        ("Throughput Q", "tokens/s", f"{totals.throughput:,.2f}{_sd(totals.throughput_sd)}"),
        ("Efficiency E", "tokens/rank-s", f"{totals.efficiency.text(2)}{_sd(totals.efficiency_sd)}"),
        ("Response tokens W", "tokens", f"{totals.response_tokens:,}"),
        ("Rollout time T", "s", f"{totals.window_seconds:,.2f}"),
        ("Occupied rank-time H", "rank-s", bounds.text(2 if bounds.lo < 1e4 else 1)),
        ("Mean occupied ranks", f"of {totals.ranks}", ranks.text(2)),
        ("Cost", "rank-s/1M tokens", totals.cost.scaled(1e6).text(1) if totals.cost else NONE),
        ("Responses", "", _count(responses)),
        ("Mean length", "tokens", f"{totals.response_tokens / responses:,.1f}" if responses else NONE),
        ("Cap hits, short / global", "responses", _hits(hits)),
        ("Preemptions", "", f"{sum(seed.preemptions for seed in seeds):,}"),
        ("Decode audits, full / eager", "iterations", f"{full:,} / {eager:,}" if full is not None else NONE),
        ("Dummy steps", "rank-s", _dummy(dummy, bounds)),
        ("Completion-to-exit waiting", "rank-s", NONE if None in waits else f"{known_sum(waits):,.2f}"),
        ("Exit proxy (not part of H)", "rank-s", _seconds(known_sum([seed.exit_proxy for seed in seeds]))),
    ]
    return rows + _reuse_rows([seed.reuse for seed in seeds])


def gain_cells(run: Totals, baseline: Totals, gains: Gains) -> dict[str, str]:
    """Gain of a run over its baseline for the figures that have one; W's difference stands beside them."""
    unequal = run.response_tokens - baseline.response_tokens
    work = f"{unequal / baseline.response_tokens:+.2%}" if baseline.response_tokens else "no work in baseline"
    return {
        "Throughput Q": f"{gains.throughput:+.2%}",
        "Efficiency E": _percent(gains.efficiency),
        "Response tokens W": "equal" if not gains.problems and not unequal else f"unequal: {work}",
        "Rollout time T": f"{run.window_seconds / baseline.window_seconds - 1:+.2%}",
        "Occupied rank-time H": _percent(gain(run.occupied, baseline.occupied)),
        "Cost": _percent(gains.cost) if gains.cost else NONE,
    }


SHOWN_S = 5e-5
"""Shorter parts of a transition are not shown."""


def transition_cells(transition: Transition) -> list[str]:
    """Step, from and to, survivors, time of commit, milliseconds by part, MiB moved and released."""
    parts = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in transition.seconds.items() if seconds >= SHOWN_S)
    survivors = NONE if transition.survivors is None else ", ".join(map(str, transition.survivors))
    replica = "" if transition.replica is None else f" replica {transition.replica}"
    return [
        f"{transition.key}{replica}",
        f"{transition.before} \u2192 {transition.after}",
        survivors,
        f"{transition.at:.3f}",
        NONE if transition.total_seconds is None else _ms(transition.total_seconds),
        parts or NONE,
        _mebibytes(transition.moved_bytes),
        _mebibytes(transition.released_bytes),
    ]


def summary_cells(transitions: Sequence[Transition]) -> list[list[str]]:
    """One row a pair of world sizes: how often, milliseconds as median / max (in all and by part), MiB in all."""
    worlds: dict[tuple[int, int], list[Transition]] = defaultdict(list)
    for transition in transitions:
        worlds[transition.before, transition.after].append(transition)
    return [
        [
            f"{before} \u2192 {after}",
            str(len(own)),
            _median_max([t.total_seconds for t in own]),
            ", ".join(
                f"{part} {_median_max([t.seconds.get(part) for t in own])}"
                for part in PARTS
                if any(t.seconds.get(part, 0.0) >= SHOWN_S for t in own)
            )
            or NONE,
            _mebibytes(known_sum([t.moved_bytes for t in own])),
            _mebibytes(known_sum([t.released_bytes for t in own])),
        ]
        for (before, after), own in sorted(worlds.items(), reverse=True)
    ]


def _reuse_rows(reuse: Sequence[Reuse | None]) -> list[tuple[str, str, str]]:
    known = [item for item in reuse if item is not None]
    if not known or len(known) < len(reuse):
        return []
    total = known[0]
    for item in known[1:]:
        total += item
    return [
        ("Free between workers", "rank-s", total.inter.text(2)),
        ("Free inside unfinished workers", "rank-s", total.intra.text(2)),
        ("Free, both", "rank-s", (total.inter + total.intra).text(2)),
    ]


def _sd(value: float | None) -> str:
    return "" if value is None else f" \u00b1 {value:,.2f}"


def _percent(bounds: Bounds) -> str:
    out = bounds.scaled(100).outward(2)
    return f"[{out.lo:+,.2f}%, {out.hi:+,.2f}%]"


def _count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def _seconds(value: float | None) -> str:
    return NONE if value is None else f"{value:,.2f}"


def _hits(hits: Sequence[tuple[int, int] | None]) -> str:
    known = [hit for hit in hits if hit is not None]
    if not known or len(known) < len(hits):
        return NONE
    return f"{sum(short for short, _ in known):,} / {sum(whole for _, whole in known):,}"


def _dummy(seconds: float | None, occupied: Bounds) -> str:
    if seconds is None:
        return NONE
    share = occupied.dividing(seconds).scaled(100)
    return f"{seconds:,.2f} ({share.mid:.1f}% of H)"


def _mebibytes(value: int | None) -> str:
    return NONE if value is None else f"{value / 2**20:,.2f}"


def _median_max(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{_ms(statistics.median(known))} / {_ms(max(known))}" if known else NONE


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"
