"""One epoch: which prompts make a step, and where each response of it is generated.

    history as of the epoch's begin --> sorted steps --> dealt to replicas --> one plan a replica --> TrainStep

A step of several replicas is dealt in turn over the sorted prompts, so that no replica gets the long ones alone; each
share is then planned like a step of its own. Everything here is a pure function of configuration, history, dataset
order and epoch: a resumed run makes the same plans.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexfloor.config import FlexFloorConfig
from flexfloor.driver.orders import step_digest
from flexfloor.history import LengthHistory
from flexfloor.plan import EpochPlan, StepPlan
from flexfloor.planner import plan_epoch
from flexfloor.planner.epoch import predict
from flexfloor.workload import response_seed


@dataclass(frozen=True)
class Placement:
    """Where the responses of one dataset row are generated.

    Attributes:
        item_id: its identity.
        row: dataset row.
        replica, rank: the planned engine.
        places: position of each response among the replica's responses of the step.
        samples: index of each response among all of the item in the epoch.
        seeds: seed of each response; None leaves it to vLLM.
        cap: response cap of the step in tokens; None where only the global limit holds.
    """

    item_id: str
    row: int
    replica: int
    rank: int
    places: tuple[int, ...]
    samples: tuple[int, ...]
    seeds: tuple[int, ...] | None
    cap: int | None


@dataclass(frozen=True)
class TrainStep:
    """One training step over all replicas.

    Attributes:
        epoch, step: its position.
        plans: the step's plan of each replica; None for a replica without prompts in it.
        placements: one entry a prompt, in the order in which requests are sent.
    """

    epoch: int
    step: int
    plans: tuple[StepPlan | None, ...]
    placements: tuple[Placement, ...]

    def ladder(self, replica: int, *, shrink: bool = True) -> tuple[int, ...]:
        """EP sizes in force on a replica."""
        plan = self.plans[replica]
        if plan is None:
            return ()
        return plan.ladder if shrink else plan.ladder[:1]

    def expected(self, replica: int, world_size: int) -> list[int]:
        """Responses that each rank of a replica will get."""
        counts = Counter[int]()
        for placement in self.placements:
            if placement.replica == replica:
                counts[placement.rank] += len(placement.places)
        return [counts[rank] for rank in range(world_size)]

    def digest(self, replica: int, *, shrink: bool = True) -> str:
        """What the ranks of a replica agree on."""
        plan = self.plans[replica]
        return "" if plan is None else step_digest(plan, self.ladder(replica, shrink=shrink))


def steps_per_epoch(items: int, step_prompts: int) -> int:
    """Steps of an epoch, a short last one included."""
    return -(-items // step_prompts)


def dataset_order(ids: Sequence[str], epoch: int, *, shuffle: bool, seed: int) -> list[str]:
    """Item ids in the order in which verl's sampler would visit the rows of this epoch."""
    order = list(ids)
    if shuffle:
        random.Random(f"{seed} {epoch}").shuffle(order)
    return order


def deal(config: FlexFloorConfig, history: LengthHistory, items: Sequence[str], replicas: int) -> list[list[str]]:
    """The items of an epoch by replica, in plan order; steps are dealt in turn.

    Args:
        config: the configuration.
        history: what is known as of the epoch's begin.
        items: item ids in dataset order.
        replicas: how many.
    """
    if replicas == 1:
        return [list(items)]
    prompts = predict(config, history, items)
    if config.method != "verl":
        prompts = sorted(prompts, key=lambda prompt: prompt.sort_key)
    shares: list[list[str]] = [[] for _ in range(replicas)]
    for index, prompt in enumerate(prompts):
        shares[index % config.step_prompts % replicas].append(prompt.item_id)
    return shares


def plan_replicas(
    config: FlexFloorConfig, history: LengthHistory, items: Sequence[str], replicas: int, epoch: int
) -> list[EpochPlan]:
    """One plan a replica; see the module.

    Raises:
        PlanningError: the solver is missing or failed.
    """
    plans = []
    for replica, share in enumerate(deal(config, history, items, replicas)):
        size = -(-(config.step_prompts - replica) // replicas)
        own = config if replicas == 1 else config.model_copy(update={"step_prompts": max(1, size)})
        plans.append(plan_epoch(own, history, share, epoch=epoch))
    return plans


def train_steps(config: FlexFloorConfig, plans: Sequence[EpochPlan], index: Any, epoch: int) -> list[TrainStep]:
    """The training steps of an epoch.

    Args:
        config: the configuration.
        plans: one a replica.
        index: the dataset's `ItemIndex`.
        epoch: the epoch.
    """
    count = max((len(plan.steps) for plan in plans), default=0)
    rows = iter(index.rows([[i for part in _parts(plans, step) for i in part] for step in range(count)]))
    begun = Counter[str]()
    found = []
    for step in range(count):
        own_rows = iter(next(rows))
        placements = []
        for replica, plan in enumerate(plans):
            if step < len(plan.steps):
                placements.extend(_place(config, plan.steps[step], replica, epoch, begun, own_rows))
        own = tuple(plan.steps[step] if step < len(plan.steps) else None for plan in plans)
        found.append(TrainStep(epoch, step, own, tuple(placements)))
    return found


def _parts(plans: Sequence[EpochPlan], step: int) -> list[list[str]]:
    return [[i for g in plan.steps[step].ranks for i in g.items] for plan in plans if step < len(plan.steps)]


def _place(
    config: FlexFloorConfig, step: StepPlan, replica: int, epoch: int, begun: Counter[str], rows: Any
) -> list[Placement]:
    n, place = config.responses_per_prompt, 0
    found = []
    for group in step.ranks:
        for item_id in group.items:
            samples = tuple(range(begun[item_id], begun[item_id] + n))
            begun[item_id] += n
            seeds = tuple(response_seed(item_id, epoch, sample, config.rollout.seed) for sample in samples)
            found.append(
                Placement(
                    item_id=item_id,
                    row=next(rows),
                    replica=replica,
                    rank=group.rank,
                    places=tuple(range(place, place + n)),
                    samples=samples,
                    seeds=seeds if config.verl.seeds == "item" else None,
                    cap=step.cap if step.cap is not None and step.cap < config.tail_guard.l_max else None,
                )
            )
            place += n
    return found
