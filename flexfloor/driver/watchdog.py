"""Who died or stands still: a thread in the server process that owns the engines' process ids.

Collectives have no usable timeout of their own, so a dead or hung rank would leave the others waiting for ever.

    sentinel of a process fires --> wait SETTLE_S for the others' exit codes --> culprit --> end all by pid --> report
    board line older than stall_s, phase not idle ------------------------------^

Invariants: at most one loss is reported; when it is reported no engine process is left; an end that was asked for
(``stop``) is no loss.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from flexfloor.driver.processes import GRACE_S, end_processes
from flexfloor.elastic.board import Board, Status
from flexfloor.elastic.states import Phase
from flexfloor.errors import EngineLostError

SETTLE_S = 0.5
PERIOD_S = 0.5
SUPPORT = -1
"""Key of processes that serve all ranks (vLLM's DP coordinator)."""


@dataclass(frozen=True)
class Death:
    """The end of one process.

    Attributes:
        rank: its rank, or `SUPPORT`.
        exit_code: as in multiprocessing (negative: signal); None while unknown.
        phase: what the board said.
        fault: what its own last fault event said, if any.
    """

    rank: int
    exit_code: int | None
    phase: Phase
    fault: str | None = None

    @property
    def why(self) -> str:
        """One phrase for a message."""
        code = self.exit_code
        if code is None:
            text = "its process ended"
        elif code < 0:
            text = f"its process was killed by {signal.Signals(-code).name}"
        else:
            text = f"its process ended with exit code {code}"
        return f"{text} ({self.fault})" if self.fault else text

    def suspicion(self) -> int:
        """The higher, the more likely the cause: 3 killed, 2 an odd exit, 1 a fault of its own, 0 a follower."""
        code = self.exit_code
        if code is not None and code < 0 and code != -signal.SIGTERM:
            return 3
        if code not in (None, 0, 1, -signal.SIGTERM):
            return 2
        return 1 if self.fault else 0


def culprit(deaths: Sequence[Death]) -> Death:
    """The death that explains the others; the first seen where nothing tells them apart."""
    return max(deaths, key=lambda death: (death.suspicion(), -deaths.index(death)))


def last_fault(events: Path, since: float) -> str | None:
    """The last ``fault`` event of a rank's file since ``since`` (seconds), in one phrase."""
    try:
        lines = events.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in reversed(lines[-50:]):
        if '"fault"' in line:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if event.get("event") == "fault" and event.get("t", 0) >= since:
                return f"{event.get('where', '?')}: {event.get('what', '?')}"
    return None


class Watchdog:
    """Watches the processes of one replica.

    Args:
        processes: by rank; key `SUPPORT` and below for processes that serve all ranks.
        board: the status board.
        stall_s: longest silence of a rank that is not idle, seconds.
        events: rank -> its event file in the present step.
        on_loss: called once, from the watchdog's thread, after all processes were ended.
    """

    def __init__(
        self,
        processes: Mapping[int, BaseProcess],
        board: Board,
        *,
        stall_s: float,
        events: Callable[[int], Path],
        on_loss: Callable[[EngineLostError], None],
        grace_s: float = GRACE_S,
    ) -> None:
        self._processes, self._board, self._stall_s = dict(processes), board, stall_s
        self._events, self._on_loss, self._grace_s = events, on_loss, grace_s
        self._since = time.time()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flexfloor-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """From now on an end of the processes is no loss; waits until nothing is reported any more."""
        self._stopped.set()
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join(timeout=PERIOD_S + SETTLE_S + 3 * self._grace_s)

    def step_begins(self) -> None:
        """Fault events before this moment explain nothing."""
        self._since = time.time()

    def _run(self) -> None:
        sentinels = {process.sentinel: rank for rank, process in self._processes.items()}
        while not self._stopped.is_set():
            fired = [sentinels[s] for s in connection.wait(list(sentinels), timeout=PERIOD_S) if isinstance(s, int)]
            if self._stopped.is_set():
                return
            lost = self._explain(fired) if fired else self._stalled()
            if lost is not None:
                end_processes([p.pid for p in self._processes.values() if p.pid is not None], self._grace_s)
                if not self._stopped.is_set():
                    self._on_loss(lost)
                return

    def _explain(self, first: Sequence[int]) -> EngineLostError:
        board = self._board.read_all()
        time.sleep(SETTLE_S)
        order = [*first, *(rank for rank in self._processes if rank not in first)]
        deaths = [
            self._death(rank, board) for rank in order if rank in first or self._processes[rank].exitcode is not None
        ]
        cause = culprit(deaths)
        if cause.rank <= SUPPORT:
            return EngineLostError(0, board[0].phase.label, f"a process that serves all ranks is gone: {cause.why}")
        return EngineLostError(cause.rank, cause.phase.label, cause.why)

    def _death(self, rank: int, board: Sequence[Status]) -> Death:
        code = self._processes[rank].exitcode
        if rank <= SUPPORT:
            return Death(rank, code, Phase.START)
        return Death(rank, code, board[rank].phase, last_fault(self._events(rank), self._since))

    def _stalled(self) -> EngineLostError | None:
        now = time.monotonic_ns()
        silent = {
            rank: (now - line.beat_ns) / 1e9
            for rank, line in enumerate(self._board.read_all())
            if line.phase not in (Phase.START, Phase.IDLE, Phase.INSTALL)
        }
        if not silent or max(silent.values()) < self._stall_s:
            return None
        stopped = [rank for rank in silent if self._is_stopped(rank)]
        rank = stopped[0] if stopped else max(silent, key=lambda one: silent[one])
        state = "its process is stopped" if stopped else "no sign of life"
        return EngineLostError(rank, self._board.read(rank).phase.label, f"{state} for {silent[rank]:.0f} s")

    def _is_stopped(self, rank: int) -> bool:
        pid = self._processes[rank].pid
        try:
            return pid is not None and psutil.Process(pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return False
