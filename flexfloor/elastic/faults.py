"""Faults on demand: the tests make a rank fail in a named phase.

A fault is given as ``phase:rank:kind[:nth]``, for example ``stage:2:raise`` or
``switch:0:kill:2`` (the second time). Kinds: ``raise`` (an exception), ``kill`` (SIGKILL
to the own process), ``exit`` (a normal exit), ``hang`` (never returns).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from flexfloor.elastic.states import Phase
from flexfloor.errors import FlexFloorError, InputError

KINDS = ("raise", "kill", "exit", "hang")


class InjectedFaultError(FlexFloorError):
    """Raised by a fault of kind ``raise``."""


@dataclass
class Fault:
    """One fault: at the ``nth`` time that ``rank`` enters ``phase``."""

    phase: Phase
    rank: int
    kind: str
    nth: int = 1

    @classmethod
    def parse(cls, text: str) -> Fault:
        """From ``phase:rank:kind[:nth]``; InputError when malformed."""
        parts = text.split(":")
        try:
            phase = Phase[parts[0].upper()]
            rank, kind = int(parts[1]), parts[2]
            nth = int(parts[3]) if len(parts) > 3 else 1
        except (KeyError, ValueError, IndexError):
            raise InputError(f"'{text}' is no fault: write phase:rank:kind[:nth]", field="faults") from None
        if kind not in KINDS:
            raise InputError(f"unknown fault kind '{kind}': use one of {', '.join(KINDS)}", field="faults")
        return cls(phase, rank, kind, nth)


@dataclass
class FaultPlan:
    """The faults of one rank and how often each phase was entered."""

    faults: list[Fault] = field(default_factory=list)
    seen: dict[Phase, int] = field(default_factory=dict)

    @classmethod
    def of(cls, texts: Iterable[str], rank: int) -> FaultPlan:
        """The faults among ``texts`` that concern ``rank``."""
        return cls([fault for fault in map(Fault.parse, texts) if fault.rank == rank])

    def enter(self, phase: Phase) -> None:
        """Called at the start of a phase; does what the plan says."""
        if not self.faults:
            return
        self.seen[phase] = self.seen.get(phase, 0) + 1
        for fault in self.faults:
            if fault.phase is phase and fault.nth == self.seen[phase]:
                self._strike(fault)

    @staticmethod
    def _strike(fault: Fault) -> None:
        if fault.kind == "raise":
            raise InjectedFaultError(f"injected in {fault.phase.label}")
        if fault.kind == "exit":
            os._exit(3)
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            time.sleep(3600)
