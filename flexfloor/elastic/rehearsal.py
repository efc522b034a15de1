"""Planned residency: the worlds that a step is predicted to reach are made ready before its first token.

Every predicted world is entered once, from the full world down, with the phases and votes of a real shrink: its rows
are copied into spare rows, its groups and decode graphs are made and kept, one dummy step tries it. Then all ranks
go back to the full world; nobody gives memory back. A shrink to a predicted survivor set later finds rows, groups and
graphs and only switches; any other survivor set is made at the transition, as with natural residency, because
survivors always follow the unfinished requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from flexfloor.elastic import placement as rows_of
from flexfloor.elastic.ballot import Act
from flexfloor.elastic.decision import MAX_ATTEMPTS
from flexfloor.elastic.seat import Seat
from flexfloor.elastic.shrinking import acts
from flexfloor.elastic.states import Phase
from flexfloor.elastic.ticket import Ticket
from flexfloor.errors import TransitionError


def rehearse(seat: Seat, predicted: Sequence[Sequence[int]], load: int) -> bool:
    """Make the predicted worlds ready; False when one of them was given up (the rest is made at the transition).

    Args:
        seat: this rank's state, in the full world.
        predicted: survivors of each stage, ascending ranks, each set within the one before.
        load: most requests that a rank will have; decode graphs are made up to it.

    Raises:
        TransitionError: the full world could not be taken up again; names rank and phase.
    """
    began = seat.ballot.clock()
    held = seat.placement
    members = tuple(seat.world.members)
    totals = {"moved_rows": 0, "moved_bytes": 0}
    captured: list[int] = []
    whole = True
    for survivors in predicted:
        target, moves = rows_of.shrink(held, survivors)
        maps = {rank: target.expert_map(rank) for rank in survivors}
        ticket = replace(seat.ticket(list(survivors), moves, maps), before=members, load=load)
        failed, parts = _enter(seat, ticket)
        if failed:
            held = held.clone()
            held.spoil(ticket.moves)
            whole = False
            break
        held, members = target, ticket.after
        totals["moved_rows"] += len(moves)
        totals["moved_bytes"] += int(parts.get("moved_bytes", 0))
        captured += parts.get("captured", [])
    if len(members) < seat.world.size:
        _go_back(seat, members)
    seat.placement, _ = rows_of.restore(held, seat.base, range(seat.world.size))
    worlds = [list(survivors) for survivors in predicted]
    seat.ballot.emit(
        "rehearsal", worlds=worlds, whole=whole, captured=captured, seconds=seat.ballot.clock() - began, **totals
    )
    return whole


def _enter(seat: Seat, ticket: Ticket) -> tuple[list[int], dict[str, Any]]:
    """One world, tried and confirmed; the ranks that failed, and what the phases returned."""
    failed, parts = _attempt(seat, ticket, acts(seat, ticket), len(ticket.after))
    if not failed:
        seat.channel_broken = False
        seat.ballot.conclude(Phase.CONFIRM, lambda: seat.worker.confirm(ticket))
    return failed, parts


def _go_back(seat: Seat, members: tuple[int, ...]) -> None:
    """Every rank points at the full world again."""
    failed: list[int] = []
    for _ in range(MAX_ATTEMPTS):
        ticket = replace(seat.ticket(list(range(seat.world.size)), [], {}), before=members)
        act = partial(seat.worker.switch_back, ticket)
        failed, _ = _attempt(seat, ticket, [(Phase.RESTORE_SWITCH, act)], len(members))
        if not failed:
            seat.ballot.conclude(Phase.RESTORE_CONFIRM, partial(seat.worker.confirm, ticket))
            return
    raise TransitionError(failed[0], Phase.RESTORE_SWITCH.label, "the full world was not taken up again")


def _attempt(
    seat: Seat, ticket: Ticket, phases: Sequence[tuple[Phase, Act]], stage: int
) -> tuple[list[int], dict[str, Any]]:
    """The phases with their votes; the first that fails undoes the ticket on every rank and is recorded."""
    parts: dict[str, Any] = {}
    for phase, act in phases:
        failed, took = seat.ballot.carry_out(phase, act)
        parts.update(took)
        if failed:
            seat.channel_broken = seat.channel_broken or phase is Phase.STAGE
            seat.undo(ticket, f"EP {stage}")
            if seat.rank == ticket.before[0]:
                reason = f"not prepared: rank {failed[0]} failed in {phase.label}"
                seat.ballot.emit("plan_skipped", stage=stage, reason=reason)
            return failed, parts
    return [], parts
