"""Among placements of equal cost, the lexicographically smallest sorted list of groups (planner.md section 5).

So a plan does not depend on the solver, its version or the order of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from flexfloor.planner.demand import Demand
from flexfloor.planner.matching import Columns, Group, Placement, Quota

_NOISE = 400.0
"""A reduced cost below this, in thousandths of the cost unit, may be zero up to rounding."""


class ExactModel(Protocol):
    """What tie-breaking asks of an exact model."""

    def solve(
        self,
        quotas: Sequence[Quota],
        *,
        forced: Sequence[int] = (),
        allowed: Sequence[int] | None = None,
        avoided: Sequence[int] = (),
        any_cost: bool = False,
    ) -> Placement:
        """The cheapest placement that meets all quotas."""
        ...


def meets(demand: Demand, groups: Sequence[Group], quotas: Sequence[Quota]) -> bool:
    """Whether non-empty ``groups`` meet all quotas."""
    ends = sorted(int(demand.completions[group[-1]]) for group in groups)
    return all(len(ends) >= q.groups and (q.groups < 1 or ends[q.groups - 1] <= q.time) for q in quotas)


def break_ties(
    demand: Demand, columns: Columns, model: ExactModel, quotas: Sequence[Quota], best: Placement, solves: int
) -> list[Group]:
    """The lexicographically smallest placement that costs as much as ``best``.

    Args:
        demand: the step.
        columns: candidates of ``model``.
        model: the exact model ``best`` came from.
        quotas: what the placement must meet.
        best: an optimal placement.
        solves: most solves spent; beyond them only exchanges between two groups are tried.
    """
    index_of = {group: k for k, group in enumerate(columns.groups)}
    containing: dict[int, list[int]] = {}
    tight = np.arange(len(columns.groups)) if best.reduced is None else np.flatnonzero(best.reduced <= _NOISE)
    allowed = sorted({*tight.tolist(), *best.chosen})
    for k in allowed:
        for member in columns.groups[k]:
            containing.setdefault(member, []).append(k)
    current = {member: k for k in best.chosen for member in columns.groups[k]}
    if solves > 0 and len(allowed) > len(best.chosen):
        second = model.solve(quotas, allowed=allowed, avoided=best.chosen)
        if second.status == "infeasible" or (second.status == "optimal" and second.cost > best.cost):
            return [columns.groups[k] for k in best.chosen]
    fixed: list[int] = []
    open_members = set(current)
    order = sorted(current, key=lambda member: (int(demand.lexical[member]), member))

    def key(k: int) -> tuple[int, ...]:
        return tuple(sorted(int(demand.lexical[member]) for member in columns.groups[k]))

    for lead in order:
        if lead not in open_members:
            continue
        for k in sorted((k for k in containing[lead] if key(k) < key(current[lead])), key=key):
            if not open_members.issuperset(columns.groups[k]):
                continue
            swapped = _exchange(demand, columns, index_of, quotas, current, lead, k)
            if swapped is None and solves > 0:
                solves -= 1
                other = model.solve(quotas, forced=[*fixed, k], allowed=allowed)
                if other.found and other.cost == best.cost:
                    swapped = {member: c for c in other.chosen for member in columns.groups[c]}
            if swapped is not None:
                current = swapped
                break
        fixed.append(current[lead])
        open_members.difference_update(columns.groups[current[lead]])
    return [columns.groups[k] for k in sorted(set(current.values()))]


def _exchange(
    demand: Demand,
    columns: Columns,
    index_of: dict[Group, int],
    quotas: Sequence[Quota],
    current: dict[int, int],
    lead: int,
    wanted: int,
) -> dict[int, int] | None:
    """The placement after one prompt of ``lead``'s group changes places, if it costs the same and meets the quotas."""
    mine, target = set(columns.groups[current[lead]]), set(columns.groups[wanted])
    if len(mine) != len(target) or len(target - mine) != 1:
        return None
    (given,), (gained,) = mine - target, target - mine
    theirs = (set(columns.groups[current[gained]]) - {gained}) | {given}
    other = index_of.get(tuple(sorted(theirs)))
    old = (current[lead], current[gained])
    if other is None or columns.costs[[wanted, other]].sum() != columns.costs[list(old)].sum():
        return None
    swapped = {member: k for member, k in current.items() if k not in old}
    swapped.update(dict.fromkeys(target, wanted) | dict.fromkeys(theirs, other))
    return swapped if meets(demand, [columns.groups[k] for k in set(swapped.values())], quotas) else None
