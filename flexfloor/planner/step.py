"""The plan of one step: cap, groups, floor, roles and capture sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from flexfloor import exchange
from flexfloor.config import ADMISSION_METHODS, FlexFloorConfig
from flexfloor.plan import PredictedStep, StepPlan
from flexfloor.planner.admission import group_need
from flexfloor.planner.buckets import choose_buckets, expected_trace
from flexfloor.planner.demand import MICRO, Demand, KvRules, Prompt, build_demand, to_tokens
from flexfloor.planner.grouping import Grouping, StepGrouper
from flexfloor.planner.layout import contiguous_groups
from flexfloor.planner.placer import Placer
from flexfloor.planner.rate import Prediction, RateModel
from flexfloor.planner.roles import assign_ranks
from flexfloor.planner.schedule import Ladder
from flexfloor.planner.tail_guard import step_cap

GUARDED_METHODS = ("ls_tg", *ADMISSION_METHODS)
"""Methods whose steps get a cap."""

NO_CAPACITY = "no capacity"
NO_HISTORY = "the step holds items without history"


@dataclass(frozen=True)
class PlannedStep:
    """A step before it is written down.

    Attributes:
        prompts: its prompts in layout order.
        demand: what they ask.
        cap: TailGuard's cap in tokens, None without one.
        grouping: groups and schedule.
        excluded: floors that were no candidates and why.
        notes: what a reader should know.
        predicted: what it is expected to take, None without step times or history.
    """

    prompts: tuple[Prompt, ...]
    demand: Demand
    cap: int | None
    grouping: Grouping
    excluded: dict[str, str]
    notes: tuple[str, ...] = ()
    predicted: Prediction | None = None

    @property
    def tail(self) -> int:
        """Step tail, micro-tokens."""
        return self.demand.tail


class StepPlanner:
    """Plans steps of one epoch.

    Args:
        config: the configuration.
        rho: ratio of TailGuard, None without one.

    Raises:
        InputError: the table of step times is malformed or lacks what the configuration needs.
    """

    def __init__(self, config: FlexFloorConfig, rho: float | None) -> None:
        self.config, self._rho = config, rho
        self.rules = KvRules(
            mu=Fraction(config.mu),
            block_tokens=config.kv.block_tokens,
            prompt_sharing=config.kv.prompt_sharing,
            responses=config.responses_per_prompt,
        )
        self._rate = RateModel(config) if config.rate.is_on else None
        self._exchanges: tuple[str, ...] = ()
        if config.hardware is not None and config.num_experts is not None:
            self._exchanges = exchange.notes(config.hardware, config.num_experts, config.admissible_sizes)

    def plan(self, prompts: Sequence[Prompt]) -> PlannedStep:
        """Plans one step, whole.

        Args:
            prompts: its prompts in layout order, at least one.
        """
        cap, demand = self._cap(max(p.tail for p in prompts)), self.demand(prompts)
        notes = _notes(prompts)
        blind = any(not p.predicted for p in prompts)
        prompt = sum(p.prompt_tokens for p in prompts) / len(prompts)
        if self.config.method not in ADMISSION_METHODS:
            ordered, excluded, grouping = tuple(prompts), {}, self._contiguous(demand)
        else:
            ordered, excluded = tuple(sorted(prompts, key=lambda p: p.sort_key)), self._excluded(blind=blind)
            grouping, reasons = self._grouping(demand, prompt, blind=blind)
            notes += reasons + self._exchanges
        if self._rate is None or blind:
            return PlannedStep(ordered, demand, cap, grouping, excluded, notes)
        predicted = self._rate.predict(demand, grouping, prompt)
        return PlannedStep(ordered, demand, cap, grouping, excluded, notes + self._rate.notes, predicted)

    def demand(self, prompts: Sequence[Prompt]) -> Demand:
        """What the prompts of a step ask under its cap."""
        limit = self.limit(max(p.tail for p in prompts))
        return build_demand(prompts, limit, self.rules, in_order=self.config.method not in ADMISSION_METHODS)

    def limit(self, longest: int) -> int:
        """Response limit in tokens of a step whose largest predicted tail is ``longest`` (micro-tokens)."""
        cap = self._cap(longest)
        return cap if cap is not None else self.config.tail_guard.l_max

    def tail(self, prompts: Sequence[Prompt]) -> int:
        """Step tail of these prompts, micro-tokens."""
        longest = max(p.tail for p in prompts)
        return min(longest, self.limit(longest) * MICRO)

    @property
    def capacities(self) -> list[int]:
        """KV tokens a rank of the floors that a step may take."""
        config, sizes = self.config, set(self.config.admissible_sizes)
        if config.method == "fixed":
            sizes = {config.world_size, config.fixed_floor or config.world_size}
        return [tokens for size, tokens in config.capacity.items() if size in sizes]

    def admits(self, prompts: Sequence[Prompt]) -> bool:
        """Whether a KV-safe grouping at any floor is found; `plan` finds one too then."""
        demand = self.demand(prompts)
        placer = Placer(demand, self.config.world_size, self.config.solver)
        return placer.fits_at(max(self.capacities, default=0))

    def _cap(self, longest: int) -> int | None:
        if self.config.method not in GUARDED_METHODS:
            return None
        return step_cap(longest, self._rho, self.config.tail_guard)

    def _grouping(self, demand: Demand, prompt: float, *, blind: bool) -> tuple[Grouping, tuple[str, ...]]:
        config = self.config
        grouper = StepGrouper(demand, config.admissible_sizes, config.capacity, config.solver)
        found: Grouping | None
        if blind:
            found = grouper.release_aware([config.world_size])
        elif config.method == "minskew":
            found = grouper.min_skew()
        elif config.method == "fixed" and config.fixed_floor is not None:
            found = grouper.release_aware([config.fixed_floor]) or grouper.release_aware([config.world_size])
        else:
            found = grouper.release_aware()
            if found is not None and self._rate is not None and self._rate.decides:
                others = [grouper.release_aware([f]) for f in self._rate.sizes if f != found.ladder.floor]
                return self._rate.best(demand, [found, *filter(None, others)], prompt)
        return (found if found is not None else grouper.smallest_peak()), ()

    def _contiguous(self, demand: Demand) -> Grouping:
        config = self.config
        groups = contiguous_groups(len(demand), config.world_size)
        capacity = config.capacity.get(config.world_size)
        safe = capacity is not None and all(group_need(demand, group) <= capacity for group in groups)
        return Grouping(Ladder((config.world_size,)), tuple(groups), (), 0, 0, kv_safe=safe)

    def _excluded(self, *, blind: bool) -> dict[str, str]:
        floors = sorted(size for size in self.config.admissible_sizes if size < self.config.world_size)
        reasons = {str(floor): NO_CAPACITY for floor in floors if floor not in self.config.capacity}
        return {str(floor): NO_HISTORY for floor in floors} | reasons if blind else reasons

    def record(self, index: int, planned: PlannedStep) -> StepPlan:
        """The step as it is written into the plan file."""
        config, demand, grouping = self.config, planned.demand, planned.grouping
        lengths = [demand.lengths[list(group)] for group in grouping.groups if group]
        largest = max((len(group) for group in grouping.groups), default=0) * config.responses_per_prompt
        return StepPlan(
            step=index,
            items=tuple(p.item_id for p in planned.prompts),
            cap=planned.cap,
            tail=to_tokens(planned.tail),
            floor=grouping.ladder.floor,
            ladder=grouping.ladder.sizes,
            quorum_times=tuple(to_tokens(time) for time in grouping.times),
            release_area=to_tokens(grouping.area),
            residency=config.residency,
            kv_tokens_per_rank=config.capacity.get(grouping.ladder.floor),
            capture_sizes=choose_buckets(expected_trace(lengths), largest, config.capture.max_sizes),
            kv_safe=grouping.kv_safe,
            optimality_gap=grouping.gap,
            excluded_floors=planned.excluded,
            ranks=assign_ranks(demand, grouping.groups, config.leave_order),
            notes=planned.notes,
            predicted=_written(planned.predicted),
        )


def _notes(prompts: Sequence[Prompt]) -> tuple[str, ...]:
    assumed = sorted({p.tail for p in prompts if p.assumed})
    if not assumed:
        return ()
    count = sum(p.assumed for p in prompts)
    return (f"{count} prompts without history are predicted by a quantile of the known tails: {assumed[0] / MICRO:g}",)


def _written(predicted: Prediction | None) -> PredictedStep | None:
    if predicted is None:
        return None
    return PredictedStep(
        seconds=predicted.seconds, rank_seconds=predicted.rank_seconds, efficiency=predicted.efficiency
    )
