"""Bounded repair: a step no floor admits swaps prompts with the step before it (planner.md section 5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flexfloor.planner.demand import Prompt
from flexfloor.planner.exchange import Block, ExchangeTest, blocks
from flexfloor.planner.step import PlannedStep, StepPlanner

_CHEAP_TESTS = 20_000
"""Most layouts of one number of swaps that are looked at."""
_EXAMINED_PROMPTS, _LEAST_EXAMINED = 8192, 4
"""Prompts of all examined layouts together, and layouts that are examined however large the steps are."""
_WHOLE_PLANS = 16
"""Most layouts of one disturbance that are planned whole."""


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

    Fewest swaps first, then least disturbance of the sorted order, then the smallest objective. Layouts that provably
    fit nowhere are skipped in bulk; of the others at most `repair.max_layouts` (fewer for steps of more than 32
    prompts) are examined for a KV-safe grouping of both steps. Those of least disturbance that have one are planned
    whole, smallest sum of tails first.
    """
    config = planner.config
    if any(not p.predicted for p in (*previous.prompts, *current.prompts)) or not planner.capacities:
        return None
    test = ExchangeTest(
        previous.prompts,
        current.prompts,
        limit_of=planner.limit,
        rules=planner.rules,
        groups=config.world_size,
        capacity=max(planner.capacities),
    )
    most = min(config.repair.max_layouts, max(_LEAST_EXAMINED, _EXAMINED_PROMPTS // len(current.prompts)))
    examined = 0
    for count in range(1, config.repair.max_swaps + 1):
        if test.rules_out(count):
            continue
        looked = 0
        for block in blocks(len(previous.prompts), len(current.prompts), count):
            hopeful = test.hopeful(block.first(_CHEAP_TESTS - looked))
            looked += len(block)
            safe: list[_Layout] = []
            for layout in _layouts(planner, previous.prompts, current.prompts, hopeful):
                if examined >= most:
                    break
                examined += 1
                if planner.admits(layout.after) and planner.admits(layout.before):
                    safe.append(layout)
            best = _best(planner, safe)
            if best is not None or examined >= most:
                return best
            if looked >= _CHEAP_TESTS:
                break
    return None


@dataclass(frozen=True)
class _Layout:
    """Both steps' prompts after an exchange, the swapped items, and the sum of the two step tails (micro-tokens)."""

    before: tuple[Prompt, ...]
    after: tuple[Prompt, ...]
    swaps: tuple[tuple[str, str], ...]
    tails: int


def _layouts(
    planner: StepPlanner, previous: Sequence[Prompt], current: Sequence[Prompt], block: Block
) -> Iterator[_Layout]:
    for outs, ins in zip(block.outs.tolist(), block.ins.tolist(), strict=True):
        before = tuple(p for k, p in enumerate(previous) if k not in ins) + tuple(current[k] for k in outs)
        after = tuple(p for k, p in enumerate(current) if k not in outs) + tuple(previous[k] for k in ins)
        pairs = zip(sorted(outs, reverse=True), sorted(ins), strict=True)
        swaps = tuple((current[o].item_id, previous[i].item_id) for o, i in pairs)
        yield _Layout(before, after, swaps, planner.tail(before) + planner.tail(after))


def _best(planner: StepPlanner, safe: Sequence[_Layout]) -> Mended | None:
    """The layout of smallest objective; plans as few of them whole as tells."""
    found: list[Mended] = []
    least: int | None = None
    for layout in sorted(safe, key=lambda one: one.tails)[:_WHOLE_PLANS]:
        if least is not None and layout.tails > least:
            break
        mended = Mended(planner.plan(layout.before), planner.plan(layout.after), layout.swaps)
        if mended.previous.grouping.kv_safe and mended.current.grouping.kv_safe:
            found.append(mended)
            least = layout.tails
    return min(found, key=lambda m: (m.objective, m.swaps), default=None)
