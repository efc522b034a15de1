"""Shrink: prepare | stage | switch | capture | trial, a vote after each, then the commit.

A failed vote undoes the ticket on every rank; the stage may be tried again later. Leavers keep
memory and groups until the sync point after the survivors' first step in the new world.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flexfloor.elastic import placement as rows_of
from flexfloor.elastic.ballot import Act
from flexfloor.elastic.decision import MAX_ATTEMPTS, Decision
from flexfloor.elastic.placement import Placement
from flexfloor.elastic.seat import Seat
from flexfloor.elastic.states import Phase, RankState
from flexfloor.elastic.ticket import Ticket

BACKOFF_SYNCS = 4


def shrink(seat: Seat, decision: Decision, agreed_s: float, rank_order: Sequence[int], load: int) -> bool:
    """Carry out a SHRINK decision; False when it was abandoned.

    Args:
        seat: this rank's state.
        decision: target size, busy and idle members.
        agreed_s: how long the agreement took, seconds.
        rank_order: all ranks, first to leave in front.
        load: most requests that a member has unfinished.

    Raises:
        TransitionError: the failed transition could not be undone.
    """
    survivors = rows_of.choose_survivors(seat.placement, decision.busy, decision.idle, decision.target, rank_order)
    target, moves = rows_of.shrink(seat.placement, survivors)
    maps = {rank: target.expert_map(rank) for rank in survivors}
    ticket = replace(seat.ticket(survivors, moves, maps), load=load, lean=True)
    leaving = seat.rank in ticket.before and seat.rank not in ticket.after
    if leaving:
        seat.go(RankState.DETACHING)
        seat.ballot.emit("detach_start")
    parts: dict[str, Any] = {"agree": agreed_s}
    began, acted = seat.ballot.clock(), 0.0
    for phase, act in acts(seat, ticket):
        failed, took = seat.ballot.carry_out(phase, act)
        parts.update(took)
        acted += took[phase.label]
        if failed:
            _abandon(seat, ticket, phase, failed, leaving)
            return False
    seat.channel_broken = False
    parts["vote"] = max(0.0, seat.ballot.clock() - began - acted)
    _commit(seat, ticket, target, parts, leaving)
    return True


def acts(seat: Seat, ticket: Ticket) -> list[tuple[Phase, Act]]:
    """The phases up to the commit, in order."""
    worker = seat.worker
    return [
        (Phase.PREPARE, lambda: worker.prepare(ticket)),
        (Phase.STAGE, lambda: worker.stage(ticket)),
        (Phase.SWITCH, lambda: worker.switch(ticket)),
        (Phase.CAPTURE, lambda: worker.capture(ticket)),
        (Phase.TRIAL, lambda: worker.trial(ticket)),
    ]


def _abandon(seat: Seat, ticket: Ticket, phase: Phase, failed: list[int], leaving: bool) -> None:
    if phase >= Phase.STAGE:
        seat.placement.spoil(ticket.moves)
    if phase is Phase.STAGE:
        seat.channel_broken = True
    seat.undo(ticket, f"EP {len(ticket.after)}")
    if leaving:
        seat.go(RankState.RESTORING)
        seat.go(RankState.MEMBER)
    world, size = seat.world, len(ticket.after)
    attempts = world.attempts[size] = world.attempts.get(size, 0) + 1
    world.retry_at = world.syncs + BACKOFF_SYNCS * attempts
    if seat.rank == ticket.before[0]:
        reason = f"rank {failed[0]} failed in {phase.label}, attempt {attempts} of {MAX_ATTEMPTS}"
        seat.ballot.emit("plan_skipped", stage=size, reason=reason)


def _commit(seat: Seat, ticket: Ticket, target: Placement, parts: dict[str, Any], leaving: bool) -> None:
    seat.ballot.conclude(Phase.CONFIRM, lambda: seat.worker.confirm(ticket))
    seat.placement = target
    seat.world.members = list(ticket.after)
    seat.leaving = leaving
    seat.unproven = seat.rank in ticket.after
    if seat.rank == ticket.after[0]:
        seat.committed = {
            **parts,
            "stage": seat.world.ladder.index(len(ticket.after)),
            "from": len(ticket.before),
            "to": len(ticket.after),
            "survivors": list(ticket.after),
            "moved_rows": len(ticket.moves),
            "iterations": seat.pace.iterations,
            "began": seat.ballot.clock(),
        }
