"""Which physical rank gets which group (planner.md section 5)."""

from __future__ import annotations

from collections.abc import Sequence

from flexfloor.plan import RankPlan
from flexfloor.planner.admission import group_peak
from flexfloor.planner.demand import Demand, to_tokens
from flexfloor.planner.matching import Group


def assign_ranks(demand: Demand, groups: Sequence[Group], leave_order: Sequence[int]) -> tuple[RankPlan, ...]:
    """Gives the earliest groups to the ranks that leave first, the longest to the final survivors.

    Args:
        demand: the step.
        groups: N groups, ascending by completion.
        leave_order: physical ranks in the order they leave.
    """
    placed = [
        RankPlan(
            rank=rank,
            items=tuple(demand.items[member] for member in group),
            completion=to_tokens(int(demand.completions[list(group)].max())) if group else 0,
            peak_tokens=group_peak(demand, group),
        )
        for rank, group in zip(leave_order, groups, strict=True)
    ]
    return tuple(sorted(placed, key=lambda entry: entry.rank))
