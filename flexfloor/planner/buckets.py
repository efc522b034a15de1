"""Decode capture sizes with the fewest padded rows (planner.md section 6)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from flexfloor.planner.demand import IntArray

_NEVER = 1 << 60
"""More padded rows than any trace has."""


def choose_buckets(trace: Mapping[int, int], largest: int, limit: int) -> tuple[int, ...]:
    """Capture sizes that minimise the total of padded rows, exactly (dynamic programme over sizes and buckets).

    Args:
        trace: decode steps seen at each active-batch size.
        largest: largest batch that can occur; always the largest capture size.
        limit: most sizes.

    Returns:
        Ascending sizes, at most ``limit``; fewer where more would save nothing. Empty for ``largest`` below 1.
    """
    if largest < 1:
        return ()
    counted = Counter({size: steps for size, steps in trace.items() if 0 < size <= largest and steps > 0})
    sizes = sorted({*counted, largest})
    grid = np.array(sizes, dtype=np.int64)
    steps = np.cumsum([0, *(counted[size] for size in sizes)], dtype=np.int64)
    rows = np.cumsum([0, *(counted[size] * size for size in sizes)], dtype=np.int64)
    count = len(sizes)
    best = [np.concatenate([[0], grid * steps[1:] - rows[1:]])]
    choice = [np.zeros(count + 1, dtype=np.int64)]
    # padded[end - 1, start]: rows padded when sizes start .. end - 1 of the trace run at size end - 1
    padded = grid[:, None] * (steps[1:, None] - steps[:-1]) - (rows[1:, None] - rows[:-1])
    padded[np.triu_indices(count, 1)] = _NEVER
    for _ in range(min(limit, count) - 1):
        totals = best[-1][:-1] + padded
        starts = totals.argmin(axis=1)
        choice.append(np.concatenate([[0], starts]))
        best.append(np.concatenate([[0], totals[np.arange(count), starts]]))
    used = min(range(len(best)), key=lambda level: (int(best[level][count]), level))
    chosen, end = [], count
    for level in range(used, -1, -1):
        if end == 0:
            break
        chosen.append(sizes[end - 1])
        end = int(choice[level][end])
    return tuple(sorted(chosen))


def expected_trace(rows_by_group: list[IntArray]) -> Counter[int]:
    """Decode steps at each active-batch size if responses have the given lengths.

    Args:
        rows_by_group: expected response lengths of each rank's group, tokens.
    """
    trace: Counter[int] = Counter()
    for rows in rows_by_group:
        ascending = np.sort(rows.ravel())
        spans = np.diff(ascending, prepend=0)
        for active, span in zip(range(ascending.size, 0, -1), spans.tolist(), strict=True):
            if span > 0:
                trace[active] += span
    return trace
