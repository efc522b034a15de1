"""Among placements of equal cost, the lexicographically smallest sorted list of groups (planner.md section 5).

So a plan does not depend on the solver, its version or the order of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flexfloor.planner.demand import Demand
from flexfloor.planner.matching import Columns, Group, Placement, Quota

_NOISE = 400.0
"""A reduced cost below this, in thousandths of the cost unit, may be zero up to rounding."""

_SEARCH, _FAR_SEARCH = 4000, 500
"""Most partial placements looked at in one component, and where the relaxation is not tight, which rarely succeeds."""


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

    Pairs are searched component by component (see `_components`), which needs no solve; what is too large for that,
    and groups of other sizes, prompt by prompt with the exact model.

    Args:
        demand: the step.
        columns: candidates of ``model``.
        model: the exact model ``best`` came from.
        quotas: what the placement must meet.
        best: an optimal placement.
        solves: most solves spent; beyond them only exchanges between two groups are tried.
    """
    surplus = np.zeros(len(columns.groups)) if best.relaxed is None else best.relaxed
    tight = np.flatnonzero(surplus <= best.distance + _NOISE)
    allowed = sorted({*tight.tolist(), *best.chosen})
    chosen = list(best.chosen)
    if all(len(columns.groups[k]) == 2 for k in allowed):
        components = _components(columns, allowed, chosen)
        settled = True
        for component in components:
            found = _smallest_in(demand, columns, quotas, chosen, component, surplus, best.distance + 2 * _NOISE)
            settled = settled and found is not None
            chosen = found if found is not None else chosen
        if settled:
            return [columns.groups[k] for k in sorted(chosen)]
        allowed = sorted({*chosen, *(k for component in components for k in component)})
    return _prompt_by_prompt(
        demand, columns, model, quotas, Placement(best.status, tuple(chosen), best.cost), allowed, solves
    )


def _components(columns: Columns, tight: Sequence[int], chosen: Sequence[int]) -> list[list[int]]:
    """Candidates that another placement of pairs might hold, in sets that can be exchanged independently.

    Two matchings differ by cycles that alternate between them. So a pair (a, c) outside the matching needs a walk
    back from the partner of c to a, where one step goes along a tight pair and then along a matched one; a cycle
    lies within one strongly connected component of these steps.
    """
    partner: dict[int, int] = {}
    for first, second in (columns.groups[k] for k in chosen):
        partner[first], partner[second] = second, first
    others = [k for k in tight if partner[columns.groups[k][0]] != columns.groups[k][1]]
    if not others:
        return []
    reach = {member: 1 << member for member in partner}
    for a, c in (columns.groups[k] for k in others):
        reach[a] |= 1 << partner[c]
        reach[c] |= 1 << partner[a]
    for middle in partner:
        through = reach[middle]
        for start, seen in reach.items():
            if seen >> middle & 1:
                reach[start] = seen | through
    part = {m: min(o for o in partner if reach[m] >> o & 1 and reach[o] >> m & 1) for m in partner}
    label = {m: min(part[m], part[partner[m]]) for m in partner}
    cyclic = [
        k for k in others if any(part[a] == part[partner[c]] for a, c in (columns.groups[k], columns.groups[k][::-1]))
    ]
    merged: dict[int, set[int]] = {}
    for k in cyclic:
        labels = {label[m] for m in columns.groups[k]}
        target = min(labels)
        merged.setdefault(target, set()).add(k)
        if len(labels) == 1:
            continue
        for member in partner:
            if label[member] in labels:
                label[member] = target
        for other in labels - {target}:
            merged[target] |= merged.pop(other, set())
    matched = {columns.groups[k][0]: k for k in chosen}
    for target, members in merged.items():
        members.update(k for first, k in matched.items() if label[first] == target)
    return [sorted(members) for members in merged.values()]


def _smallest_in(
    demand: Demand,
    columns: Columns,
    quotas: Sequence[Quota],
    chosen: Sequence[int],
    component: Sequence[int],
    surplus: NDArray[np.float64],
    distance: float,
) -> list[int] | None:
    """The placement with one component replaced by its smallest pairs of equal cost; None where that is too much.

    The reduced costs ``surplus`` of a placement's pairs add up to ``distance`` at most, or it costs more.
    """
    inside = set(component)
    rest = [k for k in chosen if k not in inside]
    here = [k for k in chosen if k in inside]
    cost = int(columns.costs[here].sum())
    members = {member for k in component for member in columns.groups[k]}
    order = sorted(members, key=lambda member: (int(demand.lexical[member]), member))
    place = {member: at for at, member in enumerate(order)}
    # (place of the mate, cost, reduced cost, candidate)
    options: list[list[tuple[int, int, float, int]]] = [[] for _ in order]
    for k in component:
        first, second = (place[member] for member in columns.groups[k])
        options[first].append((second, int(columns.costs[k]), float(surplus[k]), k))
        options[second].append((first, int(columns.costs[k]), float(surplus[k]), k))
    for row in options:
        row.sort(key=lambda option: option[0])
    cheapest = [min(price for _, price, _, _ in row) for row in options]
    steps, most = 0, _SEARCH if distance < 4 * _NOISE else _FAR_SEARCH

    def search(free: int, left: int, floor: int, room: float, picked: list[int]) -> list[int] | None:
        """``floor``: twice what pairs of the free prompts, a bit each, cost at least; ``room``: surplus left."""
        nonlocal steps
        steps += 1
        if not free:
            groups = [columns.groups[k] for k in (*rest, *picked)]
            return picked if left == 0 and meets(demand, groups, quotas) else None
        lead = (free & -free).bit_length() - 1
        for mate, price, extra, k in options[lead]:
            below = floor - cheapest[lead] - cheapest[mate]
            if not free >> mate & 1 or extra > room or 2 * (left - price) < below:
                continue
            found = search(free & ~(1 << lead | 1 << mate), left - price, below, room - extra, [*picked, k])
            if found is not None or steps > most:
                return found
        return None

    room = distance - float(surplus[rest].sum())
    found = search((1 << len(order)) - 1, cost, sum(cheapest), room, [])
    return None if found is None else [*rest, *found]


def _prompt_by_prompt(
    demand: Demand,
    columns: Columns,
    model: ExactModel,
    quotas: Sequence[Quota],
    best: Placement,
    allowed: Sequence[int],
    solves: int,
) -> list[Group]:
    """Gives every prompt, in the order of ids, the smallest group that an equally cheap placement holds."""
    index_of = {group: k for k, group in enumerate(columns.groups)}
    containing: dict[int, list[int]] = {}
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
