"""In-process engines: the fast test bed of the worker code.

N processes, each with vLLM's in-process LLMEngine (``external_launcher``), driven in lock-step
by the same Session and ElasticWorld that run inside DPEngineCoreProc. What happens at which
iteration is exact, so a test can shrink in the middle of a chunked prefill or restore after
the seventh step.

    parent --pipe--> N ranks: Rollout in, RankResult out; ranks meet in gloo only
"""

from __future__ import annotations

import multiprocessing
import socket
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from flexfloor.engine.bed_rank import serve
from flexfloor.engine.bed_rollout import BedRequest, RankResult, Rollout
from flexfloor.engine.settings import EngineSettings
from flexfloor.errors import EngineLostError


class Bed:
    """N in-process engines.

    Args:
        model: checkpoint directory.
        settings: engine settings (``world_size`` gives N).
        options: further vLLM engine arguments.
        start_s: how long the start may take.
        context: how the processes are started; None spawns them.
    """

    def __init__(
        self,
        model: str | Path,
        settings: EngineSettings,
        *,
        options: dict[str, Any] | None = None,
        start_s: float = 300,
        context: BaseContext | None = None,
    ) -> None:
        self.size = settings.world_size
        self._settings = settings
        start: Any = context or multiprocessing.get_context("spawn")
        port = _free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self.size):
            ours, theirs = start.Pipe()
            process = start.Process(
                target=serve, args=(rank, str(model), settings, options or {}, port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.facts = self._gather(start_s, "start")

    def run(self, rollout: Rollout, *, within_s: float = 300) -> list[RankResult]:
        """One rollout; the result of each rank, rank 0 first."""
        for pipe in self._pipes:
            pipe.send(("run", rollout))
        return self._gather(within_s, "rollout")

    def call(self, method: str, *args: Any, within_s: float = 60) -> list[Any]:
        """A method of every rank's :class:`_Rank` (``wake_all``, ``usage``)."""
        for pipe in self._pipes:
            pipe.send((method, *args))
        return self._gather(within_s, method)

    def pids(self) -> list[int]:
        """Process ids, rank 0 first."""
        return [int(process.pid or 0) for process in self._processes]

    def close(self) -> None:
        """End the processes this bed started."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def _gather(self, within_s: float, what: str) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < self.size:
            open_pipes = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(open_pipes, timeout=within_s)
            if not ready:
                missing = [rank for rank in range(self.size) if rank not in answers]
                self.close()
                raise EngineLostError(missing[0], what, f"no answer within {within_s} s from ranks {missing}")
            for pipe in ready:
                rank = next(r for r, own in enumerate(self._pipes) if own is pipe)
                try:
                    answer = self._pipes[rank].recv()
                except EOFError:
                    answer = RuntimeError("the process died")
                if isinstance(answer, Exception):
                    self.close()
                    raise EngineLostError(rank, what, str(answer)) from answer
                answers[rank] = answer
        return [answers[rank] for rank in range(self.size)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


__all__ = ["Bed", "BedRequest", "RankResult", "Rollout"]
