"""What trainer, agent loops and rollout servers say to each other: plain records that travel through Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexfloor.driver.orders import predicted_survivors
from verl_integration.epochs import TrainStep
from verl_integration.section import RunSettings

SERVER_NAME = "vllm_server_{replica}_0"
"""Name that verl gives to the first server of a replica."""


@dataclass(frozen=True)
class Turn:
    """How one request of a planned trajectory is served.

    Attributes:
        trajectory: id of the trajectory, unique in the step.
        rank: planned rank.
        place: position of its first request among the replica's; None for a later turn.
        more: further turns may follow.
    """

    trajectory: str
    rank: int
    place: int | None
    more: bool


@dataclass(frozen=True)
class StepReport:
    """What a server tells of a finished step.

    Attributes:
        replica: the replica.
        generated_at: when its last response was there (seconds since the epoch).
        ended_at: when the full world stood again.
        lost: responses that never reached an engine, and why.
    """

    replica: int
    generated_at: float
    ended_at: float
    lost: tuple[str, ...] = ()


def installation(run: RunSettings, step: TrainStep, replica: int) -> dict[str, Any] | None:
    """The JSON that every engine of a replica installs; None for a replica without prompts in the step."""
    plan = step.plans[replica]
    if plan is None:
        return None
    config = run.config
    shrink = config.verl.shrink
    ladder = step.ladder(replica, shrink=shrink)
    return {
        "digest": step.digest(replica, shrink=shrink),
        "epoch": step.epoch,
        "step": step.step,
        "ladder": list(ladder),
        "expected": step.expected(replica, config.world_size),
        "rank_order": list(config.leave_order),
        "gate": config.verl.gate,
        "auto_close": True,
        "end": "full",
        "predicted": [list(survivors) for survivors in predicted_survivors(plan, ladder, config.leave_order)],
        "kv_tokens": plan.admitted_kv_tokens,
        "seed": config.rollout.seed,
        "run": run.run,
        "events_dir": str(run.events_dir),
    }
