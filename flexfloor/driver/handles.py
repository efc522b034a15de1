"""Ways to hold a rollout server: in a Ray actor (a process of its own) or in a thread of this process (tests).

Both answer the same contract, :class:`Server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from flexfloor import errors
from flexfloor.driver.orders import Failure, Progress, Response, StepOrder
from flexfloor.driver.server import RolloutServer
from flexfloor.driver.spec import START_TIMEOUT_S, ServerSpec
from flexfloor.elastic.board import Board
from flexfloor.elastic.states import Phase

T = TypeVar("T")
Observer = Callable[[Progress], None]

POLL_S = 0.25
CLOSE_TIMEOUT_S = 30.0


class Server(Protocol):
    """A started rollout server."""

    spec: ServerSpec

    def start(self, observe: Observer) -> list[dict[str, Any]]:
        """Starts the engines; each rank's status. See `RolloutServer.start`."""

    def run_step(self, order: StepOrder, observe: Observer) -> list[Response]:
        """Runs one step. See `RolloutServer.run_step`."""

    def close(self) -> None:
        """Ends everything the server started; idempotent."""


class LocalServer:
    """A server in a thread of this process.

    Args:
        spec: how it is started.
    """

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.server = RolloutServer(spec)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="flexfloor-server", daemon=True)
        self._thread.start()

    def start(self, observe: Observer = lambda _: None) -> list[dict[str, Any]]:
        """See `Server`."""
        return self.wait(self.server.start(), observe)

    def run_step(self, order: StepOrder, observe: Observer = lambda _: None) -> list[Response]:
        """See `Server`."""
        return self.wait(self.server.run_step(order), observe)

    def wait(self, work: Coroutine[Any, Any, T], observe: Observer = lambda _: None) -> T:
        """Runs ``work`` on the server's loop and observes its progress."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            try:
                return future.result(timeout=POLL_S)
            except TimeoutError:
                if future.done():
                    raise
                observe(self.server.progress())

    def close(self) -> None:
        """See `Server`."""
        if self._thread.is_alive():
            self.wait(self.server.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class ServerActor:
    """What runs inside the Ray actor: errors become plain records, output goes to the log.

    Args:
        spec: how the server is started.
    """

    def __init__(self, spec: ServerSpec) -> None:
        if spec.log is not None:
            Path(spec.log).parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
        self._server = RolloutServer(spec)

    async def start(self) -> list[dict[str, Any]] | Failure:
        """See `RolloutServer.start`."""
        return await _reported(self._server.start())

    async def run_step(self, order: StepOrder) -> list[Response] | Failure:
        """See `RolloutServer.run_step`."""
        return await _reported(self._server.run_step(order))

    async def progress(self) -> Progress:
        """See `RolloutServer.progress`."""
        return self._server.progress()

    async def close(self) -> None:
        """See `RolloutServer.close`."""
        await self._server.close()


class RayServer:
    """A server in a Ray actor. Ray must be up.

    Args:
        spec: how it is started; holds ``spec.slots`` of Ray's CPUs.
    """

    def __init__(self, spec: ServerSpec) -> None:
        import ray

        self.spec = spec
        remote = ray.remote(num_cpus=spec.slots, max_restarts=0)(ServerActor)
        self._actor: Any = remote.options(max_concurrency=8).remote(spec)

    def start(self, observe: Observer = lambda _: None) -> list[dict[str, Any]]:
        """See `Server`."""
        statuses: list[dict[str, Any]] = self._wait(self._actor.start.remote(), observe, START_TIMEOUT_S)
        return statuses

    def run_step(self, order: StepOrder, observe: Observer = lambda _: None) -> list[Response]:
        """See `Server`."""
        responses: list[Response] = self._wait(self._actor.run_step.remote(order), observe)
        return responses

    def _wait(self, result: Any, observe: Observer, timeout_s: float | None = None) -> Any:
        import ray
        from ray.exceptions import RayError

        end = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not ray.wait([result], timeout=POLL_S)[0]:
                observe(ray.get(self._actor.progress.remote(), timeout=CLOSE_TIMEOUT_S))
                if end is not None and time.monotonic() > end:
                    raise errors.EngineLostError(0, "start", f"the server did not start within {timeout_s:.0f} s")
            answer = ray.get(result)
        except RayError as error:
            raise self._server_lost(error) from error
        if isinstance(answer, Failure):
            raise revived(answer)
        return answer

    def _server_lost(self, error: Exception) -> errors.EngineLostError:
        """The server process is gone or mute: the board tells where its ranks were."""
        lines = Board(self.spec.settings.board, self.spec.world_size).read_all()
        rank = next((r for r, line in enumerate(lines) if line.phase not in (Phase.START, Phase.IDLE)), 0)
        what = f"its rollout server is gone ({type(error).__name__})"
        return errors.EngineLostError(rank, lines[rank].phase.label, what)

    def close(self) -> None:
        """See `Server`."""
        import ray
        from ray.exceptions import RayError

        actor, self._actor = self._actor, None
        if actor is None:
            return
        with contextlib.suppress(RayError):
            ray.get(actor.close.remote(), timeout=CLOSE_TIMEOUT_S)
        ray.kill(actor)


async def _reported(work: Coroutine[Any, Any, T]) -> T | Failure:
    try:
        return await work
    except errors.EngineLostError as error:
        return Failure("EngineLostError", {"rank": error.rank, "phase": error.phase, "why": error.why})
    except errors.TransitionError as error:
        return Failure("TransitionError", {"rank": error.rank, "phase": error.phase, "why": error.why})
    except errors.RefusedError as error:
        return Failure("RefusedError", {"what": error.what, "remedy": error.remedy})
    except errors.FlexFloorError as error:
        return Failure("FlexFloorError", {"what": str(error)})


def revived(failure: Failure) -> errors.FlexFloorError:
    """The error that a server reported."""
    kind = getattr(errors, failure.kind)
    error: errors.FlexFloorError = (
        kind(str(failure.values["what"])) if kind is errors.FlexFloorError else kind(**failure.values)
    )
    return error
