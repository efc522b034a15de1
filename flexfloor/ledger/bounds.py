"""Intervals that a clock's resolution leaves open, and their outward rounding for print.

Bounds are clock resolution, not statistical confidence (seed 001 appendix C).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

# Float noise of a sum of window-relative times, in units of the printed digit; far below any clock's resolution.
_NOISE = 1e-9


@dataclass(frozen=True, slots=True)
class Bounds:
    """A quantity known to lie in ``[lo, hi]``."""

    lo: float
    hi: float

    @classmethod
    def exact(cls, value: float) -> Bounds:
        """Bounds that leave nothing open."""
        return cls(value, value)

    @property
    def mid(self) -> float:
        """Midpoint, for plots only."""
        return (self.lo + self.hi) / 2

    def __add__(self, other: Bounds) -> Bounds:
        return Bounds(self.lo + other.lo, self.hi + other.hi)

    def scaled(self, factor: float) -> Bounds:
        """Both ends times a factor of at least 0."""
        return Bounds(self.lo * factor, self.hi * factor)

    def dividing(self, work: float) -> Bounds:
        """``[work / hi, work / lo]`` for ``work`` of at least 0; inf where this quantity can be 0."""
        if work == 0:
            return Bounds(0.0, 0.0)
        return Bounds(*(work / end if end > 0 else math.inf for end in (self.hi, self.lo)))

    def over(self, other: Bounds) -> Bounds:
        """Ratio of two independent positive quantities: ``[lo / other.hi, hi / other.lo]``."""
        return Bounds(
            self.lo / other.hi if other.hi > 0 else math.inf,
            self.hi / other.lo if other.lo > 0 else math.inf,
        )

    def outward(self, digits: int) -> Bounds:
        """Rounded to ``digits`` decimals so that the printed interval never leaves out a possible value."""
        return Bounds(_round_down(self.lo, digits), -_round_down(-self.hi, digits))

    def text(self, digits: int = 2) -> str:
        """``[21.73, 21.88]``, outward-rounded."""
        out = self.outward(digits)
        return f"[{out.lo:,.{digits}f}, {out.hi:,.{digits}f}]"

    def as_list(self) -> list[float]:
        """``[lo, hi]`` for JSON."""
        return [self.lo, self.hi]


ZERO = Bounds(0.0, 0.0)


def total(items: Iterable[Bounds]) -> Bounds:
    """Sum of bounds; ``[0, 0]`` of none."""
    found = list(items)
    return Bounds(math.fsum(b.lo for b in found), math.fsum(b.hi for b in found))


def mean(items: Iterable[Bounds]) -> Bounds:
    """Unweighted mean of bounds.

    Raises:
        ZeroDivisionError: no items.
    """
    found = list(items)
    return total(found).scaled(1 / len(found))


def gain(run: Bounds, baseline: Bounds) -> Bounds:
    """Relative gain ``[run- / baseline+ - 1, run+ / baseline- - 1]`` of a run over a baseline."""
    ratio = run.over(baseline)
    return Bounds(ratio.lo - 1, ratio.hi - 1)


def _round_down(value: float, digits: int) -> float:
    if not math.isfinite(value):
        return value
    grid = 10.0**digits
    scaled = value * grid
    nearest = round(scaled)
    near = abs(scaled - nearest) <= _NOISE * max(1.0, abs(scaled) * 1e-3)
    return (nearest if near else math.floor(scaled)) / grid
