"""A simulated run: epochs planned from the lengths of the epochs before, simulated step by step, written as a log.

lengths of epoch 0 --> history --> plan of epoch 1 --> steps --> observed lengths --> history --> plan of epoch 2 ...
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from flexfloor.config import FlexFloorConfig
from flexfloor.errors import InputError
from flexfloor.events import Event, EventLog
from flexfloor.history import LengthHistory, Observation, replay, write_lengths
from flexfloor.ledger import RunLedger, account
from flexfloor.ledger.records import RunRecords
from flexfloor.plan import EpochPlan, StepPlan
from flexfloor.planner import plan_epoch
from flexfloor.simulate.batching import Limits, Request
from flexfloor.simulate.costs import H200_NOTE, Costs, save_costs
from flexfloor.simulate.records import Mark, StepInput, StepOutcome
from flexfloor.simulate.workload import EpochLengths, Workload
from flexfloor.simulate.world import simulate_step
from flexfloor.step_times import Curve, StepTimes

DEFAULT_SEQS = 256
DEFAULT_BATCHED_TOKENS = 8192
GAP_S = 1.0
"""Seconds between two simulated rollout windows; the ledger leaves them out."""


@dataclass(frozen=True)
class Machine:
    """What the simulated ranks run on.

    Attributes:
        table: decode step times.
        costs: everything else that takes time.
        extrapolate: whether the table answers for EP sizes and batches that it does not hold.
    """

    table: StepTimes
    costs: Costs
    extrapolate: bool = False

    def curves(self, config: FlexFloorConfig, sizes: Iterable[int]) -> dict[int, Curve]:
        """Step times by EP size.

        Raises:
            InputError: the table does not answer for a size.
        """
        return {
            size: self.table.curve(size, extrapolate=self.extrapolate, experts=config.num_experts) for size in sizes
        }

    def notes(self, sizes: Iterable[int]) -> list[str]:
        """What is measured and what is not, for these EP sizes."""
        told = [H200_NOTE] if self.table.file == "the built-in H200 table" else [f"step times: {self.table.file}"]
        for source in ("interpolated", "extrapolated"):
            own = [str(size) for size in sorted(sizes) if self.table.source(size) == source]
            if own:
                held = ", ".join(map(str, self.table.sizes))
                told.append(f"EP {', '.join(own)}: step times are {source.upper()} from EP {held}, not measured")
        if not self.table.has_context:
            told.append("the table has no context axis: a step costs the same at any response length")
        return [*told, *self.costs.notes]


@dataclass
class SimulatedRun:
    """Everything that came out of a simulated run.

    Attributes:
        name: its name, the run id of its events.
        config: the configuration.
        machine: what it ran on.
        events: the log, in order.
        plans: the plan of each (seed, epoch).
        outcomes: the steps of each (seed, epoch).
        observations: what each seed observed, the bootstrap first.
        sizes: EP sizes of the plans' ladders.
        assumed: what is assumed about lengths and limits.
    """

    name: str
    config: FlexFloorConfig
    machine: Machine
    events: list[Event] = field(default_factory=list)
    plans: dict[tuple[int, int], EpochPlan] = field(default_factory=dict)
    outcomes: dict[tuple[int, int], list[StepOutcome]] = field(default_factory=dict)
    observations: dict[int, list[Observation]] = field(default_factory=dict)
    sizes: set[int] = field(default_factory=set)
    assumed: list[str] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Everything that is assumed and not measured, one line each."""
        return [*self.assumed, *self.machine.notes(self.sizes)]

    def ledger(self) -> RunLedger:
        """The ledger's account of the log."""
        lengths: dict[int, list[int]] = {}
        for seed, seen in self.observations.items():
            for one in seen:
                if (seed, one.epoch) in self.outcomes:
                    lengths.setdefault(one.epoch, []).extend(one.lengths)
        return account(EventLog(self.events, []), RunRecords(lengths=lengths), name=self.name)

    def save(self, folder: str | Path) -> None:
        """Writes a run folder that `flexfloor report` reads.

        Raises:
            InputError: the folder holds events already or cannot be written.
        """
        root = Path(folder)
        if any(root.glob("events*.jsonl")) or any(root.glob("events/*.jsonl")):
            raise InputError("holds events already; name another --out", file=root)
        try:
            (root / "events").mkdir(parents=True, exist_ok=True)
            (root / "plans").mkdir(exist_ok=True)
            text = "".join(event.to_json() + "\n" for event in self.events)
            (root / "events" / "simulated.jsonl").write_text(text, encoding="utf-8")
            settings = yaml.safe_dump({"flexfloor": self.config.resolved()}, sort_keys=False, allow_unicode=True)
            (root / "config.yaml").write_text(settings, encoding="utf-8")
            notes = "".join(f"simulated: {note}\n" for note in self.notes)
            (root / "notes.txt").write_text(notes, encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot be written ({error.strerror}); name a writable place", file=root) from error
        for (seed, epoch), plan in self.plans.items():
            plan.save(root / "plans" / f"seed-{seed}-epoch-{epoch}.json")
        for seed, seen in self.observations.items():
            name = "lengths.jsonl" if len(self.observations) == 1 else f"lengths-seed-{seed}.jsonl"
            write_lengths(root / name, seen)
        save_costs(self.machine.costs, root / "costs.yaml")
        self.machine.table.save(root / "step_times.csv")


def limits_of(config: FlexFloorConfig, kv_tokens: int | None) -> Limits:
    """What bounds a rank's batch under a configuration; the KV budget is the step's."""
    batched = config.engine.vllm.get("max_num_batched_tokens", DEFAULT_BATCHED_TOKENS)
    block = config.kv.block_tokens
    return Limits(
        max_num_seqs=config.engine.max_num_seqs or DEFAULT_SEQS,
        kv_blocks=None if kv_tokens is None else kv_tokens // block,
        block_tokens=block,
        batched_tokens=batched,
        prompt_sharing=config.kv.prompt_sharing,
    )


def experts_of(config: FlexFloorConfig) -> int:
    """Experts of a layer; where the configuration names none, the fewest that all admissible sizes divide."""
    return config.num_experts or math.lcm(*config.admissible_sizes)


def simulate_workloads(
    config: FlexFloorConfig,
    workloads: Mapping[int, Workload],
    machine: Machine,
    *,
    name: str = "simulated",
    bootstrap: bool = False,
    plan: EpochPlan | None = None,
) -> SimulatedRun:
    """Plans and simulates the epochs of one workload a seed.

    Args:
        config: the configuration.
        workloads: by seed.
        machine: what the ranks run on.
        name: run id.
        bootstrap: whether the first epoch is simulated and logged too, in the full world.
        plan: simulate this plan instead of making one, in the workloads' last epoch or, if they hold it, its own.

    Raises:
        InputError: the lengths do not go with the plan, or the step times do not answer.
    """
    run = SimulatedRun(name, config, machine)
    clock = 0.0
    for seed, workload in workloads.items():
        first = workload.epochs[0]
        seen = first.observations(config.tail_guard.l_max)
        if plan is None:
            epochs: Sequence[EpochLengths] = workload.epochs if bootstrap else workload.epochs[1:]
        else:
            epochs, seen = [_epoch_of(plan, workload)], []
        for epoch in epochs:
            history = LengthHistory() if epoch is first and bootstrap else replay(seen, config.alpha)
            made = plan or plan_epoch(config, history, epoch.items, epoch=epoch.epoch)
            outcomes, observed, clock = _epoch(run, made, epoch, seed, clock)
            run.sizes.update(size for step in made.steps for size in step.ladder)
            run.plans[seed, made.epoch], run.outcomes[seed, made.epoch] = made, outcomes
            if not (epoch is first and bootstrap):
                seen = [*seen, *observed]
        run.observations[seed] = seen
    run.assumed = [*_kept(workloads), *_limit_notes(run)]
    return run


def _epoch_of(plan: EpochPlan, workload: Workload) -> EpochLengths:
    return next((epoch for epoch in workload.epochs if epoch.epoch == plan.epoch), workload.epochs[-1])


def _epoch(
    run: SimulatedRun, plan: EpochPlan, truth: EpochLengths, seed: int, clock: float
) -> tuple[list[StepOutcome], list[Observation], float]:
    config, outcomes = run.config, []
    begun: Counter[str] = Counter()
    kept: dict[str, list[tuple[int, bool]]] = {}
    for step in plan.steps:
        groups, hits = _requests(config, step, truth, begun, kept)
        given = StepInput(
            groups=groups,
            ladder=step.ladder,
            residency=step.residency,
            rank_order=config.leave_order,
            capture_sizes=config.engine.capture_sizes or step.capture_sizes,
            limits=limits_of(config, step.kv_tokens_per_rank),
            experts=experts_of(config),
            capacity=experts_of(config) // min(config.admissible_sizes[-1], step.floor),
        )
        outcome = simulate_step(given, run.machine.costs, run.machine.curves(config, step.ladder))
        outcomes.append(outcome)
        count = sum(map(len, groups))
        last = {"response_tokens": outcome.tokens, "world_size": plan.world_size, "responses": count, "cap_hits": hits}
        marks = [*outcome.marks, Mark(outcome.seconds, "rollout_end", None, last)]
        run.events += [
            Event(
                t=clock + mark.t,
                event=mark.event,
                run=run.name,
                seed=seed,
                epoch=plan.epoch,
                step=step.step,
                rank=mark.rank,
                fields=mark.fields,
            )
            for mark in marks
        ]
        clock += outcome.seconds + GAP_S
    observed = [
        Observation(
            item,
            plan.epoch,
            truth.prompt_tokens[item],
            tuple(length for length, _ in own),
            tuple(index for index, (_, capped) in enumerate(own) if capped),
        )
        for item, own in kept.items()
    ]
    return outcomes, observed, clock


def _requests(
    config: FlexFloorConfig,
    step: StepPlan,
    truth: EpochLengths,
    begun: Counter[str],
    kept: dict[str, list[tuple[int, bool]]],
) -> tuple[tuple[tuple[Request, ...], ...], dict[str, int]]:
    """The requests of each rank and how many a short cap and the global limit stop.

    The k-th response of an item in an epoch has its k-th true length; they are counted on and around where the
    lengths hold fewer.
    """
    limit = config.tail_guard.l_max
    most = limit if step.cap is None else min(step.cap, limit)
    hits = {"short": 0, "global": 0}
    groups = []
    for entry in step.ranks:
        requests: list[Request] = []
        for item in entry.items:
            true = truth.lengths.get(item)
            if true is None:
                raise InputError(f"item {item!r} of the plan has no lengths in epoch {truth.epoch}", field="item_id")
            for _ in range(config.responses_per_prompt):
                length = true[begun[item] % len(true)]
                begun[item] += 1
                capped = length > most and most < limit
                hits["short"] += capped
                hits["global"] += length >= limit and not capped
                requests.append(Request(item, truth.prompt_tokens[item], min(length, most)))
                kept.setdefault(item, []).append((min(length, most), capped))
        groups.append(tuple(requests))
    return tuple(groups), hits


def _kept(workloads: Mapping[int, Workload]) -> list[str]:
    return list(dict.fromkeys(note for workload in workloads.values() for note in workload.notes))


def _limit_notes(run: SimulatedRun) -> list[str]:
    config, notes = run.config, []
    if config.engine.max_num_seqs is None:
        notes.append(f"engine.max_num_seqs is not set: {DEFAULT_SEQS} running requests a rank are assumed")
    if any(step.kv_tokens_per_rank is None for plan in run.plans.values() for step in plan.steps):
        notes.append("the capacity table lacks the world size: KV is taken as unlimited there")
    return notes
