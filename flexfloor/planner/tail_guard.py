"""TailGuard: a cap for steps that should be short (planner.md section 3; seed 001, equation 7)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from flexfloor.config import TailGuardConfig
from flexfloor.planner.demand import MICRO


def guard_ratio(ratio_pairs: Mapping[int, Sequence[tuple[int, float]]], guard: TailGuardConfig) -> float | None:
    """The ratio rho: the q-quantile (method `higher`) of the one-sided ratios of the last K transitions.

    Args:
        ratio_pairs: by epoch, the (observed tail, prediction in force before it) of every item that had one.
        guard: settings.

    Returns:
        rho >= 1; ``initial_rho`` where no transition has been seen.
    """
    latest = sorted(epoch for epoch, pairs in ratio_pairs.items() if pairs)[-guard.window :]
    ratios = [
        max(1.0, observed / (predicted + guard.eps)) for epoch in latest for observed, predicted in ratio_pairs[epoch]
    ]
    if not ratios:
        return guard.initial_rho
    return float(np.quantile(ratios, guard.q, method="higher"))


def step_cap(longest_tail: int, rho: float | None, guard: TailGuardConfig) -> int | None:
    """The cap of a step in tokens; None where only the global limit holds.

    Args:
        longest_tail: S, the largest predicted tail of the step, micro-tokens.
        rho: ratio of `guard_ratio`.
        guard: settings.
    """
    if not guard.enabled or rho is None:
        return None
    rounded = math.ceil(rho * (longest_tail / MICRO) / guard.rounding) * guard.rounding
    return min(guard.l_max, max(guard.c_min, rounded))
