"""The least that explains a run's intervals: step times at a few batches, none negative, never falling in the batch.

Absolute errors are minimised by reweighted least squares under non-negative weights, so that single stalls of a busy
machine do not bend the table.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flexfloor.simulate.costs import Load

Floats = NDArray[np.float64]
LOADS: tuple[Load, Load] = ("largest", "mean")
MAX_KNOTS = 6
"""Most batches of one EP size that get a step time of their own."""


@dataclass(frozen=True)
class Knot:
    """A calibrated step time and how many iterations lie next to it."""

    ep: int
    batch: int
    seconds: float
    iterations: int


@dataclass
class Interval:
    """Seconds between two marks of one step, and the iterations between them.

    Attributes:
        seconds: measured.
        first: whether it begins with the step itself: installation and prefill lie in it.
        counts: iterations by (EP size, batch), for either way of counting a world's batch.
    """

    seconds: float
    first: bool
    counts: dict[Load, dict[tuple[int, float], int]] = field(default_factory=dict)

    @property
    def iterations(self) -> int:
        """All of them."""
        return sum(self.counts["largest"].values())


@dataclass(frozen=True)
class Fit:
    """Step times that explain intervals.

    Attributes:
        knots: step times at a few batches.
        start: seconds from rollout_start to the first decode step.
        errors: predicted less measured seconds of each interval.
    """

    knots: list[Knot]
    start: float
    errors: list[float]

    @property
    def miss(self) -> float:
        """Sum of the absolute errors (seconds)."""
        return math.fsum(abs(error) for error in self.errors)


def fitted(intervals: Sequence[Interval], load: Load) -> Fit:
    """Step times at the knots, the start time, and predicted less measured seconds of each interval."""
    seen: dict[int, dict[float, int]] = defaultdict(dict)
    for interval in intervals:
        for (ep, batch), count in interval.counts[load].items():
            seen[ep][batch] = seen[ep].get(batch, 0) + count
    places = {ep: _places(own) for ep, own in sorted(seen.items())}
    columns = {(ep, place): k for k, (ep, place) in enumerate((e, p) for e, own in places.items() for p in own)}
    terms = np.zeros((len(intervals), len(columns) + 1))
    for row, interval in enumerate(intervals):
        terms[row, -1] = interval.first
        for (ep, batch), count in interval.counts[load].items():
            for place, share in _shares(batch, places[ep]):
                # A knot's time is the sum of the rises up to it, so that times never fall in the batch.
                for lower in places[ep][: places[ep].index(place) + 1]:
                    terms[row, columns[ep, lower]] += count * share
    measured = np.array([interval.seconds for interval in intervals])
    weights = 1 / np.sqrt([interval.iterations for interval in intervals])
    rises = least_absolute(terms, measured, weights)
    knots = []
    for ep, own in places.items():
        levels = np.cumsum([rises[columns[ep, place]] for place in own])
        for place, level in zip(own, levels.tolist(), strict=True):
            near = sum(n for batch, n in seen[ep].items() if any(p == place for p, _ in _shares(batch, own)))
            knots.append(Knot(ep, place, level, int(near)))
    return Fit(knots, float(rises[-1]), (terms @ rises - measured).tolist())


def least_absolute(terms: Floats, measured: Floats, weights: Floats, rounds: int = 60) -> Floats:
    """Weights of the terms, none negative, of (almost) least weighted absolute error: reweighted least squares."""
    solved = non_negative(terms * weights[:, None], measured * weights)
    blunt = float(np.max(np.abs(terms @ solved - measured) * weights, initial=0.0))
    for _ in range(rounds):
        # Errors below `blunt` count as squares; it shrinks, so that no early fit of an outlier is kept.
        miss = np.abs(terms @ solved - measured) * weights
        strength = weights / np.sqrt(np.maximum(miss, max(blunt, 1e-12)))
        solved = non_negative(terms * strength[:, None], measured * strength)
        blunt *= 0.7
    return solved


def non_negative(terms: Floats, measured: Floats) -> Floats:
    """Least squares with no weight below 0 (Lawson and Hanson's active set, 1974)."""
    count = terms.shape[1]
    solved, free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(10 * count):
        slope = terms.T @ (measured - terms @ solved)
        slope[free] = -np.inf
        best = int(np.argmax(slope))
        if free.all() or slope[best] <= 1e-10 * float(np.abs(terms.T @ measured).max()):
            break
        free[best] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(terms[:, free], measured, rcond=None)[0]
            low = free & (trial <= 0)
            if not low.any():
                break
            share = float(np.min(solved[low] / np.maximum(solved[low] - trial[low], 1e-300)))
            solved = solved + share * (trial - solved)
            free &= solved > 1e-14
            solved[~free] = 0.0
            if not free.any():
                trial = solved
                break
        solved = trial
    return solved


def _places(counts: dict[float, int]) -> list[int]:
    """Batches that become knots: the smallest, the largest, and quantiles of the iterations between."""
    whole: dict[int, int] = defaultdict(int)
    for batch, count in counts.items():
        whole[max(1, round(batch))] += count
    batches = sorted(whole)
    if len(batches) <= MAX_KNOTS:
        return batches
    total, so_far, kept = sum(whole.values()), 0, [batches[0]]
    for batch in batches:
        so_far += whole[batch]
        if so_far * (MAX_KNOTS - 1) >= len(kept) * total and batch != kept[-1] and len(kept) < MAX_KNOTS - 1:
            kept.append(batch)
    return sorted({*kept, batches[-1]})


def _shares(batch: float, places: Sequence[int]) -> list[tuple[int, float]]:
    """Weights of the neighbouring knots in a linear interpolation."""
    for low, high in pairwise(places):
        if low <= batch <= high:
            share = (batch - low) / (high - low)
            return [(place, weight) for place, weight in ((low, 1 - share), (high, share)) if weight > 0]
    return [(places[0] if batch <= places[0] else places[-1], 1.0)]
