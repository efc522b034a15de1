"""One plan through its steps: order, wait, write, account.

rollout_start --> server.run_step (install .. full world) --> rollout_end --> responses --> history --> lengths.jsonl
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flexfloor.config import FlexFloorConfig
from flexfloor.driver.handles import Server
from flexfloor.driver.orders import (
    Progress,
    Request,
    Response,
    Sampling,
    StepOrder,
    predicted_survivors,
    requests_of,
    step_digest,
)
from flexfloor.driver.run_dir import RunDirectory
from flexfloor.events import EventWriter
from flexfloor.history import LengthHistory
from flexfloor.plan import EpochPlan, StepPlan
from flexfloor.planner import plan_epoch
from flexfloor.workload import Workload


@dataclass(frozen=True)
class StepResult:
    """A finished step.

    Attributes:
        step: its index.
        responses: how many.
        tokens: generated tokens, each response's EOS included.
        seconds: from rollout_start to rollout_end.
        preemptions: over all responses.
        ladder: the ladder in force.
    """

    step: int
    responses: int
    tokens: int
    seconds: float
    preemptions: int
    ladder: tuple[int, ...]


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        epoch: its epoch.
        steps: its steps.
        report: the ledger's report, as in report.json.
        notes: what a reader should know.
    """

    epoch: int
    steps: tuple[StepResult, ...]
    report: dict[str, Any]
    notes: tuple[str, ...] = ()


class Watcher:
    """Learns how a run goes on; the base class keeps quiet."""

    def started(self, plan: EpochPlan, responses: int) -> None:
        """The run begins; ``responses`` in all steps."""

    def moved(self, progress: Progress) -> None:
        """Several times a second."""

    def finished(self, result: StepResult) -> None:
        """A step is on disk."""


def bootstrap_plan(config: FlexFloorConfig, workload: Workload, epoch: int) -> EpochPlan:
    """A plan without history: nothing is known, so no step shrinks."""
    return plan_epoch(config, LengthHistory(), list(workload), epoch=epoch)


def run_plan(
    plan: EpochPlan,
    config: FlexFloorConfig,
    workload: Workload,
    server: Server,
    run_dir: RunDirectory,
    *,
    shrink: bool = True,
    epoch: int | None = None,
    run_id: str | None = None,
    room: Mapping[int, int] | None = None,
    watcher: Watcher | None = None,
) -> RunResult:
    """Runs all steps of a plan on a started server.

    Args:
        plan: the plan.
        config: the configuration.
        workload: the prompts.
        server: a started server; it may have run other plans before.
        run_dir: where everything is written.
        shrink: False keeps the full world and leaves all else as planned.
        epoch: epoch of responses and seeds; None takes the plan's.
        run_id: run id of the events; None takes the run directory's name.
        room: KV tokens a rank really has, by floor, for a note where the plan counted on more.
        watcher: learns how the run goes on.

    Raises:
        EngineLostError, TransitionError: the step failed; earlier steps are on disk.
        RefusedError: an engine refused the plan.
        InputError: the run directory holds this epoch already.
    """
    epoch = plan.epoch if epoch is None else epoch
    watcher = watcher or Watcher()
    run_id = run_id or run_dir.run_id
    run_dir.begin(plan, epoch)
    steps = list(requests_of(plan, workload, config, epoch))
    watcher.started(plan, sum(len(requests) for _, requests in steps))
    events = EventWriter(run_dir.events_dir / "driver.jsonl", run=run_id)
    results: list[StepResult] = []
    try:
        for step, requests in steps:
            ladder = step.ladder if shrink else step.ladder[:1]
            order = _order(step, requests, ladder, config, run_dir, epoch, run_id)
            results.append(_run_step(order, server, run_dir, events, watcher.moved))
            watcher.finished(results[-1])
    finally:
        events.close()
    return RunResult(epoch, tuple(results), run_dir.report(), tuple(_notes(plan, room or {})))


def _order(
    step: StepPlan,
    requests: tuple[Request, ...],
    ladder: tuple[int, ...],
    config: FlexFloorConfig,
    run_dir: RunDirectory,
    epoch: int,
    run_id: str,
) -> StepOrder:
    return StepOrder(
        digest=step_digest(step, ladder),
        epoch=epoch,
        step=step.step,
        ladder=ladder,
        rank_order=config.leave_order,
        requests=requests,
        sampling=Sampling.of(config),
        run=run_id,
        events_dir=str(run_dir.events_dir),
        seed=config.rollout.seed,
        predicted=predicted_survivors(step, ladder, config.leave_order),
        kv_tokens=step.admitted_kv_tokens,
    )


def _run_step(
    order: StepOrder,
    server: Server,
    run_dir: RunDirectory,
    events: EventWriter,
    observe: Callable[[Progress], None],
) -> StepResult:
    began = time.monotonic()
    responses = logged_step(order, server, events, observe)
    tokens = sum(len(response.token_ids) for response in responses)
    seconds = time.monotonic() - began
    run_dir.finish_step(order.epoch, order.step, responses)
    preemptions = sum(response.num_preempted for response in responses)
    return StepResult(order.step, len(responses), tokens, seconds, preemptions, order.ladder)


def logged_step(
    order: StepOrder, server: Server, events: EventWriter, observe: Callable[[Progress], None]
) -> list[Response]:
    """Runs one step on a server, between the driver's ``rollout_start`` and ``rollout_end``.

    Raises:
        EngineLostError, TransitionError, RefusedError: see `Server.run_step`.
    """
    world = order.ladder[0]
    events.set_step(order.epoch, order.step, order.seed)
    events.emit("rollout_start", world_size=world)
    responses = server.run_step(order, observe)
    tokens = sum(len(response.token_ids) for response in responses)
    events.emit(
        "rollout_end", response_tokens=tokens, world_size=world, responses=len(responses), cap_hits=_hits(responses)
    )
    return responses


def _hits(responses: list[Response]) -> dict[str, int]:
    """Responses stopped by a step cap (short) and by another limit (global)."""
    short = sum(response.censored for response in responses)
    return {"short": short, "global": sum(response.stopped_by_cap for response in responses) - short}


def _notes(plan: EpochPlan, room: Mapping[int, int]) -> list[str]:
    counted = {step.floor: step.admitted_kv_tokens or 0 for step in plan.steps}
    return [
        f"the plan counts on {counted[floor]} KV tokens a rank for floor {floor}, the engines have {room[floor]}: "
        "correct kv.capacity or raise engine.kv_cache_bytes, else requests may be preempted"
        for floor in sorted(counted, reverse=True)
        if floor in room and counted[floor] > room[floor]
    ]
