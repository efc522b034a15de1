"""The plan of one epoch: history in, plan out (planner.md sections 3 to 7)."""

from __future__ import annotations

from collections.abc import Sequence

from flexfloor.config import ADMISSION_METHODS, FlexFloorConfig
from flexfloor.history import LengthHistory
from flexfloor.plan import EpochPlan
from flexfloor.planner.demand import MICRO, Prompt, to_micro
from flexfloor.planner.layout import dataset_layout, sorted_layout
from flexfloor.planner.repair import repair
from flexfloor.planner.step import PlannedStep, StepPlanner
from flexfloor.planner.tail_guard import guard_ratio


def predict(config: FlexFloorConfig, history: LengthHistory, items: Sequence[str]) -> list[Prompt]:
    """The prompts of an epoch with their predictions, in the order of ``items``.

    An item never observed counts as n responses at the global limit, or, with ``history.unseen: quantile``, at a
    quantile of the known tails.
    """
    limit = config.tail_guard.l_max
    assumed = history.quantile_tail(config.history.unseen_quantile) if config.history.unseen == "quantile" else None
    prompts = []
    for item_id in items:
        known = history.items.get(item_id)
        if known is not None:
            latest = known.latest
            prompts.append(Prompt(item_id, to_micro(known.ema_tail), latest.lengths, latest.prompt_tokens))
        elif assumed is not None:
            prompts.append(Prompt(item_id, to_micro(assumed), (-int(-assumed // 1),), 0, assumed=True))
        else:
            prompts.append(Prompt(item_id, limit * MICRO, (limit,), 0, predicted=False))
    return prompts


def plan_epoch(
    config: FlexFloorConfig,
    history: LengthHistory,
    items: Sequence[str] | None = None,
    *,
    epoch: int | None = None,
) -> EpochPlan:
    """Plans one epoch.

    Args:
        config: the configuration.
        history: what is known about lengths.
        items: item ids in dataset order, repeats allowed; None plans every item of the history.
        epoch: number of the epoch; None takes the one after the latest observed.

    Raises:
        PlanningError: the solver is missing or failed.
    """
    prompts = predict(config, history, list(history.items) if items is None else items)
    planner = StepPlanner(config, guard_ratio(history.ratio_pairs, config.tail_guard))
    layout = dataset_layout if config.method == "verl" else sorted_layout
    steps: list[PlannedStep] = []
    swaps: list[tuple[int, str, str]] = []
    for members in layout(prompts, config.step_prompts):
        planned = planner.plan(members)
        if config.method in ADMISSION_METHODS and not planned.grouping.kv_safe and steps:
            mended = repair(planner, steps[-1], planned)
            if mended is not None:
                steps[-1], planned = mended.previous, mended.current
                swaps.extend((len(steps), out, into) for out, into in mended.swaps)
        steps.append(planned)
    return EpochPlan(
        epoch=history.next_epoch if epoch is None else epoch,
        world_size=config.world_size,
        method=config.method,
        config_digest=config.digest(),
        steps=tuple(planner.record(index, planned) for index, planned in enumerate(steps)),
        swaps=tuple(swaps),
    )
