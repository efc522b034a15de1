"""A second, slow planner for tiny steps: every grouping tried, every formula written out again from planner.md."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations, pairwise

from flexfloor.config import FlexFloorConfig, config_from_mapping
from flexfloor.history import Observation, replay


def make_config(world_size, step_prompts, responses, capacity, **changes) -> FlexFloorConfig:
    """A configuration for tests: no cap, mu 1, capacities of the natural residency."""
    data = {
        "world_size": world_size,
        "step_prompts": step_prompts,
        "responses_per_prompt": responses,
        "floors": {"natural": sorted(capacity)},
        "mu": 1,
        "kv": {"capacity": {"natural": capacity}},
        "tail_guard": {"enabled": False},
    }
    data.update(changes)
    return config_from_mapping(data)


def make_history(lengths, prompt_tokens=0, epoch=0, alpha=0.3):
    """History of one epoch from {item: lengths}."""
    tokens = prompt_tokens if isinstance(prompt_tokens, dict) else dict.fromkeys(lengths, prompt_tokens)
    return replay([Observation(i, epoch, tokens[i], tuple(ls)) for i, ls in lengths.items()], alpha)


def partitions(members, sizes):
    """Every way to split members into groups whose sizes are the multiset ``sizes``."""
    if not members:
        yield ()
        return
    first, rest = members[0], members[1:]
    for size in sorted(set(sizes)):
        left = list(sizes)
        left.remove(size)
        for others in combinations(rest, size - 1):
            remaining = [m for m in rest if m not in others]
            for tail in partitions(remaining, left):
                yield ((first, *others), *tail)


def peak(lengths, block=1):
    """Active-token peak by its definition: the largest theta times the number of responses that long."""
    rows = [block * math.ceil((length + block - 1) / block) for length in lengths]
    return max((theta * sum(row >= theta for row in rows) for theta in rows), default=0)


class Oracle:
    """All groupings of one step.

    Args:
        config: the configuration; no cap below l_max is applied.
        lengths: item -> n expected lengths; the tail is the maximum.
        prompt_tokens: item -> tokens.
    """

    def __init__(self, config, lengths, prompt_tokens):
        self.config, self.lengths, self.prompt_tokens = config, lengths, prompt_tokens
        self.world = config.world_size
        items = sorted(lengths)
        small, larger = divmod(len(items), self.world)
        sizes = [s for s in [small] * (self.world - larger) + [small + 1] * larger if s]
        self.groupings = list(partitions(items, sizes))
        self.empty = self.world - len(sizes)
        self._needs = {}

    def need(self, group):
        """(A, A + P) of a group."""
        if group not in self._needs:
            self._needs[group] = self._need(group)
        return self._needs[group]

    def _need(self, group):
        kv, limit, mu = self.config.kv, self.config.tail_guard.l_max, Fraction(self.config.mu)
        longer = [min(limit, math.ceil(x * mu)) for item in group for x in self.lengths[item]]
        a = peak(longer, kv.block_tokens)
        times = 1 if kv.prompt_sharing else self.config.responses_per_prompt
        p = sum(kv.block_tokens * (self.prompt_tokens[i] // kv.block_tokens) * times for i in group)
        return a, a + p

    def tail(self, group):
        return max(min(max(self.lengths[i]), self.config.tail_guard.l_max) for i in group)

    def cost(self, grouping):
        total = 0
        for group in grouping:
            tails = [max(self.lengths[i]) for i in group]
            total += 10**6 * (max(tails) - min(tails)) + 10**3 * self.tail(group) + self.need(group)[0]
        return total

    def skew(self, grouping):
        tails = [[max(self.lengths[i]) for i in group] for group in grouping]
        return sum(max(t) - min(t) for t in tails)

    def ladder(self, floor):
        sizes = [s for s in self.config.admissible_sizes if s in self.config.capacity or s == self.world]
        return [s for s in sizes if s >= floor]

    def area(self, grouping, floor):
        ends = sorted([0] * self.empty + [self.tail(g) for g in grouping])
        ladder = self.ladder(floor)
        return sum((a - b) * (ends[-1] - ends[self.world - b - 1]) for a, b in pairwise(ladder))

    def safe(self, grouping, capacity):
        return all(self.need(group)[1] <= capacity for group in grouping)

    def times(self, grouping, floor):
        ends = sorted([0] * self.empty + [self.tail(g) for g in grouping])
        return tuple(ends[self.world - size - 1] for size in self.ladder(floor)[1:])

    def best(self):
        """(area, floor, {quorum times: (cost, grouping)}) of the best plans; None where no floor admits any.

        Several schedules may share the largest area; within each the cheapest grouping is kept, and of equally
        cheap ones the lexicographically smallest.
        """
        found = None
        for floor in sorted(self.ladder(1), reverse=True):
            if floor not in self.config.capacity:
                continue
            admitted = [g for g in self.groupings if self.safe(g, self.config.capacity[floor])]
            area = max((self.area(g, floor) for g in admitted), default=-1)
            if admitted and (found is None or area > found[0]):
                schedules = {}
                for g in admitted:
                    if self.area(g, floor) == area:
                        row = (self.cost(g), sorted(g))
                        times = self.times(g, floor)
                        schedules[times] = min(row, schedules.get(times, row))
                found = (area, floor, schedules)
        return found

    def best_skew_area(self, floor):
        """Release area of the least total gap on one floor's graph (the largest among equals), None if none."""
        admitted = [g for g in self.groupings if self.safe(g, self.config.capacity[floor])]
        if not admitted:
            return None
        least = min(self.skew(g) for g in admitted)
        return {self.area(g, floor) for g in admitted if self.skew(g) == least}
