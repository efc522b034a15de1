"""Figures of a measured run: from its event log, from token times at the client, and from the simulator."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexfloor.driver.calibrate import Calibrated
from flexfloor.driver.orders import Response
from flexfloor.events import PARTS, read_events
from flexfloor.ledger import load_run, report_json
from flexfloor.plan import EpochPlan
from flexfloor.simulate import Machine, simulate_workloads
from gpu.gaps import token_gap_ms
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
    events = read_events(folder).events
    left = [e.t for e in events if e.event == "detach_start"]
    commits = [
        {
            "to": e.fields["to"],
            **{part: round(e.fields[part] * 1e3, 2) for part in PARTS if part in e.fields},
            "quorum_to_token_ms": round(1e3 * sum(e.fields.get(part, 0.0) for part in PARTS), 2),
            "token_gap_ms": token_gap_ms(responses, e.fields["survivors"], max(t for t in left if t < e.t), e.t),
            "moved_bytes": e.fields.get("moved_bytes", 0),
            "captured": e.fields.get("captured", []),
        }
        for e in events
        if e.event == "stage_commit"
    ]
    starts = {e.rank: e.t for e in events if e.event == "sleep_start"}
    done = {e.rank: e.t for e in events if e.event == "local_complete"}
    over = max((e.t for e in events if e.event == "generation_end"), default=0.0)
    restored = {e.rank: e.t for e in events if e.event == "restore_start"}
    allowed = sum(over - done[rank] for rank in starts)
    return {
        "commits": commits,
        "allowed_rank_s": round(allowed, 4),
        "released_share": round(free_rank_seconds(folder) / allowed, 4) if allowed else None,
        "woken_before_restore_s": [
            round(restored[e.rank] - e.t, 4) for e in events if e.event == "wake_start" and e.t < restored[e.rank]
        ],
        "rehearsal_s": [round(e.fields["seconds"], 3) for e in events if e.event == "rehearsal" and e.rank == 0],
        "later_captures": [
            [e.fields["sizes"], round(e.fields["seconds"], 4)] for e in events if e.event == "capture_end"
        ],
        "restore_s": [round(e.fields["duration"], 4) for e in events if e.event == "restore_end" and e.rank == 0],
        "released": [
            {"rank": e.rank, "bytes": e.fields["released_bytes"], "s": round(e.t - starts[e.rank], 4)}
            for e in events
            if e.event == "sleep_end" and e.rank in starts
        ],
        "eager_steps": sum(e.fields["eager"] for e in events if e.event == "decode_audit"),
        "dummy": [
            [e.rank, e.fields["count"], round(e.fields["seconds"], 4)] for e in events if e.event == "dummy_steps"
        ],
    }


def free_rank_seconds(folder: Path) -> float:
    """Rank-seconds that were free for certain."""
    report = report_json(load_run(folder))
    return float(report["ranks"] * report["window_seconds"] - max(report["occupied_rank_seconds"]))
