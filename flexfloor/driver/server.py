"""The rollout server: runs one step after another on the engines of one replica.

A plain class on an asyncio loop; :mod:`flexfloor.driver.handles` puts it into a Ray actor or a thread.

    run_step --> forget prompts --> install (all acknowledge) --> submit, in order --> outputs --> full world
                      any of these  <-- raced against -->  the watchdog's report of a loss

Invariants: requests reach a rank in the order of the step, so compared runs see the same queues; a step that failed
leaves a server that can only be closed; ``close`` leaves no process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from flexfloor.driver.engines import CallFailedError, Engines, NoAnswerError
from flexfloor.driver.orders import Progress, Request, Response, StepOrder
from flexfloor.driver.processes import GRACE_S, end_processes
from flexfloor.driver.spec import CLEARED, ServerSpec
from flexfloor.driver.watchdog import SETTLE_S, Watchdog
from flexfloor.elastic.board import Board
from flexfloor.elastic.states import RankState
from flexfloor.errors import EngineLostError, ProtocolError, RefusedError, TransitionError
from flexfloor.events import event_file

T = TypeVar("T")

POLL_S = 0.01
CALL_TIMEOUT_S = 30.0
RESTORE_DEADLINES = 4
"""A restore may be tried three times, each within the transition deadline; the step may take no longer than this."""


class RolloutServer:
    """One replica.

    Args:
        spec: how it is started.
    """

    def __init__(self, spec: ServerSpec) -> None:
        self._spec = spec
        Path(spec.settings.board).unlink(missing_ok=True)
        self._board = Board(spec.settings.board, spec.world_size)
        self._engines: Engines | None = None
        self._watchdog: Watchdog | None = None
        self._environment: dict[str, str | None] = {}
        self._lost: asyncio.Future[EngineLostError] | None = None
        self._order: StepOrder | None = None
        self._events_dir = Path(spec.settings.events_dir)
        self._phase = "starting"
        self._done, self._tokens, self._extra = 0, 0, 0
        self._inflight: Counter[int] = Counter()

    async def start(self) -> list[dict[str, Any]]:
        """Starts the engines; returns each rank's status with its facts and KV tokens.

        Raises:
            EngineLostError: an engine did not start.
        """
        self._set_environment()
        loop = asyncio.get_running_loop()
        lost: asyncio.Future[EngineLostError] = loop.create_future()
        self._lost = lost
        self._engines = await asyncio.to_thread(Engines.start, self._spec)

        def report(error: EngineLostError) -> None:
            loop.call_soon_threadsafe(lambda: None if lost.done() else lost.set_result(error))

        self._watchdog = Watchdog(
            self._engines.processes(),
            self._board,
            stall_s=self._spec.stall_s,
            events=lambda rank: event_file(self._events_dir, rank, self._spec.settings.replica),
            on_loss=report,
        )
        self._watchdog.start()
        statuses = await self._unless_lost(self._call("status", {}))
        self._phase = "ready"
        return statuses

    def progress(self) -> Progress:
        """Where the server stands; may be asked at any time."""
        order = self._order
        lines = self._board.read_all()
        world = sum(line.state not in (RankState.PARKED, RankState.LEASED) for line in lines)
        if order is None:
            return Progress(self._phase, world=world)
        return Progress(self._phase, order.epoch, order.step, self._done, self._tokens, world)

    def pids(self) -> dict[int, int]:
        """Process ids of the engine cores by rank; `watchdog.SUPPORT` is vLLM's coordinator."""
        processes = self._engines.processes() if self._engines is not None else {}
        return {rank: process.pid for rank, process in processes.items() if process.pid is not None}

    async def run_step(self, order: StepOrder) -> list[Response]:
        """Runs one step and waits for the full world; responses in the order of the requests.

        Raises:
            RefusedError: a rank refused the plan, and the server can go on with another one; or vLLM refused a prompt,
                and the server can only be closed.
            EngineLostError: a process died or stands still; none is left.
            TransitionError: the full world did not come back in time.
        """
        if self._engines is None or self._watchdog is None or self._order is not None:
            raise ProtocolError("a server runs one step at a time, after its start")
        self._order, self._done, self._tokens, self._extra = order, 0, 0, 0
        self._events_dir = Path(order.events_dir)
        self._watchdog.step_begins()
        try:
            return await self._unless_lost(self._step(self._engines, order))
        finally:
            self._order, self._phase = None, "ready"
            self._inflight.clear()

    async def late(self, request: Request) -> Response:
        """Serves one more request within the step in progress; a parked rank's goes to a member.

        Raises:
            ProtocolError: no step is in progress.
        """
        if self._engines is None or self._order is None:
            raise ProtocolError("a late request needs a step in progress")
        self._extra += 1
        index = len(self._order.requests) + self._extra
        sent = await self._send(self._engines, self._order, index, request)
        return await self._unless_lost(self._receive(*sent))

    async def close(self) -> None:
        """Ends everything the server started; idempotent."""
        self._phase = "closed"
        engines, self._engines = self._engines, None
        if self._watchdog is not None:
            await asyncio.to_thread(self._watchdog.stop)
        if engines is not None:
            processes = list(engines.processes().values())
            await asyncio.to_thread(engines.shut_down)
            await asyncio.to_thread(end_processes, [process.pid for process in processes if process.pid], GRACE_S)
            for process in processes:
                process.join(timeout=GRACE_S)
            del engines, processes
            await asyncio.sleep(POLL_S)
            gc.collect()  # AsyncLLM stands in cycles and complains when it is found only at the interpreter's end
        self._restore_environment()

    # -- a step ----------------------------------------------------------------------------

    async def _step(self, engines: Engines, order: StepOrder) -> list[Response]:
        self._phase = "generating"
        await engines.forget_prompts()
        try:
            acknowledged = await engines.install(order.installation(), CALL_TIMEOUT_S)
        except CallFailedError as error:
            what = f"rank {error.rank} refused step {order.step}: {error.what}"
            raise RefusedError(what, remedy="plan again for these engines") from error
        if {answer["digest"] for answer in acknowledged} != {order.digest}:
            raise ProtocolError(f"the ranks acknowledged another plan than step {order.step}")
        sent = [await self._send(engines, order, index, request) for index, request in enumerate(order.requests)]
        responses = await asyncio.gather(*(self._receive(*one) for one in sent))
        self._phase = "restoring"
        await self._full_world(order)
        return list(responses)

    async def _send(self, engines: Engines, order: StepOrder, index: int, request: Request) -> tuple[Request, int, Any]:
        rank = self.route(request.rank)
        self._inflight[rank] += 1
        request_id = f"{order.epoch}.{order.step}.{index}"
        return request, rank, await engines.submit(request_id, request, order.sampling, rank)

    async def _receive(self, request: Request, rank: int, queue: Any) -> Response:
        tokens: list[int] = []
        logprobs: list[float] = []
        times: list[float] = []
        timed = self._order is not None and self._order.timed
        while True:
            output = queue.get_nowait() or await queue.get()
            part = output.outputs[0]
            tokens.extend(part.token_ids)
            self._tokens += len(part.token_ids)
            if timed:
                times.extend([time.time()] * len(part.token_ids))
            if part.logprobs:
                logprobs.extend(d[t].logprob for d, t in zip(part.logprobs, part.token_ids, strict=True))
            if output.finished:
                break
        self._done += 1
        self._inflight[rank] -= 1
        return Response(
            request=request,
            rank=rank,
            token_ids=tuple(tokens),
            logprobs=tuple(logprobs) if logprobs else None,
            finish_reason=str(part.finish_reason),
            num_preempted=int(getattr(output.metrics, "num_preemptions", 0)),
            prompt_tokens=len(output.prompt_token_ids or ()),
            times=tuple(times),
        )

    def route(self, planned: int) -> int:
        """The planned rank, or the member with the fewest open requests while that rank is parked."""
        away = self._board.parked()
        if planned not in away:
            return planned
        members = [rank for rank in range(self._spec.world_size) if rank not in away]
        return min(members, key=lambda rank: (self._inflight[rank], rank), default=planned)

    async def _full_world(self, order: StepOrder) -> None:
        """Waits until every rank has left the step and the full world stands."""
        deadline_s = RESTORE_DEADLINES * self._spec.settings.deadline_s
        end = asyncio.get_running_loop().time() + deadline_s
        while open_ranks := [rank for rank, line in enumerate(self._board.read_all()) if line.step >= 0]:
            if asyncio.get_running_loop().time() > end:
                phase = self._board.read(open_ranks[0]).phase.label
                raise TransitionError(
                    open_ranks[0], phase, f"the full world did not come back within {deadline_s:.0f} s"
                )
            await asyncio.sleep(POLL_S)
        for status in await self._call("status", {}):
            if status["step"] is not None or len(status["members"]) != self._spec.world_size:
                raise TransitionError(status["rank"], status["phase"], f"step {order.step} is over, the rank is not")

    async def _call(self, name: str, values: dict[str, Any]) -> list[dict[str, Any]]:
        if self._engines is None:
            raise ProtocolError("the server is closed")
        return await self._engines.call(name, values, CALL_TIMEOUT_S)

    # -- losses ------------------------------------------------------------------------------

    async def _unless_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, or the watchdog's loss, which explains any error that a dying engine caused."""
        if self._lost is None:
            raise ProtocolError("the server was not started")
        task = asyncio.ensure_future(work)
        try:
            waited: set[asyncio.Future[Any]] = {task, self._lost}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not self._lost.done():
                error = task.exception()
                if error is None or isinstance(error, RefusedError | TransitionError | ProtocolError):
                    return task.result()
                await asyncio.wait({self._lost}, timeout=SETTLE_S + 3 * GRACE_S)
                if not self._lost.done():
                    raise self._unexplained(error) from error
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(BaseException):
                    await task
        raise self._lost.result()

    def _unexplained(self, error: BaseException) -> EngineLostError:
        rank = error.rank if isinstance(error, NoAnswerError | CallFailedError) else 0
        return EngineLostError(rank, self._board.read(rank).phase.label, f"{type(error).__name__}: {error}")

    # -- environment ---------------------------------------------------------------------------

    def _set_environment(self) -> None:
        wanted = self._spec.environment()
        self._environment = {name: os.environ.get(name) for name in (*wanted, *CLEARED)}
        os.environ.update(wanted)
        for name in CLEARED:
            os.environ.pop(name, None)

    def _restore_environment(self) -> None:
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._environment = {}
