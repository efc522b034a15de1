"""From steps to seeds to means and gains (seed 001 eq. 2, 4, 17 and appendix D).

W, T and H of a seed are pooled over its steps before Q and E are computed; means over seeds are unweighted; gains are
ratios of means. There is no mean of step percentages, and cost is the mean of H/W, never one over a mean of E.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from flexfloor.ledger.bounds import Bounds, gain, mean, total
from flexfloor.ledger.figures import StepFigures
from flexfloor.ledger.occupancy import StepOccupancy
from flexfloor.ledger.paired import PairedDifference, paired_difference, sample_sd
from flexfloor.ledger.reuse import Reuse

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class StepEntry:
    """One step with all that the totals need of it.

    Attributes:
        occupancy: its window and H.
        figures: its further figures.
        responses: number of its responses, None where not counted.
        preemptions: preempted requests by events or by saved responses, whichever tells more.
        reuse: free time between and inside of workers, None for one replica.
    """

    occupancy: StepOccupancy
    figures: StepFigures
    responses: int | None
    preemptions: int
    reuse: Reuse | None


@dataclass(frozen=True)
class SeedTotals:
    """Pooled quantities of one seed; None where the log has no evidence.

    Attributes:
        seed: the seed.
        epochs: its epochs.
        steps: its steps.
        window_seconds: T (seconds).
        response_tokens: W (tokens).
        occupied: H (rank-seconds).
        responses: number of responses.
        cap_hits: responses stopped by a short cap and by the global limit (boundary proxies).
        preemptions: preempted requests.
        decode_full: decode iterations inside of captured graphs.
        decode_eager: decode iterations outside of them.
        dummy_seconds: time in dummy steps (rank-seconds).
        waiting: completion to exit (rank-seconds).
        exit_proxy: exit start to rollout output (rank-seconds), a proxy.
        reuse: free rank-seconds between and inside of workers.
    """

    seed: int
    epochs: tuple[int, ...]
    steps: int
    window_seconds: float
    response_tokens: int
    occupied: Bounds
    responses: int | None
    cap_hits: tuple[int, int] | None
    preemptions: int
    decode_full: int | None
    decode_eager: int | None
    dummy_seconds: float | None
    waiting: float | None
    exit_proxy: float | None
    reuse: Reuse | None

    @property
    def throughput(self) -> float:
        """Q = W / T (response tokens a second)."""
        return self.response_tokens / self.window_seconds

    @property
    def efficiency(self) -> Bounds:
        """E = W / H (response tokens a rank-second)."""
        return self.occupied.dividing(self.response_tokens)

    @property
    def mean_occupied_ranks(self) -> Bounds:
        """H / T (ranks)."""
        return self.occupied.scaled(1 / self.window_seconds)

    @property
    def cost(self) -> Bounds | None:
        """H / W (rank-seconds a response token); None without work."""
        return self.occupied.scaled(1 / self.response_tokens) if self.response_tokens else None

    @property
    def mean_length(self) -> float | None:
        """W over the number of responses (tokens)."""
        return self.response_tokens / self.responses if self.responses else None

    @property
    def dummy_share(self) -> Bounds | None:
        """Share of H that went into dummy steps."""
        return None if self.dummy_seconds is None else self.occupied.dividing(self.dummy_seconds)


@dataclass(frozen=True)
class Totals:
    """All seeds of a run.

    Attributes:
        seeds: one entry a seed, ascending.
        ranks: largest world of the run (N).
    """

    seeds: tuple[SeedTotals, ...]
    ranks: int

    @property
    def window_seconds(self) -> float:
        """Sum of T over the seeds (seconds)."""
        return math.fsum(seed.window_seconds for seed in self.seeds)

    @property
    def response_tokens(self) -> int:
        """Sum of W over the seeds (tokens)."""
        return sum(seed.response_tokens for seed in self.seeds)

    @property
    def occupied(self) -> Bounds:
        """Sum of H over the seeds (rank-seconds)."""
        return total(seed.occupied for seed in self.seeds)

    @property
    def throughput(self) -> float:
        """Unweighted mean of Q over the seeds."""
        return math.fsum(seed.throughput for seed in self.seeds) / len(self.seeds)

    @property
    def efficiency(self) -> Bounds:
        """Unweighted mean of E over the seeds."""
        return mean(seed.efficiency for seed in self.seeds)

    @property
    def cost(self) -> Bounds | None:
        """Unweighted mean of H/W over the seeds (rank-seconds a response token)."""
        costs = [seed.cost for seed in self.seeds]
        return mean(cost for cost in costs if cost) if all(costs) else None

    @property
    def throughput_sd(self) -> float | None:
        """Sample standard deviation of Q over the seeds."""
        return sample_sd([seed.throughput for seed in self.seeds])

    @property
    def efficiency_sd(self) -> float | None:
        """Sample standard deviation of the midpoints of E over the seeds."""
        return sample_sd([seed.efficiency.mid for seed in self.seeds])


@dataclass(frozen=True)
class Gains:
    """A run against a baseline, as fractions (0.5 is 50 % more).

    Attributes:
        throughput: ratio of mean Q, less 1.
        efficiency: bounds of the ratio of mean E, less 1.
        cost: bounds of the ratio of mean H/W, less 1; None without work.
        work: response tokens of run and baseline, per paired seed.
        unpaired: seeds that only one of the two has.
        paired: differences run minus baseline over the paired seeds.
    """

    throughput: float
    efficiency: Bounds
    cost: Bounds | None
    work: dict[int, tuple[int, int]]
    unpaired: tuple[int, ...]
    paired: dict[str, PairedDifference]

    @property
    def problems(self) -> list[str]:
        """One line for each seed whose two runs did not do the same work."""
        unequal = [
            f"matched_work: seed {seed}: {run} response tokens against {base} of the baseline ({run / base - 1:+.2%})"
            if base
            else f"matched_work: seed {seed}: {run} response tokens against none of the baseline"
            for seed, (run, base) in self.work.items()
            if run != base
        ]
        return unequal + [f"matched_work: seed {seed} has no partner in the other run" for seed in self.unpaired]


def pool_seeds(entries: Sequence[StepEntry], cap_hits: tuple[int, int] | None = None) -> Totals:
    """Pool steps by seed.

    Args:
        entries: the steps of a run, at least one.
        cap_hits: short and global cap hits of the whole run, for runs of one seed whose events do not tell.
    """
    seeds = sorted({entry.occupancy.log.key.seed for entry in entries})
    found = [_pool(seed, [entry for entry in entries if entry.occupancy.log.key.seed == seed]) for seed in seeds]
    if len(found) == 1 and found[0].cap_hits is None and cap_hits is not None:
        found = [replace(found[0], cap_hits=cap_hits)]
    return Totals(tuple(found), max(entry.occupancy.log.world_size for entry in entries))


def compare(run: Totals, baseline: Totals) -> Gains:
    """Gains of a run over a baseline: ``[A- / B+ - 1, A+ / B- - 1]`` for bounded quantities."""
    ours = {seed.seed: seed for seed in run.seeds}
    theirs = {seed.seed: seed for seed in baseline.seeds}
    shared = sorted(ours.keys() & theirs.keys())
    measures: dict[str, Callable[[SeedTotals], float]] = {
        "window_seconds": lambda seed: seed.window_seconds,
        "throughput": lambda seed: seed.throughput,
        "efficiency": lambda seed: seed.efficiency.mid,
    }
    return Gains(
        throughput=run.throughput / baseline.throughput - 1 if baseline.throughput else math.inf,
        efficiency=gain(run.efficiency, baseline.efficiency),
        cost=gain(run.cost, baseline.cost) if run.cost and baseline.cost else None,
        work={seed: (ours[seed].response_tokens, theirs[seed].response_tokens) for seed in shared},
        unpaired=tuple(sorted(ours.keys() ^ theirs.keys())),
        paired={
            name: paired_difference([of(ours[s]) for s in shared], [of(theirs[s]) for s in shared])
            for name, of in measures.items()
            if shared
        },
    )


def _pool(seed: int, entries: list[StepEntry]) -> SeedTotals:
    logs = [entry.occupancy.log for entry in entries]
    figures = [entry.figures for entry in entries]
    responses = [entry.responses for entry in entries]
    hits = [log.cap_hits for log in logs]
    waits = [figure.waiting for figure in figures]
    reuse = [entry.reuse for entry in entries]
    return SeedTotals(
        seed=seed,
        epochs=tuple(sorted({log.key.epoch for log in logs if log.key.epoch is not None})),
        steps=len(entries),
        window_seconds=math.fsum(log.seconds for log in logs),
        response_tokens=sum(log.response_tokens for log in logs),
        occupied=total(entry.occupancy.occupied for entry in entries),
        responses=None if None in responses else sum(count for count in responses if count is not None),
        cap_hits=None
        if None in hits
        else (sum(h["short"] for h in hits if h is not None), sum(h["global"] for h in hits if h is not None)),
        preemptions=sum(entry.preemptions for entry in entries),
        decode_full=_sum_known([figure.decode_full for figure in figures]),
        decode_eager=_sum_known([figure.decode_eager for figure in figures]),
        dummy_seconds=_sum_known([figure.dummy_seconds for figure in figures]),
        waiting=None if None in waits else _sum_known(waits),
        exit_proxy=_sum_known([figure.exit_proxy for figure in figures]),
        reuse=_sum_reuse(reuse),
    )


def _sum_known(values: Sequence[Number | None]) -> Number | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _sum_reuse(values: Sequence[Reuse | None]) -> Reuse | None:
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return Reuse(total(value.inter for value in known), total(value.intra for value in known))
