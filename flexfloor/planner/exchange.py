"""Exchanges of prompts between two steps: which come next, and which provably leave a step that fits nowhere.

An exchange of k prompts is a layout. Layouts come in ascending disturbance, all of one disturbance together, and are
tested in bulk: a prompt counts at every KV length theta as its responses of at least theta tokens, so that a layout
is a few additions and `admission.fits_in` a comparison (at up to `_LEVELS` lengths; fewer only prove less).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from flexfloor.planner.demand import IntArray, KvRules, Prompt

_LEVELS = 256


@dataclass(frozen=True)
class Block:
    """All layouts of one disturbance, or the first of them.

    Attributes:
        disturbance: sum of the exchanged prompts' distances to the border between the two steps.
        outs: positions that leave the current step, shape (layouts, k), ascending.
        ins: positions that leave the preceding step, shape (layouts, k), descending.
    """

    disturbance: int
    outs: IntArray
    ins: IntArray

    def __len__(self) -> int:
        return len(self.outs)

    def first(self, count: int) -> Block:
        """Its first layouts."""
        return Block(self.disturbance, self.outs[:count], self.ins[:count])


def blocks(before: int, after: int, count: int) -> Iterator[Block]:
    """Exchanges of ``count`` prompts between steps of ``before`` and ``after`` prompts, least disturbance first."""
    if count > min(before, after):
        return
    least = sum(range(count))
    most = [sum(range(size - count, size)) for size in (before, after)]
    for total in range(2 * least, sum(most) + 1):
        pairs = [
            (near, back)
            for own in range(max(least, total - most[0]), min(most[1], total - least) + 1)
            for near in _positions(after, count, own)
            for back in _positions(before, count, total - own)
        ]
        if pairs:
            both = np.array(sorted(pairs), dtype=np.int64)
            yield Block(total + 2 * count, both[:, 0], before - 1 - both[:, 1])


def _positions(limit: int, count: int, total: int) -> Iterator[tuple[int, ...]]:
    """Ascending choices of ``count`` positions below ``limit`` whose sum is ``total``."""
    if count == 1:
        if 0 <= total < limit:
            yield (total,)
        return
    if count == 2:
        for first in range(max(0, total - limit + 1), (total + 1) // 2):
            yield (first, total - first)
        return
    yield from (chosen for chosen in combinations(range(min(limit, total + 1)), count) if sum(chosen) == total)


class _Profile:
    """Prompts at one response limit: responses of at least theta KV tokens, for every theta looked at."""

    def __init__(self, prompts: Sequence[Prompt], limit: int, rules: KvRules) -> None:
        rows = rules.response_rows(rules.expected_lengths(prompts), limit)[:, ::-1]
        levels = np.unique(rows)
        if len(levels) > _LEVELS:
            levels = levels[np.linspace(0, len(levels) - 1, _LEVELS).astype(np.int64)]
        self.levels: IntArray = levels
        self.counts: IntArray = rows.shape[1] - np.array([np.searchsorted(row, levels) for row in rows])
        self.prompts = rules.prompt_rows(prompts)

    def fits(self, counts: IntArray, prompts: IntArray, groups: int, capacity: int) -> NDArray[np.bool_]:
        """`admission.fits_in` at these lengths; ``counts`` (layouts, lengths), ``prompts`` (layouts,) in KV tokens."""
        highest = (-(-counts // groups) * self.levels).max(axis=1)
        total = (counts * self.levels).max(axis=1) + prompts
        passed: NDArray[np.bool_] = (highest <= capacity) & (total <= groups * capacity)
        return passed


class ExchangeTest:
    """Proves that layouts fit at no floor.

    Args:
        previous: prompts of the preceding step.
        current: prompts of the step that was not admitted.
        limit_of: response limit in tokens of a step whose largest predicted tail is given in micro-tokens.
        rules: KV accounting.
        groups: ranks of the full world.
        capacity: largest KV capacity of any candidate floor, tokens a rank.
    """

    def __init__(
        self,
        previous: Sequence[Prompt],
        current: Sequence[Prompt],
        *,
        limit_of: Callable[[int], int],
        rules: KvRules,
        groups: int,
        capacity: int,
    ) -> None:
        self._prompts, self._split = [*previous, *current], len(previous)
        self._tails = np.array([p.tail for p in self._prompts], dtype=np.int64)
        self._limit_of, self._rules = limit_of, rules
        self._groups, self._capacity = groups, capacity
        self._profiles: dict[int, _Profile] = {}

    def hopeful(self, block: Block) -> Block:
        """The layouts that are not ruled out."""
        kept = np.ones((len(block), len(self._tails) - self._split), dtype=bool)
        np.put_along_axis(kept, block.outs, values=False, axis=1)
        staying = np.where(kept, self._tails[self._split :], 0).max(axis=1)
        longest = np.maximum(staying, self._tails[block.ins].max(axis=1))
        limits = np.array([self._limit_of(int(tail)) for tail in longest])
        passed = np.zeros(len(block), dtype=bool)
        for limit in np.unique(limits):
            chosen = np.flatnonzero(limits == limit)
            profile = self._profile(int(limit))
            ins, outs = block.ins[chosen], block.outs[chosen]
            counts, prompts = self._after(profile.counts, ins, outs), self._after(profile.prompts, ins, outs)
            passed[chosen] = profile.fits(counts, prompts, self._groups, self._capacity)
        return Block(block.disturbance, block.outs[passed], block.ins[passed])

    def rules_out(self, count: int) -> bool:
        """Whether every exchange of ``count`` prompts is ruled out.

        The best that could happen at every length by itself: the prompts with most such responses leave, those with
        fewest come, and the limit is that of the step without its longest prompts.
        """
        if count >= len(self._tails) - self._split:
            return False
        shortest = int(np.sort(self._tails[self._split :])[-1 - count])
        profile = self._profile(self._limit_of(shortest))

        def least(values: IntArray) -> IntArray:
            ordered = np.sort(values[self._split :], axis=0)
            coming = np.sort(values[: self._split], axis=0)[:count].sum(axis=0)
            return np.asarray(ordered[: len(ordered) - count].sum(axis=0) + coming)

        counts, prompts = least(profile.counts)[None, :], least(profile.prompts)[None]
        return not bool(profile.fits(counts, prompts, self._groups, self._capacity)[0])

    def _after(self, values: IntArray, ins: IntArray, outs: IntArray) -> IntArray:
        """What the current step's prompts add up to after each exchange."""
        moved = values[ins].sum(axis=1) - values[self._split + outs].sum(axis=1)
        return np.asarray(values[self._split :].sum(axis=0) + moved)

    def _profile(self, limit: int) -> _Profile:
        if limit not in self._profiles:
            self._profiles[limit] = _Profile(self._prompts, limit, self._rules)
        return self._profiles[limit]
