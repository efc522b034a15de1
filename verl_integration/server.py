"""verl's vLLM server around elastic engines: one Ray actor a replica.

    trainer --flexfloor_begin--> install on every rank --ack-->
    agent loops --generate(turn)--> door (planned order) --> AsyncLLM.add_request(data_parallel_rank=planned)
    trainer --flexfloor_end--> full world stands again (polled on the status board) --> report
    trainer --update_weights--> every rank --set_global_steps(version)--> loaded(version) on every rank

Invariants: a step is installed on all ranks or on none; the watchdog owns the engines' process ids; without a step in
progress (validation) requests go vLLM's own way.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import time
from typing import Any

from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from flexfloor.driver.at_hand import ranks_share_cpu
from flexfloor.driver.children import ForkServer, Spawn, children_of, warm_up
from flexfloor.driver.engines import CallFailedError, Engines, async_scheduling
from flexfloor.driver.processes import GRACE_S
from flexfloor.driver.spec import CLEARED, CPU_KV_BYTES, STALL_MARGIN_S
from flexfloor.driver.watchdog import SETTLE_S, Watchdog
from flexfloor.elastic.board import Board
from flexfloor.elastic.states import RankState
from flexfloor.engine.settings import EngineSettings
from flexfloor.errors import EngineLostError, FlexFloorError, ProtocolError, RefusedError, TransitionError
from flexfloor.events import event_file
from verl_integration.door import Door
from verl_integration.extension import EXTENSION
from verl_integration.orders import StepReport, Turn
from verl_integration.section import RunSettings

CALL_TIMEOUT_S = 60.0
POLL_S = 0.01
LOSS_WAIT_S = SETTLE_S + 3 * GRACE_S

_turn: contextvars.ContextVar[Turn | None] = contextvars.ContextVar("flexfloor_turn", default=None)


class ElasticHttpServer(vLLMHttpServer):  # type: ignore[misc]
    """See the module. Arguments are verl's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        run = RunSettings.of_rollout(self.config)
        if run is None:
            raise ProtocolError("the rollout configuration carries no FlexFloor settings")
        self._run, self._section = run, run.config
        self._door: Door | None = None
        self._open: dict[str, Any] | None = None
        self._entered = 0
        self._generated_at = 0.0
        self._losses: list[str] = []
        self._lost: EngineLostError | None = None
        self._ended: asyncio.Task[float] | None = None
        self._board_file = run.board(self.replica_rank)
        self._board_file.parent.mkdir(parents=True, exist_ok=True)
        self._board_file.unlink(missing_ok=True)
        self._board = Board(self._board_file, self._section.world_size)
        self._export()
        if ranks_share_cpu():
            warm_up("verl_integration.extension", "verl_integration.cpu.reload")

    # -- start ---------------------------------------------------------------------------------

    def _export(self) -> None:
        section = self._section
        settings = EngineSettings(
            world_size=section.world_size,
            smallest_floor=min(section.admissible_sizes),
            combine=section.engine.combine,
            deadline_s=section.engine.deadline_s,
            trial_step=section.engine.trial_step,
            events_dir=str(self._run.events_dir),
            board=str(self._board_file),
            run=self._run.run,
            replica=self.replica_rank,
            extension=EXTENSION,
        )
        os.environ.update(settings.export())
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        for name in CLEARED:
            os.environ.pop(name, None)

    def _get_worker_extension_cls(self) -> str:
        return EXTENSION

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        engine = self._section.engine
        own = {"kv_cache_memory_bytes": engine.kv_cache_bytes, "block_size": engine.block_size, **engine.vllm}
        if ranks_share_cpu():
            engine_kwargs.setdefault("kv_cache_memory_bytes", CPU_KV_BYTES)
        engine_kwargs.update({name: value for name, value in own.items() if value is not None})
        engine_kwargs["worker_extension_cls"] = EXTENSION
        ahead = async_scheduling()
        if ahead is not None:
            engine_kwargs.setdefault("async_scheduling", ahead)

    async def run_server(self, args: Any) -> None:
        """Starts the engines: guarded, on CPU from a fork server; then watches them."""
        from vllm.platforms import current_platform
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        on_cpu = current_platform.is_cpu()
        args.distributed_executor_backend = UniProcExecutor
        with children_of(ForkServer() if on_cpu else Spawn()):
            await super().run_server(args)
        stock = self.engine.add_request

        async def add_request(request_id: str, prompt: Any, params: Any, *rest: Any, **named: Any) -> Any:
            turn = _turn.get()
            if turn is None:
                return await stock(request_id, prompt, params, *rest, **named)
            named["data_parallel_rank"] = self._route(turn)
            if turn.place is None or self._door is None:
                return await stock(request_id, prompt, params, *rest, **named)
            async with self._door.turn(turn.place):
                entered = await stock(request_id, prompt, params, *rest, **named)
                self._entered += 1
                return entered

        self.engine.add_request = add_request
        self._engines = Engines(self.engine, self._section.world_size)
        self._watchdog = Watchdog(
            self._engines.processes(),
            self._board,
            stall_s=self._section.engine.deadline_s + STALL_MARGIN_S,
            events=lambda rank: event_file(self._run.events_dir, rank, self.replica_rank),
            on_loss=self._note_loss,
        )
        self._watchdog.start()

    def _note_loss(self, error: EngineLostError) -> None:
        self._lost = error

    # -- a step --------------------------------------------------------------------------------

    async def flexfloor_begin(self, order: dict[str, Any]) -> str | None:
        """Installs a step on every rank; what went wrong as one line, or None.

        Args:
            order: see `orders.installation`.
        """
        try:
            await self._begin(order)
        except FlexFloorError as error:
            return str(error)
        return None

    async def _begin(self, order: dict[str, Any]) -> None:
        self._raise_loss()
        if self._open is not None:
            raise ProtocolError(f"step {self._open['step']} is still open")
        self._watchdog.step_begins()
        await self.engine.reset_prefix_cache()
        self._door = Door(sum(order["expected"]))
        self._entered, self._generated_at = 0, time.time()
        self._losses.clear()
        try:
            acknowledged = await self._engines.install(order, CALL_TIMEOUT_S)
        except CallFailedError as error:
            what = f"rank {error.rank} refused step {order['step']}: {error.what}"
            raise RefusedError(what, remedy="plan again for these engines") from error
        if {answer["digest"] for answer in acknowledged} != {order["digest"]}:
            raise ProtocolError(f"the ranks acknowledged another plan than step {order['step']}")
        self._open = order
        self._ended = asyncio.create_task(self._full_world())

    async def generate(self, *args: Any, flexfloor: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """verl's generate; ``flexfloor`` is a `Turn` as plain data."""
        if flexfloor is None:
            return await super().generate(*args, **kwargs)
        turn = Turn(**flexfloor)
        params = kwargs["sampling_params"] = dict(kwargs["sampling_params"])
        params["extra_args"] = {"flexfloor": {"trajectory": turn.trajectory, "more": turn.more}}
        token = _turn.set(turn)
        try:
            output = await super().generate(*args, **kwargs)
        except Exception as error:
            await self._explain(error)
            if turn.place is not None and self._door is not None and not self._door.passed(turn.place):
                await self.flexfloor_lost(turn.place, turn.rank, f"{type(error).__name__}: {error}")
            raise
        finally:
            _turn.reset(token)
        self._generated_at = time.time()
        return output

    async def _explain(self, error: Exception) -> None:
        """A dying engine's error becomes the watchdog's one line (plain text: exceptions lose their fields in Ray)."""
        end = time.monotonic() + (LOSS_WAIT_S if type(error).__name__.startswith("Engine") else 0.0)
        while self._lost is None and time.monotonic() < end:
            await asyncio.sleep(POLL_S)
        if self._lost is not None:
            raise RuntimeError(str(self._lost)) from None

    def _route(self, turn: Turn) -> int:
        """The planned rank, or the first member while that rank is parked (a late turn)."""
        away = self._board.parked()
        if turn.rank not in away:
            return turn.rank
        return next((rank for rank in range(self._section.world_size) if rank not in away), turn.rank)

    async def flexfloor_lost(self, place: int, rank: int, why: str) -> None:
        """The response at ``place`` never reached an engine: the rank no longer waits for it."""
        self._losses.append(why)
        if self._open is None or self._door is None or self._door.passed(place):
            return
        await self._door.lose(place)
        await self._call_rank(rank, "revise", {"delta": -1})

    async def flexfloor_close_trajectory(self, trajectory: str, rank: int) -> None:
        """No further turn of a trajectory comes."""
        if self._open is not None:
            await self._call_rank(rank, "close_trajectory", {"trajectory": trajectory})

    async def flexfloor_note(self, why: str) -> None:
        """An agent loop failed after its first request; kept for the step's report."""
        self._losses.append(why)

    async def flexfloor_end(self) -> StepReport | str:
        """Waits for the full world; the step's report, or what went wrong as one line."""
        if self._open is None or self._ended is None:
            return StepReport(self.replica_rank, time.time(), time.time())
        try:
            if self._entered == 0:  # no request, no wave: idle engines never meet to end the step
                await self._engines.call("withdraw", {}, CALL_TIMEOUT_S)
            ended_at = await self._ended
            for status in await self._engines.call("status", {}, CALL_TIMEOUT_S):
                if status["step"] is not None or len(status["members"]) != self._section.world_size:
                    raise TransitionError(status["rank"], status["phase"], "the step is over, the rank is not")
        except FlexFloorError as error:
            return str(error)
        finally:
            self._open = self._door = self._ended = None
        return StepReport(self.replica_rank, min(self._generated_at, ended_at), ended_at, tuple(self._losses))

    async def flexfloor_health(self) -> list[str]:
        """What went wrong so far: a lost engine first, then agent loops' errors."""
        lost = self._lost
        return [*([str(lost)] if lost is not None else []), *self._losses]

    async def flexfloor_pids(self) -> dict[int, int]:
        """Process ids of the engines by rank."""
        return {rank: process.pid for rank, process in self._engines.processes().items() if process.pid is not None}

    async def flexfloor_facts(self) -> list[dict[str, Any]]:
        """Each rank's status with its facts and KV tokens."""
        return await self._engines.call("status", {}, CALL_TIMEOUT_S)

    async def _full_world(self) -> float:
        """When every rank has left the step and the full world stands."""
        while True:
            self._raise_loss()
            lines = self._board.read_all()
            if all(line.step < 0 for line in lines):
                if any(line.state in (RankState.PARKED, RankState.DETACHING) for line in lines):
                    raise TransitionError(0, "restore", "the step is over, but not every rank is back")
                return time.time()
            await asyncio.sleep(POLL_S)

    async def _call_rank(self, rank: int, name: str, values: dict[str, Any]) -> None:
        client = self.engine.engine_core
        engine = client.core_engines[rank]
        await client._call_utility_async("flexfloor_call", name, json.dumps(values), engine=engine)

    def _raise_loss(self) -> None:
        if self._lost is not None:
            raise self._lost

    # -- weights -------------------------------------------------------------------------------

    async def set_global_steps(self, global_steps: int) -> None:
        """verl's last word of a weight update: all ranks have the weights of this version."""
        await super().set_global_steps(global_steps)
        await self._engines.call("loaded", {"version": int(global_steps)}, CALL_TIMEOUT_S)
