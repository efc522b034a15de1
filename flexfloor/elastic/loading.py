"""New weights: the trainer writes the rows of the full world; rows that planned residency keeps are filled from them.

No other spare row holds anything afterwards: a later transition fills it with the new weights or does not use it.
"""

from __future__ import annotations

from functools import partial

from flexfloor.elastic import placement as rows_of
from flexfloor.elastic.seat import Seat
from flexfloor.elastic.states import Phase

Rows = dict[int, dict[int, int]]
"""Rank -> {row: expert}."""


def load(seat: Seat, version: int, resident: Rows) -> bool:
    """Record new weights and fill the resident spare rows; False when those stay empty (a later step fills them).

    Joint where rows are resident: every rank calls it while the engines are idle.

    Args:
        seat: this rank's state, in the full world, with the new weights in every row of it.
        version: which weights these are.
        resident: the spare rows to fill, equal on all ranks.

    Raises:
        TransitionError: this rank cannot hold the weights.
    """
    seat.version = version
    seat.asleep = set()
    seat.placement.forget_spares()
    seat.ballot.conclude(Phase.LOAD, partial(seat.worker.loaded, version))
    target, moves = rows_of.replicate(seat.placement, resident)
    failed: list[int] = []
    if moves:
        ticket = seat.ticket(list(range(seat.world.size)), moves, {})
        failed, _ = seat.ballot.carry_out(Phase.LOAD, partial(seat.worker.refill, ticket))
        seat.channel_broken = bool(failed)
        if not failed:
            seat.placement = target
        elif seat.rank == 0:
            reason = f"spare rows stay empty: rank {failed[0]} failed in {Phase.LOAD.label}"
            seat.ballot.emit("plan_skipped", stage=seat.world.size, reason=reason)
    seat.ballot.show(Phase.IDLE)
    return not failed
