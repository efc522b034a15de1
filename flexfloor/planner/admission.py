"""KV admission: the most KV tokens a group's responses hold at once (planner.md section 4; seed 001, eq. 8, 9)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flexfloor.planner.demand import Demand, IntArray

_PAIR_CHUNK = 1 << 22
"""Numbers sorted at once while the peaks of pairs are computed."""


def peak_tokens(rows: IntArray) -> int:
    """Active-token peak A of responses with ``rows`` KV tokens: max over k of k times the k-th largest.

    Args:
        rows: KV tokens of the responses, any shape; empty gives 0.
    """
    if rows.size == 0:
        return 0
    descending = -np.sort(-rows.ravel())
    return int((descending * np.arange(1, descending.size + 1)).max())


def group_peak(demand: Demand, group: Sequence[int]) -> int:
    """Active-token peak A of a group, tokens."""
    return peak_tokens(demand.rows[list(group)]) if group else 0


def group_need(demand: Demand, group: Sequence[int]) -> int:
    """A + P of a group: what admission compares with the capacity, tokens."""
    return group_peak(demand, group) + int(demand.prompts[list(group)].sum()) if group else 0


def column_peaks(demand: Demand, columns: IntArray) -> IntArray:
    """Active-token peaks of many groups of one size.

    Args:
        demand: the step.
        columns: groups, shape (count, size).

    Returns:
        Peaks in tokens, shape (count,).
    """
    count, size = columns.shape
    width = size * demand.rows.shape[1]
    peaks = np.empty(count, dtype=np.int64)
    weights = np.arange(1, width + 1)
    chunk = max(1, _PAIR_CHUNK // max(1, width))
    for start in range(0, count, chunk):
        merged = -demand.rows[columns[start : start + chunk]].reshape(-1, width)
        merged.sort(axis=1)
        peaks[start : start + chunk] = (-merged * weights).max(axis=1)
    return peaks


def column_needs(demand: Demand, columns: IntArray, peaks: IntArray) -> IntArray:
    """A + P of many groups of one size, tokens, shape (count,)."""
    needs: IntArray = peaks + demand.prompts[columns].sum(axis=1)
    return needs


def fits_in(demand: Demand, members: slice | list[int], groups: int, capacity: int) -> bool:
    """Whether prompts might fit into ``groups`` ranks; False is a proof that they do not.

    If k responses of at least theta KV tokens live in g groups, one group holds ceil(k/g) of them, hence a peak of
    at least theta*ceil(k/g); and all groups together hold at most g*capacity.

    Args:
        demand: the step.
        members: the prompts, positions in demand order.
        groups: number of groups they may use.
        capacity: KV tokens of a rank.
    """
    rows = demand.rows[members]
    if rows.size == 0:
        return True
    if groups <= 0:
        return False
    descending = -np.sort(-rows.ravel())
    ranks = np.arange(1, descending.size + 1)
    if int((descending * -(-ranks // groups)).max()) > capacity:
        return False
    total = int((descending * ranks).max()) + int(demand.prompts[members].sum())
    return total <= groups * capacity
