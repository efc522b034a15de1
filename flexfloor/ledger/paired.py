"""Student's t interval of a few paired seeds, and sample standard deviations (seed 001 appendix D)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PairedDifference:
    """Mean of the differences run minus baseline over paired seeds, with a two-sided 95 % Student t interval.

    Attributes:
        seeds: number of pairs.
        mean: mean difference.
        low: lower end; None for fewer than two pairs.
        high: upper end; None for fewer than two pairs.
    """

    seeds: int
    mean: float
    low: float | None
    high: float | None


def paired_difference(run: Sequence[float], baseline: Sequence[float]) -> PairedDifference:
    """Compare values of the same seeds in the same order.

    Raises:
        ValueError: different numbers of values, or none.
    """
    differences = [a - b for a, b in zip(run, baseline, strict=True)]
    if not differences:
        raise ValueError("no paired seeds")
    count, mean = len(differences), math.fsum(differences) / len(differences)
    if count < 2:
        return PairedDifference(count, mean, None, None)
    half = student_t(0.975, count - 1) * statistics.stdev(differences) / math.sqrt(count)
    return PairedDifference(count, mean, mean - half, mean + half)


def sample_sd(values: Sequence[float]) -> float | None:
    """Sample standard deviation (n - 1); None for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def student_t(probability: float, degrees: int) -> float:
    """Quantile of Student's t for a whole number of degrees of freedom; t(0.975, 2) = 4.30265.

    Raises:
        ValueError: a probability outside of (0.5, 1), or fewer than one degree of freedom.
    """
    if not 0.5 < probability < 1 or degrees < 1:
        raise ValueError(f"no quantile {probability} with {degrees} degrees of freedom")
    central, low, high = 2 * probability - 1, 0.0, 1.0
    while _central_mass(high, degrees) < central:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _central_mass(middle, degrees) < central else (low, middle)
    return (low + high) / 2


def _central_mass(t: float, degrees: int) -> float:
    """P(|T| <= t) by the finite series of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    theta = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(theta), math.sin(theta)
    term, series = (cosine, 0.0) if degrees % 2 else (1.0, 0.0)
    for k in range(1 + degrees % 2, degrees, 2):
        series += term
        term *= cosine**2 * k / (k + 1)
    return 2 / math.pi * (theta + sine * series) if degrees % 2 else sine * series
