"""Restore: wake | refill | switch back, a vote after each.

``full`` brings memory and weights of parked ranks back from their peers; ``topology`` brings
back groups, maps and placement only and leaves the parked ranks asleep, which is what
training needs, because weights come with the next sync (paper, section 4.2).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flexfloor.elastic import placement as rows_of
from flexfloor.elastic.ballot import Act
from flexfloor.elastic.decision import MAX_ATTEMPTS
from flexfloor.elastic.seat import Seat
from flexfloor.elastic.states import Phase, RankState
from flexfloor.elastic.ticket import Ticket
from flexfloor.errors import TransitionError


def restore(seat: Seat, kind: str, reason: str, *, broken: bool = False) -> bool:
    """Bring the full world back; False when it was abandoned and may be tried again.

    Args:
        seat: this rank's state.
        kind: ``full`` or ``topology``.
        reason: for the event log.
        broken: the groups of the present world may not be used again.

    Raises:
        TransitionError: it failed for good, or could not be undone.
    """
    members = seat.world.members
    parked = [rank for rank in range(seat.world.size) if rank not in members]
    woken = parked if kind == "full" else []
    held = seat.placement.clone()
    held.forget(parked)
    target, moves = rows_of.restore(held, seat.base, [*members, *woken])
    ticket = replace(
        seat.ticket(list(range(seat.world.size)), moves, {}),
        woken=tuple(woken),
        broken=tuple(members) if broken else (),
    )
    began = seat.ballot.clock()
    seat.ballot.emit("restore_start", kind=kind, reason=reason)
    seat.parking.settle()
    seat.go(RankState.RESTORING)
    acts: list[tuple[Phase, Act]] = [
        *_wake_acts(seat, ticket),
        (Phase.RESTORE_SWITCH, lambda: seat.worker.switch_back(ticket)),
    ]
    parts: dict[str, Any] = {}
    for phase, act in acts:
        failed, took = seat.ballot.carry_out(phase, act)
        parts.update(took)
        if failed:
            _abandon(seat, ticket, phase, failed)
            return False
    seat.ballot.conclude(Phase.RESTORE_CONFIRM, lambda: seat.worker.confirm(ticket))
    if seat.rank in woken:
        seat.ballot.emit("wake_end")
    seat.restored(target, asleep=[] if kind == "full" else parked)
    seat.ballot.emit("restore_end", duration=seat.ballot.clock() - began, duration_res=1e-6, **parts)
    return True


def wake_all(seat: Seat) -> None:
    """After a topology restore: memory and weights of the sleepers come back from their peers.

    Joint: every rank calls it while the engines are idle.

    Raises:
        TransitionError: a rank failed; the replica cannot go on.
        ProtocolError: no awake rank holds an expert any more (load weights instead).
    """
    if not seat.asleep:
        return
    seat.parking.settle()
    sleepers = sorted(seat.asleep)
    target, moves = rows_of.refill(seat.placement, seat.base, sleepers)
    donors = [rank for rank in range(seat.world.size) if rank not in seat.asleep]
    ticket = replace(seat.ticket(donors, moves, {}), woken=tuple(sleepers), before=tuple(donors))
    for phase, act in _wake_acts(seat, ticket):
        failed, _ = seat.ballot.carry_out(phase, act)
        if failed:
            raise TransitionError(failed[0], phase.label, "the sleeping ranks could not be woken")
    if seat.rank in seat.asleep:
        seat.ballot.emit("wake_end")
    seat.placement = target
    seat.asleep = set()
    seat.ballot.show(Phase.IDLE)


def _wake_acts(seat: Seat, ticket: Ticket) -> list[tuple[Phase, Act]]:
    def wake() -> None:
        if seat.rank in ticket.woken and not seat.early_wake.begun:
            seat.ballot.emit("wake_start")
        seat.worker.wake(ticket)

    return [(Phase.RESTORE_WAKE, wake), (Phase.RESTORE_MOVE, lambda: seat.worker.refill(ticket))]


def _abandon(seat: Seat, ticket: Ticket, phase: Phase, failed: list[int]) -> None:
    if phase is Phase.RESTORE_MOVE:
        seat.channel_broken = True
    seat.undo(ticket, f"a restore that failed in {phase.label}")
    seat.restore_attempts += 1
    if seat.restore_attempts >= MAX_ATTEMPTS:
        raise TransitionError(failed[0], phase.label, "the full world could not be restored")
    seat.go(RankState.MEMBER if seat.rank in seat.world.members else RankState.PARKED)
    if seat.rank == ticket.before[0]:
        reason = f"rank {failed[0]} failed in {phase.label}, attempt {seat.restore_attempts} of {MAX_ATTEMPTS}"
        seat.ballot.emit("plan_skipped", stage=seat.world.size, reason=reason)
