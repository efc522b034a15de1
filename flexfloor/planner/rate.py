"""What a schedule is worth at the measured speed of each EP size (beyond the paper, which counts released area).

All responses of a step decode from its first token on, so at token position t the largest batch of a rank is the
number of columns b with `longest[b] > t`, where longest[b] is the largest b-th longest response of any rank. The
world decodes in lock step: every position takes what the table says for that batch at the world's EP size, with or
without an idle rank. Between the ends of these columns, the ranks' completions and the quorum times nothing
changes, so a step is a few hundred pieces, whatever its length:

    prepare | decode at N .. tau_1 | shrink | decode at f_1 .. tau_2 | shrink | .. T | wait for sleepers | restore
                                     leavers: release, then free ....................|

Not in it: prefill, queueing above the engine's batch limit, preemption, padding to captured batch sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flexfloor import exchange
from flexfloor.config import FlexFloorConfig
from flexfloor.config.sections import TransitionsConfig
from flexfloor.errors import InputError
from flexfloor.planner.demand import MICRO, Demand
from flexfloor.planner.grouping import Grouping
from flexfloor.step_times import Curve, StepTimes

Floats = NDArray[np.float64]

_SAME = 1e-9
"""Efficiencies this near to each other, relatively, are one; the larger floor is taken."""


@dataclass(frozen=True)
class Prediction:
    """What a schedule is expected to take.

    Attributes:
        seconds: rollout window T.
        rank_seconds: occupied rank-time H.
        tokens: generated tokens W.
    """

    seconds: float
    rank_seconds: float
    tokens: float

    @property
    def efficiency(self) -> float:
        """Tokens a rank-second, E = W/H; 0 where nothing takes time."""
        return self.tokens / self.rank_seconds if self.rank_seconds > 0 else 0.0


@dataclass(frozen=True)
class Load:
    """The decode work of N ranks by token position.

    Attributes:
        longest: at index b - 1 the position up to which some rank runs b responses, descending, tokens.
        ends: completion of each rank, ascending, 0 for a rank without responses.
        tokens: tokens of all responses.
        prompt: mean prompt, tokens; every response's context is this and its position.
    """

    longest: Floats
    ends: Floats
    tokens: float
    prompt: float

    @classmethod
    def of(cls, ranks: Sequence[Iterable[float]], prompt: float = 0.0) -> Load:
        """The load of the given response lengths, one sequence a rank."""
        rows = [np.sort(np.asarray(list(lengths), dtype=float))[::-1] for lengths in ranks]
        longest = np.zeros(max((len(row) for row in rows), default=0))
        for row in rows:
            np.maximum(longest[: len(row)], row, out=longest[: len(row)])
        ends = np.sort(np.array([row[0] if len(row) else 0.0 for row in rows]))
        return cls(longest, ends, float(sum(row.sum() for row in rows)), prompt)


def expected_lengths(demand: Demand) -> Floats:
    """Response lengths in tokens, shape (b, n): the latest epoch's, stretched so that the longest is the prediction."""
    latest, predicted = demand.lengths.astype(float), (demand.completions / MICRO)[:, None]
    lengths: Floats = np.minimum(latest * (predicted / latest[:, :1]), predicted)
    lengths[:, :1] = predicted
    return lengths


def predict(
    load: Load, sizes: Sequence[int], times: Sequence[float], curves: Mapping[int, Curve], costs: TransitionsConfig
) -> Prediction:
    """What a schedule takes.

    Args:
        load: the work of the ranks.
        sizes: ladder, the world size first.
        times: quorum time of every stage after the first, tokens, ascending; a quorum at the end shrinks nothing.
        curves: step times by EP size.
        costs: what shrinking costs.
    """
    tail = float(load.ends[-1])
    stages = [(time, size) for time, size in zip(times, sizes[1:], strict=True) if time < tail]
    deepest = dict(stages)
    now = costs.prepare_s if len(sizes) > 1 else 0.0
    free_from: list[tuple[int, float]] = []
    start, world = 0.0, sizes[0]
    for stop, size in [*deepest.items(), (tail, 0)]:
        now += _decode(load, start, stop, world, curves[world])
        if size:
            now += costs.shrink_s
            free_from.append((world - size, now + costs.release_s))
            world = size
        start = stop
    end = now
    if free_from:
        end = max([now, *(when for _, when in free_from)]) + costs.restore_s
    free = sum(ranks * max(0.0, now - when) for ranks, when in free_from)
    return Prediction(end, sizes[0] * end - free, load.tokens)


def _decode(load: Load, start: float, stop: float, world: int, curve: Curve) -> float:
    """Seconds from one token position to another in one world; exact, as time is linear in context on each piece."""
    inner = np.concatenate([load.longest, load.ends, curve.contexts - load.prompt])
    cuts = np.unique(np.concatenate([[start, stop], inner[(inner > start) & (inner < stop)]]))
    if len(cuts) < 2:
        return 0.0
    middles = (cuts[1:] + cuts[:-1]) / 2
    batches = len(load.longest) - np.searchsorted(load.longest[::-1], middles, side="right")
    busy = len(load.ends) - np.searchsorted(load.ends, middles, side="right")
    pieces = zip(np.diff(cuts).tolist(), middles.tolist(), batches.tolist(), (busy < world).tolist(), strict=True)
    return math.fsum(
        span * curve.seconds(b, idle=idle, context=middle + load.prompt) for span, middle, b, idle in pieces
    )


class RateModel:
    """Predictions for the steps of one configuration.

    Args:
        config: the configuration; `rate.is_on` holds.

    Raises:
        InputError: the table is missing or malformed, or does not hold an EP size or batch that is needed.
    """

    def __init__(self, config: FlexFloorConfig) -> None:
        rate = config.rate
        assert rate.table is not None
        self._rate, self._table = rate, StepTimes.load(rate.table)
        self.sizes = tuple(s for s in config.admissible_sizes if s == config.world_size or s in config.capacity)
        missing = [size for size in sorted(self.sizes) if size not in self._table.sizes]
        if missing and not rate.extrapolate:
            what = (
                f"has no step times for EP {_listed(missing)} (it has EP {_listed(self._table.sizes)}); measure them, "
                "remove these floors, or set rate.extrapolate: true"
            )
            raise InputError(what, file=rate.table, field="ep")
        for size in missing:
            self._refuse_other_exchange(config, size)
        self._curves = {
            size: self._table.curve(size, extrapolate=rate.extrapolate, experts=config.num_experts)
            for size in self.sizes
        }
        batch = -(-config.step_prompts // config.world_size) * config.responses_per_prompt
        self._beyond = [size for size in sorted(self.sizes) if batch > self._curves[size].largest]
        if self._beyond and not rate.extrapolate:
            what = (
                f"ends at batch {self._curves[self._beyond[0]].largest} for EP {self._beyond[0]}, a rank of this "
                f"configuration starts with {batch} responses; measure it or set rate.extrapolate: true"
            )
            raise InputError(what, file=rate.table, field="batch_per_rank")

    def _refuse_other_exchange(self, config: FlexFloorConfig, size: int) -> None:
        """No step time is guessed from worlds that exchange tokens in another way."""
        if config.hardware is None or config.num_experts is None:
            return
        known = self._table.sizes
        below, above = [s for s in known if s < size][-1:], [s for s in known if s > size][:1]
        near = [*below, *above] if below and above else below or above
        if not exchange.same(config.hardware, config.num_experts, [size, *near]):
            what = f"has no step times for EP {size}, which exchanges tokens in another way than EP {_listed(near)}"
            raise InputError(f"{what} on {config.hardware}; measure them", file=config.rate.table, field="ep")

    @property
    def decides(self) -> bool:
        """Whether floors are chosen by predicted efficiency."""
        return self._rate.objective == "efficiency"

    def predict(self, demand: Demand, grouping: Grouping, prompt: float) -> Prediction:
        """What a grouping takes; ``prompt`` is the mean prompt in tokens."""
        lengths = expected_lengths(demand)
        load = Load.of([lengths[list(group)].ravel() for group in grouping.groups], prompt)
        times = [time / MICRO for time in grouping.times]
        return predict(load, grouping.ladder.sizes, times, self._curves, self._rate.transitions)

    def best(self, demand: Demand, candidates: Sequence[Grouping], prompt: float) -> tuple[Grouping, tuple[str, ...]]:
        """The candidate to take, see `choose`; and, if `rate.explain`, a note for each."""
        predictions = [self.predict(demand, grouping, prompt) for grouping in candidates]
        floors = [grouping.ladder.floor for grouping in candidates]
        taken = candidates[choose(predictions, floors, self._rate.eps)]
        if not self._rate.explain:
            return taken, ()
        rows = sorted(zip(floors, predictions, strict=True), key=lambda row: row[0])
        return taken, tuple(
            f"floor {floor}: {p.seconds:.6g} s, {p.rank_seconds:.6g} rank-s, {p.efficiency:.6g} tokens a rank-s"
            for floor, p in rows
        )

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the plan should know of all predictions."""
        told = []
        for source in ("interpolated", "extrapolated"):
            own = [size for size in sorted(self.sizes) if self._table.source(size) == source]
            if own:
                told.append(f"EP {_listed(own)}: step times are {source} from EP {_listed(self._table.sizes)}")
        if self._beyond:
            told.append(f"EP {_listed(self._beyond)}: the largest batches lie above the table and are extrapolated")
        if self._rate.explain and not self._table.has_context:
            told.append("the step times have no context axis: a step costs the same at any response length")
        return tuple(told)


def choose(predictions: Sequence[Prediction], floors: Sequence[int], eps: float) -> int:
    """Index of the most efficient candidate that takes at most (1 + eps) times as long as the fastest one.

    Candidates of one efficiency (up to rounding): the larger floor, then the earlier one.
    """
    limit = (1 + eps) * min(p.seconds for p in predictions)
    allowed = [k for k, p in enumerate(predictions) if p.seconds <= limit]
    best = max(predictions[k].efficiency for k in allowed)
    return max((k for k in allowed if predictions[k].efficiency >= best * (1 - _SAME)), key=lambda k: (floors[k], -k))


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
