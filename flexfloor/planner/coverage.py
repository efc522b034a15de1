"""How many ranks the k longest prompts need at least, for every k at once (pairs only).

If the k longest prompts admit at most m disjoint KV-safe pairs among themselves, they touch at least k - m ranks, so
a stage that leaves f ranks unfinished cannot complete before k - m <= f. m is bounded by half a maximum matching of
the bipartite double cover, which is the fractional matching number. It is grown prompt by prompt from the longest
down: a new prompt adds one vertex to either side, and only augmenting paths that end there need a search.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from flexfloor.planner.matching import Group

_FREE = -1


class PairCover:
    """Lower bounds on the ranks that the longest prompts need.

    Args:
        safe: safe[i, j] says whether prompts i and j fit on one rank; symmetric, shape (b, b), False diagonal.
        marks: values of k at which the matched pairs are kept.
    """

    def __init__(self, safe: NDArray[np.bool_], marks: Collection[int] = ()) -> None:
        count = len(safe)
        packed = np.packbits(safe, axis=1, bitorder="little")
        self._near = [int.from_bytes(row.tobytes(), "little") for row in packed]
        self._partner = ([_FREE] * count, [_FREE] * count)
        self._active = 0
        self._free = [0, 0]
        self.ranks = np.zeros(count + 1, dtype=np.int64)
        """ranks[k]: least number of ranks that hold the k longest prompts."""
        self.pairs: set[Group] = set()
        """Pairs of the maximum matchings at the marks and at the end."""
        matched = 0
        for k, prompt in enumerate(range(count - 1, -1, -1), start=1):
            bit = 1 << prompt
            self._free[0] |= bit
            matched += self._augment(prompt, 0)
            self._active |= bit
            self._free[1] |= bit
            matched += self._augment(prompt, 1)
            self.ranks[k] = k - matched // 2
            if k in marks or k == count:
                left = self._partner[0]
                self.pairs.update((min(a, b), max(a, b)) for a, b in enumerate(left) if b != _FREE)

    def _augment(self, start: int, side: int) -> bool:
        """Extends the matching by one pair with an alternating path from a free vertex; False when there is none."""
        mine, theirs = self._partner[side], self._partner[1 - side]
        reachable = self._active if side == 0 else self._active | (1 << start)
        free = self._free[1 - side]
        if not reachable & free:
            return False
        reached_from: dict[int, int] = {}
        stack = [start]
        while stack:
            vertex = stack.pop()
            found = self._near[vertex] & reachable
            ends = found & free
            if ends:
                end = ends.bit_length() - 1
                reached_from[end] = vertex
                self._free[1 - side] &= ~(1 << end)
                self._free[side] &= ~(1 << start)
                while True:
                    vertex = reached_from[end]
                    before = mine[vertex]
                    mine[vertex], theirs[end] = end, vertex
                    if vertex == start:
                        return True
                    end = before
            reachable &= ~found
            while found:
                low = found & -found
                found ^= low
                other = low.bit_length() - 1
                reached_from[other] = vertex
                stack.append(theirs[other])
        return False
