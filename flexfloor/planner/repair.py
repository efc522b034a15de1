"""Bounded repair: a step no floor admits swaps prompts with the step before it (planner.md section 5)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flexfloor.planner.admission import fits_in
from flexfloor.planner.demand import Prompt
from flexfloor.planner.step import PlannedStep, StepPlanner

_CHEAP_TESTS = 20_000
"""Most layouts of one number of swaps that are looked at before the planner is called."""


@dataclass(frozen=True)
class Mended:
    """Two steps after a repair.

    Attributes:
        previous: the preceding step, planned anew.
        current: the step that was not admitted, planned anew.
        swaps: (item that left the current step, item that came in).
    """

    previous: PlannedStep
    current: PlannedStep
    swaps: tuple[tuple[str, str], ...]

    @property
    def objective(self) -> tuple[int, int]:
        """Lexicographic: sum of step tails, then minus the sum of release areas."""
        steps = (self.previous, self.current)
        return (sum(s.tail for s in steps), -sum(s.grouping.area for s in steps))


def repair(planner: StepPlanner, previous: PlannedStep, current: PlannedStep) -> Mended | None:
    """The repaired steps, or None where no examined layout helps.

    Fewest swaps first, then least disturbance of the sorted order, then the smallest objective. Both steps are
    planned whole for every layout that passes the cheap tests, at most `repair.max_layouts` times.
    """
    config = planner.config
    if any(not p.predicted for p in (*previous.prompts, *current.prompts)) or not config.capacity:
        return None
    examined = 0
    for count in range(1, config.repair.max_swaps + 1):
        found: list[tuple[int, Mended]] = []
        for looked, (disturbance, outs, ins) in enumerate(_swaps(len(previous.prompts), len(current.prompts), count)):
            if found and disturbance > found[0][0]:
                break
            if looked >= _CHEAP_TESTS or examined >= config.repair.max_layouts:
                break
            before, after = _exchanged(previous.prompts, current.prompts, ins, outs)
            if _hopeless(planner, after):
                continue
            examined += 1
            new_current = planner.plan(after)
            if not new_current.grouping.kv_safe:
                continue
            new_previous = planner.plan(before)
            if new_previous.grouping.kv_safe:
                pairs = zip(sorted(outs, reverse=True), sorted(ins), strict=True)
                swaps = tuple((current.prompts[o].item_id, previous.prompts[i].item_id) for o, i in pairs)
                found.append((disturbance, Mended(new_previous, new_current, swaps)))
        if found:
            return min((mended for _, mended in found), key=lambda m: (m.objective, m.swaps))
    return None


def _exchanged(
    previous: Sequence[Prompt], current: Sequence[Prompt], ins: Sequence[int], outs: Sequence[int]
) -> tuple[list[Prompt], list[Prompt]]:
    before = [p for k, p in enumerate(previous) if k not in ins] + [current[k] for k in outs]
    after = [p for k, p in enumerate(current) if k not in outs] + [previous[k] for k in ins]
    return before, after


def _hopeless(planner: StepPlanner, prompts: Sequence[Prompt]) -> bool:
    """A cheap proof that no floor admits the step."""
    demand = planner.demand(prompts)
    capacity = max(planner.config.capacity.values())
    return not fits_in(demand, slice(0, len(demand)), planner.config.world_size, capacity)


def _swaps(before: int, after: int, count: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Choices of ``count`` prompts of either step by ascending disturbance.

    The disturbance is the sum of the distances to the border between the two steps.

    Yields:
        (disturbance, positions in the current step, positions in the preceding step).
    """
    if count > min(before, after):
        return
    first = (tuple(range(count)), tuple(range(count)))
    queue = [(sum(map(sum, first)), first)]
    seen = {first}
    while queue:
        cost, (near, back) = heapq.heappop(queue)
        yield cost + 2 * count, near, tuple(before - 1 - k for k in back)
        for moved in [*((n, back) for n in _nudged(near, after)), *((near, b) for b in _nudged(back, before))]:
            if moved not in seen:
                seen.add(moved)
                heapq.heappush(queue, (sum(map(sum, moved)), moved))


def _nudged(chosen: tuple[int, ...], limit: int) -> Iterator[tuple[int, ...]]:
    for index, value in enumerate(chosen):
        ceiling = chosen[index + 1] if index + 1 < len(chosen) else limit
        if value + 1 < ceiling:
            yield (*chosen[:index], value + 1, *chosen[index + 1 :])
