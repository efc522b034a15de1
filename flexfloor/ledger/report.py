"""The report for machines: a JSON object whose top-level keys are stable.

Bounds are ``[lo, hi]`` at full precision and are clock resolution, not confidence. A value that the log has no
evidence for is null.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict
from typing import Any

from flexfloor.ledger.aggregate import Gains, SeedTotals, StepEntry, compare
from flexfloor.ledger.bounds import Bounds
from flexfloor.ledger.run import RunLedger
from flexfloor.ledger.validate import CHECKS, Status


def report_json(run: RunLedger, baseline: RunLedger | None = None) -> dict[str, Any]:
    """The report of a run, beside a baseline where one is given.

    Throughput and efficiency are means over seeds (tokens/s, tokens/rank-s); window_seconds, response_tokens,
    occupied_rank_seconds, preemptions, decode and dummy_seconds are sums over them. ``gains`` is empty without a
    baseline.
    """
    totals = run.totals
    gains = compare(totals, baseline.totals) if baseline else None
    report = {
        "window_seconds": totals.window_seconds,
        "response_tokens": totals.response_tokens,
        "ranks": totals.ranks,
        "occupied_rank_seconds": totals.occupied,
        "throughput": totals.throughput,
        "efficiency": totals.efficiency,
        "preemptions": sum(seed.preemptions for seed in totals.seeds),
        "decode": {
            "full": known_sum([seed.decode_full for seed in totals.seeds]),
            "eager": known_sum([seed.decode_eager for seed in totals.seeds]),
        },
        "dummy_seconds": known_sum([seed.dummy_seconds for seed in totals.seeds]),
        "transitions": [transition.to_json() for transition in run.transitions],
        "per_seed": [_seed_json(run, seed) for seed in totals.seeds],
        "gains": _gains_json(gains, baseline) if gains and baseline else {},
        "problems": all_problems(run, baseline, gains),
    }
    plain: dict[str, Any] = _plain(report)
    return plain


def all_problems(run: RunLedger, baseline: RunLedger | None = None, gains: Gains | None = None) -> list[str]:
    """Problems of a run, of its baseline (named as such) and of their comparison, one line each."""
    theirs = [f"baseline {baseline.name}: {line}" for line in baseline.problems] if baseline else []
    return [*run.problems, *theirs, *(gains.problems if gains else [])]


def check_statuses(run: RunLedger, seed: int | None = None) -> dict[str, tuple[Status, str]]:
    """Outcome of each check over all steps (of a seed): failed before ok before not checked, and a short reason."""
    by_check: dict[str, list[tuple[Status, str]]] = defaultdict(list)
    for finding in run.findings:
        if seed is None or finding.key.seed == seed:
            outcome = finding.outcome
            reason = f"{len(outcome.failures)} found" if outcome.failures else outcome.unchecked
            by_check[finding.check].append((outcome.status, reason))
    return {check: _worst(by_check[check]) for check in CHECKS}


def known_sum(values: list[Any]) -> Any:
    """Sum of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _worst(outcomes: list[tuple[Status, str]]) -> tuple[Status, str]:
    of: dict[Status, list[str]] = {"failed": [], "ok": [], "not checked": []}
    for status, reason in outcomes:
        of[status].append(reason)
    if of["failed"]:
        return "failed", f"in {len(of['failed'])} of {len(outcomes)} steps"
    reasons = list(dict.fromkeys(of["not checked"]))
    told = reasons[0] if reasons else ""
    if of["ok"]:
        return "ok", f"not checked in {len(of['not checked'])} of {len(outcomes)} steps: {told}" if reasons else ""
    return "not checked", told


def _seed_json(run: RunLedger, seed: SeedTotals) -> dict[str, Any]:
    entries = [entry for entry in run.entries if entry.occupancy.log.key.seed == seed.seed]
    return {
        "seed": seed.seed,
        "epochs": list(seed.epochs),
        "window_seconds": seed.window_seconds,
        "response_tokens": seed.response_tokens,
        "responses": seed.responses,
        "occupied_rank_seconds": seed.occupied,
        "throughput": seed.throughput,
        "efficiency": seed.efficiency,
        "mean_occupied_ranks": seed.mean_occupied_ranks,
        "cost": seed.cost,
        "mean_length": seed.mean_length,
        "cap_hits": dict(zip(("short", "global"), seed.cap_hits, strict=True)) if seed.cap_hits else None,
        "preemptions": seed.preemptions,
        "decode": {"full": seed.decode_full, "eager": seed.decode_eager},
        "dummy_seconds": seed.dummy_seconds,
        "dummy_share": seed.dummy_share,
        "waiting_rank_seconds": seed.waiting,
        "exit_proxy_rank_seconds": seed.exit_proxy,
        "reuse": {"inter": seed.reuse.inter, "intra": seed.reuse.intra} if seed.reuse else None,
        "checks": {check: status for check, (status, _) in check_statuses(run, seed.seed).items()},
        "steps": [_step_json(entry) for entry in entries],
    }


def _step_json(entry: StepEntry) -> dict[str, Any]:
    step = entry.occupancy
    return {
        "epoch": step.log.key.epoch,
        "step": step.log.key.step,
        "window_seconds": step.log.seconds,
        "response_tokens": step.log.response_tokens,
        "ranks": step.log.world_size,
        "occupied_rank_seconds": step.occupied,
        "free_rank_seconds": step.free,
    }


def _gains_json(gains: Gains, baseline: RunLedger) -> dict[str, Any]:
    return {
        "baseline": baseline.name,
        "throughput": gains.throughput,
        "efficiency": gains.efficiency,
        "cost": gains.cost,
        "matched_work": not gains.problems,
        "response_tokens": [{"seed": seed, "run": run, "baseline": base} for seed, (run, base) in gains.work.items()],
        "baseline_figures": {
            "window_seconds": baseline.totals.window_seconds,
            "response_tokens": baseline.totals.response_tokens,
            "occupied_rank_seconds": baseline.totals.occupied,
            "throughput": baseline.totals.throughput,
            "efficiency": baseline.totals.efficiency,
        },
        "paired": {name: asdict(difference) for name, difference in gains.paired.items()},
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Bounds):
        return [_plain(end) for end in value.as_list()]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
