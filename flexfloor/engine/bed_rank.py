"""One process of the in-process test bed: vLLM's LLMEngine in lock-step with the others."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flexfloor.elastic.placement import Placement
from flexfloor.engine.bed_rollout import BedRequest, RankResult, Rollout
from flexfloor.engine.settings import EngineSettings


def serve(
    rank: int, model: str, settings: EngineSettings, options: dict[str, Any], port: int, pipe: Connection
) -> None:
    """The process's main: start the engine, answer the parent until it goes."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(settings.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_USE_V2_MODEL_RUNNER="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        **settings.export(),
    )
    try:
        served = BedRank(rank, model, settings, options)
        pipe.send(served.facts)
        while True:
            method, *args = pipe.recv()
            pipe.send(getattr(served, method)(*args))
    except EOFError:
        os._exit(0)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        os._exit(1)


class BedRank:
    """One process of the bed."""

    def __init__(self, rank: int, model: str, settings: EngineSettings, options: dict[str, Any]) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from flexfloor.elastic.ballot import Ballot
        from flexfloor.elastic.board import Board
        from flexfloor.elastic.faults import FaultPlan
        from flexfloor.elastic.session import Session
        from flexfloor.engine import lifetime
        from flexfloor.engine.budget import Budget
        from flexfloor.engine.rpc import CoreWorker, exchange_over
        from flexfloor.engine.settings import EXTENSION
        from flexfloor.events import EventWriter

        lifetime.follow_parent()
        arguments: dict[str, Any] = {
            "model": model,
            "dtype": "bfloat16",
            "max_model_len": 512,
            "enforce_eager": True,
            "enable_expert_parallel": True,
            "data_parallel_size": settings.world_size,
            "tensor_parallel_size": 1,
            "distributed_executor_backend": "external_launcher",
            "worker_extension_cls": EXTENSION,
            "async_scheduling": False,
            "kv_cache_memory_bytes": 8 << 20,
            "max_num_seqs": 16,
            "block_size": 32,
            "seed": 1,
            **options,
        }
        self._llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.engine = self._llm.engine_core.engine_core
        self.worker = CoreWorker(self.engine)
        self.facts = self.worker.call("facts")
        self.events = EventWriter(
            Path(settings.events_dir) / f"rank-{rank}.jsonl", run=settings.run, rank=rank, replica=settings.replica
        )
        exchange = exchange_over(lambda: self._llm.dp_group, rank, settings.world_size)
        board = Board(settings.board, settings.world_size)
        ballot = Ballot(rank, exchange, self.events.emit, board, FaultPlan.of(settings.faults, rank))
        placement = Placement.linear(self.facts["experts"], settings.world_size, self.facts["capacity"])
        self.session = Session(settings.world_size, placement, self.worker, ballot, deadline_s=settings.deadline_s)
        self.rank = rank
        self.budget = Budget(self.engine, self.worker, self.facts)

    def wake_all(self) -> dict[str, Any]:
        """See Session.wake_all."""
        self.session.wake_all()
        return self.session.status()

    def loaded(self, version: int | None = None) -> dict[str, Any]:
        """See Session.loaded."""
        self.session.loaded(version)
        return self.session.status()

    def placement(self) -> Placement:
        """What this rank takes the rows of all ranks to hold."""
        return self.session.placement

    def on_worker(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(worker, *args)``."""
        return function(self.engine.model_executor.driver_worker.worker, *args)

    def strike(self, faults: Sequence[str]) -> None:
        """Faults from now on (see :mod:`flexfloor.elastic.faults`), replacing earlier ones."""
        from flexfloor.elastic.faults import FaultPlan

        self.session.ballot.faults = FaultPlan.of(faults, self.rank)

    def usage(self) -> dict[str, int]:
        """Memory (bytes), descriptors, threads, shared-memory segments of this process; rows and KV with memory."""
        import psutil

        process, facts = psutil.Process(), self.worker.call("facts")
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        return {
            "uss": int(process.memory_full_info().uss),
            "fds": process.num_fds(),
            "threads": process.num_threads(),
            "shm": sum("/dev/shm" in line for line in maps),
            "rows": self.budget.rows,
            "row_bytes": facts["row_bytes"],
            "kv_tokens": self.budget.tokens(),
            "backed_bytes": facts["weight_bytes"] + facts["kv_bytes"],
        }

    def run(self, rollout: Rollout) -> RankResult:
        """One rollout of this rank, in lock-step with the others."""
        from flexfloor.elastic.step import Local, Step
        from flexfloor.engine.core import tokens_left

        mine = sorted((r for r in rollout.requests if r.rank == self.rank), key=lambda r: r.at)
        early = sum(r.at == 0 for r in mine)
        expected = early if rollout.expected is None else rollout.expected[self.rank]
        self.events.set_step(0, rollout.step)
        self.budget.make(rollout.ladder[-1], rollout.kv_tokens)
        self.session.backed(self.budget.rows)
        self.session.install(
            Step(
                digest=f"{rollout.step + 1:032x}",
                epoch=0,
                step=rollout.step,
                ladder=rollout.ladder,
                expected=expected,
                rank_order=tuple(range(self.session.world.size)),
                end=rollout.end,
                predicted=rollout.predicted,
            )
        )
        result = RankResult()
        scheduler = self.engine.scheduler
        iteration = 0
        running = True
        while running:
            while mine and mine[0].at <= iteration:
                self._submit(mine.pop(0))
            if iteration in rollout.restore_at:
                self.session.request_restore()
            if not self.session.idle:
                self._step(result, iteration)
            unfinished = scheduler.get_num_unfinished_requests()
            if self.session.due(unfinished):
                local = Local(
                    unfinished=unfinished,
                    kv_free=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
                    tokens_left=tokens_left(scheduler),
                )
                running = self.session.sync(local).running
            result.worlds.append(tuple(self.session.world.members))
            iteration += 1
        result.status = self.session.status()
        return result

    def _submit(self, request: BedRequest) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            ignore_eos=request.ignore_eos,
            logprobs=1,
            seed=request.seed,
        )
        self.session.trajectories.arrive(request.name)
        self._llm.add_request(request.name, TokensPrompt(prompt_token_ids=list(request.prompt)), params)

    def _step(self, result: RankResult, iteration: int) -> None:
        scheduler = self.engine.scheduler
        if not scheduler.has_unfinished_requests():
            self.engine.execute_dummy_batch()
            return
        requests = dict(scheduler.requests)
        for output in self._llm.step():
            if output.finished:
                done = output.outputs[0]
                result.tokens[output.request_id] = list(done.token_ids)
                result.logprobs[output.request_id] = [next(iter(d.values())).logprob for d in done.logprobs]
        if any(0 < r.num_computed_tokens < r.num_prompt_tokens for r in scheduler.running):
            result.prefilling.append(iteration)
        for name, request in requests.items():
            result.preemptions[name.rsplit("-", 1)[0]] = request.num_preemptions
