"""A leaver's way out: detached, then parked while its memory goes back off the core loop."""

from __future__ import annotations

import time
from typing import Any

from flexfloor.elastic.ballot import Ballot
from flexfloor.elastic.states import Phase
from flexfloor.elastic.ticket import Worker
from flexfloor.errors import TransitionError

RELEASE_DEADLINE_S = 60.0


class Parking:
    """Starts and follows the release of one rank's memory.

    Args:
        ballot: events, board and faults of the rank.
        worker: the device side.
    """

    def __init__(self, ballot: Ballot, worker: Worker) -> None:
        self._ballot, self._worker = ballot, worker
        self.releasing = False

    def begin(self) -> None:
        """Detached: start giving memory back.

        Raises:
            TransitionError: it could not be started.
        """
        self._ballot.emit("detach_end")
        self._ballot.conclude(Phase.PARK, self._park)
        self.releasing = True

    def _park(self) -> None:
        self._ballot.emit("sleep_start")
        self._worker.park()

    def follow(self) -> None:
        """Note the end of the release, if it has ended.

        Raises:
            TransitionError: the release failed.
        """
        if not self.releasing:
            return
        report: dict[str, Any] | None = self._worker.park_report()
        if report is None:
            return
        self.releasing = False
        if "error" in report:
            self._ballot.fault(Phase.PARK, report["error"])
            raise TransitionError(self._ballot.rank, Phase.PARK.label, report["error"])
        self._ballot.emit(
            "sleep_end",
            t=report["end"],
            released_bytes=report["released_bytes"],
            process_bytes_before=report.get("process_bytes_before", 0),
            process_bytes_after=report.get("process_bytes_after", 0),
        )

    def settle(self) -> None:
        """Wait until nothing is being released; TransitionError after the deadline."""
        end = time.monotonic() + RELEASE_DEADLINE_S
        while self.releasing:
            self.follow()
            if self.releasing and time.monotonic() > end:
                why = f"memory was not given back within {RELEASE_DEADLINE_S} s"
                self._ballot.fault(Phase.PARK, why)
                raise TransitionError(self._ballot.rank, Phase.PARK.label, why)
            if self.releasing:
                time.sleep(0.001)
