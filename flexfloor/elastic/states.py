"""States of a rank and phases of a transition (runtime specification, "States of a rank")."""

from __future__ import annotations

from enum import IntEnum

from flexfloor.errors import ProtocolError


class RankState(IntEnum):
    """What a rank is doing for the primary rollout."""

    FULL = 0
    MEMBER = 1
    DETACHING = 2
    PARKED = 3
    LEASED = 4
    RESTORING = 5


LEGAL: dict[RankState, frozenset[RankState]] = {
    RankState.FULL: frozenset({RankState.MEMBER}),
    RankState.MEMBER: frozenset({RankState.DETACHING, RankState.RESTORING}),
    RankState.DETACHING: frozenset({RankState.PARKED, RankState.RESTORING}),
    RankState.PARKED: frozenset({RankState.LEASED, RankState.RESTORING}),
    RankState.LEASED: frozenset({RankState.PARKED}),
    RankState.RESTORING: frozenset({RankState.FULL, RankState.MEMBER, RankState.PARKED}),
}


def moved(old: RankState, new: RankState) -> RankState:
    """The new state, if a rank may go there.

    Raises:
        ProtocolError: the move is not in :data:`LEGAL`.
    """
    if new not in LEGAL[old]:
        raise ProtocolError(f"a rank cannot go from {old.name} to {new.name}")
    return new


class Phase(IntEnum):
    """Where a rank is inside the protocol; the status board shows it and faults name it."""

    START = 0
    IDLE = 1
    STEP = 2
    AGREE = 3
    PREPARE = 4
    STAGE = 5
    SWITCH = 6
    CAPTURE = 7
    TRIAL = 8
    CONFIRM = 9
    PARK = 10
    RESTORE_WAKE = 11
    RESTORE_MOVE = 12
    RESTORE_SWITCH = 13
    RESTORE_CONFIRM = 14
    ROLLBACK = 15
    INSTALL = 16
    LOAD = 17

    @property
    def label(self) -> str:
        """The name used in messages, for example ``restore_move``."""
        return self.name.lower()


SHRINK_PHASES = (Phase.PREPARE, Phase.STAGE, Phase.SWITCH, Phase.CAPTURE, Phase.TRIAL)
RESTORE_PHASES = (Phase.RESTORE_WAKE, Phase.RESTORE_MOVE, Phase.RESTORE_SWITCH)
