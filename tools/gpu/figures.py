"""Figures of a measured run: from its event log, from token times at the client, and from the simulator."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexfloor.driver.calibrate import Calibrated
from flexfloor.driver.orders import Response
from flexfloor.ledger import load_run, report_json
from flexfloor.plan import EpochPlan
from flexfloor.simulate import Machine, simulate_workloads
from gpu.arms import Arm
from gpu.sets import Set


def figures(seconds: float, occupied: float, tokens: int, ranks: int) -> dict[str, float]:
    """T, H, W, Q, E of a run."""
    return {
        "T": seconds,
        "H": occupied,
        "W": tokens,
        "Q": tokens / seconds,
        "E": tokens / occupied,
        "share": occupied / (seconds * ranks),
    }


def measured(folder: Path) -> dict[str, float]:
    """Of a run folder; H is the middle of its bounds."""
    report = report_json(load_run(folder))
    occupied = statistics.mean(report["occupied_rank_seconds"])
    return figures(report["window_seconds"], occupied, report["response_tokens"], report["ranks"])


def foretold(chosen: Set, plan: EpochPlan, found: Calibrated) -> dict[str, float]:
    """By the simulator, from calibration and true lengths."""
    machine = Machine(found.table, found.costs, True)
    report = report_json(simulate_workloads(chosen.config, {0: chosen.truth}, machine, plan=plan).ledger())
    occupied = statistics.mean(report["occupied_rank_seconds"])
    return figures(report["window_seconds"], occupied, report["response_tokens"], report["ranks"])


def transitions(folder: Path, responses: Sequence[Response]) -> dict[str, Any]:
    """Parts of the shrinks in ms, rehearsal, restore, memory given back, graphs: from event log and token times."""
    arm = Arm.of(folder, responses)
    over = max((e["t"] for e in arm.named("generation_end")), default=0.0)
    done = {e["rank"]: e["t"] for e in arm.named("local_complete")}
    allowed = sum(over - done[e["rank"]] for e in arm.named("sleep_start"))
    return {
        "commits": [arm.transition(e) for e in arm.named("stage_commit")],
        "allowed_rank_s": round(allowed, 4),
        "released_share": round(free_rank_seconds(folder) / allowed, 4) if allowed else None,
        "woken_before_restore_s": arm.early(),
        "rehearsal_s": [round(e["seconds"], 3) for e in arm.named("rehearsal") if e["rank"] == 0],
        "later_captures": [[e["sizes"], round(e["seconds"], 4)] for e in arm.named("capture_end")],
        "restore_s": [round(e["duration"], 4) for e in arm.named("restore_end") if e["rank"] == 0],
        "released": arm.released(),
        "audit": arm.audit(),
        "dummy": [[e["rank"], e["count"], round(e["seconds"], 4)] for e in arm.named("dummy_steps")],
    }


def free_rank_seconds(folder: Path) -> float:
    """Rank-seconds that were free for certain."""
    report = report_json(load_run(folder))
    return float(report["ranks"] * report["window_seconds"] - max(report["occupied_rank_seconds"]))
