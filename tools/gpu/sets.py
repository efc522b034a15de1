"""The response sets of a measurement: a skewed one, and one drawn from a length distribution and planned from history.

A set is two plans (ours and stock verl's) over the same items with the same true lengths, so that W is equal.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flexfloor.config import FlexFloorConfig
from flexfloor.driver.orders import Request
from flexfloor.errors import InputError
from flexfloor.history import replay
from flexfloor.plan import EpochPlan, RankPlan, StepPlan, release_area
from flexfloor.planner import plan_epoch
from flexfloor.simulate import Workload, drawn, read_distribution
from flexfloor.simulate.workload import EpochLengths

PROMPT_TOKENS = 128


@dataclass(frozen=True)
class Set:
    """One set.

    Attributes:
        name: what it is.
        config: the configuration that both plans belong to (its ``responses_per_prompt`` counts).
        ours: the plan that may shrink.
        stock: the same items as stock verl places them, never shrinking.
        truth: true lengths; the last epoch is the one that is run.
    """

    name: str
    config: FlexFloorConfig
    ours: EpochPlan
    stock: EpochPlan
    truth: Workload

    @property
    def epoch(self) -> EpochLengths:
        """The epoch that is run."""
        return self.truth.epochs[-1]

    def requests(self, step: StepPlan, vocabulary: int) -> tuple[Request, ...]:
        """The step's requests with their true lengths; the same item has the same prompt in every plan."""
        made = []
        for group in step.ranks:
            for item in group.items:
                draw = random.Random(item)
                prompt = tuple(5 + draw.randrange(vocabulary - 10) for _ in range(PROMPT_TOKENS))
                made += [
                    Request(item, sample, group.rank, prompt, length, draw.getrandbits(31), False)
                    for sample, length in enumerate(self.epoch.lengths[item])
                ]
        return tuple(made)


def skewed(config: FlexFloorConfig, longest: int, *, survivor: int | None = None, name: str = "skewed") -> Set:
    """One rank's responses last, the others end stage by stage; the same placement in both plans.

    Args:
        config: the configuration.
        longest: longest response, tokens.
        survivor: the rank whose responses last; None: the last one.
        name: of the set.
    """
    world = config.world_size
    survivor = world - 1 if survivor is None else survivor
    floors = sorted((f for f in config.admissible_sizes if f < world), reverse=True)
    batch = (config.engine.max_num_seqs or 64) // config.responses_per_prompt
    lengths: dict[str, tuple[int, ...]] = {}
    groups: list[list[str]] = []
    for rank in range(world):
        groups.append([])
        place = (rank - survivor - 1) % world  # the survivor is the last to leave
        stays = sum(place >= world - size for size in floors)
        top = longest if rank == survivor else longest * (1 + stays) // (3 + len(floors))
        for i in range(batch):
            item = f"s{rank}.{i:03d}"
            own = [
                max(8, top - (i * config.responses_per_prompt + k) * top // 100)
                for k in range(config.responses_per_prompt)
            ]
            lengths[item] = tuple(own)
            groups[-1].append(item)
    items = tuple(lengths)
    epochs = [EpochLengths(e, items, lengths, dict.fromkeys(items, PROMPT_TOKENS)) for e in (0, 1)]
    ladder = (world, *floors)
    return Set(
        name,
        config,
        _plan(config, groups, lengths, ladder, "flex"),
        _plan(config, groups, lengths, (world,), "verl"),
        Workload(tuple(epochs)),
    )


def _plan(
    config: FlexFloorConfig,
    groups: Sequence[Sequence[str]],
    lengths: dict[str, tuple[int, ...]],
    ladder: tuple[int, ...],
    method: str,
) -> EpochPlan:
    ends = [max(max(lengths[item]) for item in group) for group in groups]
    tail = max(ends)
    times = tuple(sorted(ends)[len(ends) - size - 1] for size in ladder[1:])
    step = StepPlan(
        step=0,
        items=tuple(item for group in groups for item in group),
        cap=None,
        tail=tail,
        floor=ladder[-1],
        ladder=ladder,
        quorum_times=times,
        release_area=release_area(ladder, times, tail),
        residency=config.residency,
        kv_tokens_per_rank=None,
        capture_sizes=(),
        kv_safe=True,
        optimality_gap=0.0,
        excluded_floors={},
        ranks=tuple(
            RankPlan(rank=rank, items=tuple(group), completion=ends[rank], peak_tokens=ends[rank])
            for rank, group in enumerate(groups)
        ),
    )
    return EpochPlan(
        epoch=1,
        world_size=config.world_size,
        method=method,
        config_digest=config.digest(),
        steps=(step,),
    )


def from_distribution(
    config: FlexFloorConfig, pmf: Path, *, scale: float, longest: int, seed: int, plans: Path | None = None
) -> Set:
    """Lengths drawn from a distribution; ours is planned from the epoch before, stock takes dataset order.

    Args:
        config: the configuration.
        pmf: the distribution.
        scale: factor on every length.
        longest: lengths are cut there, tokens.
        seed: of the draw.
        plans: folder of plans made before from the same arguments (a device machine may lack the solver), or where
            they are put.
    """
    items = config.step_prompts
    truth = drawn(
        [(read_distribution(pmf), 1.0)],
        items=items,
        responses=config.responses_per_prompt,
        epochs=1,
        correlation=0.6,
        prompt_tokens=PROMPT_TOKENS,
        seed=seed,
        scale=scale,
    )
    cut = tuple(
        EpochLengths(
            one.epoch,
            one.items,
            {item: tuple(min(longest, n) for n in own) for item, own in one.lengths.items()},
            one.prompt_tokens,
        )
        for one in truth.epochs
    )
    truth = Workload(cut, truth.notes)
    history = replay(cut[0].observations(longest), config.alpha)
    last = cut[-1]
    made = []
    for method in ("flex", "verl"):
        own = config.model_copy(update={"method": method})
        file = plans / f"{method}-{seed}-{scale:g}-{longest}.json" if plans is not None else None
        if file is not None and file.exists():
            plan = EpochPlan.load(file)
            if (plan.world_size, plan.config_digest) != (own.world_size, own.digest()):
                raise InputError("the plan was made for another configuration: name another folder", file=file)
            made.append(plan)
            continue
        made.append(plan_epoch(own, history, last.items, epoch=last.epoch))
        if file is not None:
            made[-1].save(file)
    return Set(f"drawn from {pmf.stem}", config, made[0], made[1], truth)
