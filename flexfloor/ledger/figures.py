"""Figures beside Q and E: waiting, exit proxy, dummy steps, decode audits, preemptions (seed 001 tables 8 and 9)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexfloor.events import Event
from flexfloor.ledger.occupancy import StepOccupancy
from flexfloor.ledger.windows import RankKey, StepLog


@dataclass(frozen=True)
class StepFigures:
    """Further figures of one step; None where the log has no evidence.

    Attributes:
        decode_full: decode iterations inside captured graphs.
        decode_eager: decode iterations outside of them.
        dummy_count: dummy steps of all ranks.
        dummy_seconds: their time, rank-seconds.
        preemptions: preempted requests, as events tell them.
        recomputed_tokens: tokens computed again after preemption; never part of W.
        waiting: local_complete to detach_start, or to generation_end for ranks that stay, rank-seconds.
        exit_proxy: exit start to rollout output, rank-seconds: release opportunity, a proxy and never part of H.
        skipped: transitions that were abandoned, each with its reason.
        faults: faults that the log names.
    """

    decode_full: int | None
    decode_eager: int | None
    dummy_count: int | None
    dummy_seconds: float | None
    preemptions: int
    recomputed_tokens: int
    waiting: float | None
    exit_proxy: float | None
    skipped: tuple[str, ...]
    faults: tuple[str, ...]


def step_figures(step: StepOccupancy) -> StepFigures:
    """Gather the further figures of one window."""
    log = step.log
    audits, dummies, preempted = log.named("decode_audit"), log.named("dummy_steps"), log.named("preemption")
    return StepFigures(
        decode_full=sum(e.fields["full"] for e in audits) if audits else None,
        decode_eager=sum(e.fields["eager"] for e in audits) if audits else None,
        dummy_count=sum(e.fields["count"] for e in dummies) if dummies else None,
        dummy_seconds=math.fsum(e.fields["seconds"] for e in dummies) if dummies else None,
        preemptions=len(preempted),
        recomputed_tokens=sum(int(e.fields.get("recomputed_tokens", 0)) for e in preempted),
        waiting=waiting(log),
        exit_proxy=exit_proxy(step),
        skipped=tuple(f"{log.key}: {_told(e, 'reason')}" for e in log.named("plan_skipped")),
        faults=tuple(f"{log.key}: {_told(e, 'where')}: {_told(e, 'what')}" for e in log.named("fault")),
    )


def waiting(log: StepLog) -> float | None:
    """Rank-seconds from a rank's last local_complete to its detach_start, or to generation_end if it stays.

    A detach that was abandoned does not end the wait. None where no rank says that it is complete,
    or where nothing tells when a staying rank's wait ended.
    """
    waits: list[float] = []
    for key, events in log.ranks.items():
        done: float | None = None
        leaving: float | None = None
        for event in events:
            if event.event == "local_complete":
                done = event.t
            elif event.event == "detach_start":
                leaving = event.t
            elif event.event == "detach_end" and done is not None:
                waits.append(max(0.0, (event.t if leaving is None else leaving) - done))
                done = leaving = None
        if done is not None:
            end = generation_end(log, key)
            if end is None:
                return None
            waits.append(max(0.0, end - done))
    return math.fsum(waits) if waits else None


def exit_proxy(step: StepOccupancy) -> float | None:
    """Rank-seconds from exit start (detach_start) to rollout output, shortened where the rank came back before it.

    None where no detach_start is logged. Rollout output is generation_end, or rollout_end where that is not logged.
    """
    spans: list[float] = []
    for key, rank in step.ranks.items():
        output = generation_end(step.log, key)
        for cycle in rank.cycles:
            if cycle.exit_start is not None and cycle.detach is not None:
                back = cycle.reacquired
                end = min(step.log.end if output is None else output, math.inf if back is None else back.hi)
                spans.append(max(0.0, end - cycle.exit_start.t))
    return math.fsum(spans) if spans else None


def generation_end(log: StepLog, key: RankKey) -> float | None:
    """When generation ended for a rank: by its own word, else its replica's, else the driver's."""
    ends = log.named("generation_end")
    own = [e.t for e in ends if e.rank == key.rank and (key.replica is None or e.replica == key.replica)]
    replica = [e.t for e in ends if e.rank is None and e.replica is not None and e.replica == key.replica]
    driver = [e.t for e in ends if e.rank is None and (e.replica is None or key.replica is None)]
    said = own or replica or driver
    return max(said) if said else None


def _told(event: Event, name: str) -> str:
    value = str(event.fields.get(name, "not said"))
    return value if event.rank is None else f"rank {event.rank}: {value}"
