"""In-process engines: the fast test bed of the worker code.

N processes, each with vLLM's in-process LLMEngine (``external_launcher``), driven in lock-step
by the same Session and ElasticWorld that run inside DPEngineCoreProc. What happens at which
iteration is exact, so a test can shrink in the middle of a chunked prefill or restore after
the seventh step.

    parent --pipe--> N ranks: Rollout in, RankResult out; ranks meet in gloo only
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from flexfloor.engine.settings import EngineSettings
from flexfloor.errors import EngineLostError


@dataclass(frozen=True)
class BedRequest:
    """One request.

    Attributes:
        name: its id, unique in the rollout.
        rank: where it runs.
        prompt: token ids.
        max_tokens: upper bound of its length.
        temperature: 0 for greedy.
        seed: sampling seed.
        at: iteration at which it arrives.
        ignore_eos: run to ``max_tokens``.
    """

    name: str
    rank: int
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    at: int = 0
    ignore_eos: bool = True


@dataclass(frozen=True)
class Rollout:
    """One rollout of all ranks.

    Attributes:
        requests: all requests.
        ladder: sizes from N down; (N,) never shrinks.
        expected: trajectories a rank, default: counted from ``requests`` that arrive at 0.
        restore_at: iterations at which the full world is asked for.
        end: ``full`` or ``topology``.
        step: number of the step.
    """

    requests: tuple[BedRequest, ...]
    ladder: tuple[int, ...]
    expected: tuple[int, ...] | None = None
    restore_at: tuple[int, ...] = ()
    end: str = "full"
    step: int = 0


@dataclass
class RankResult:
    """What one rank reports of a rollout.

    Attributes:
        tokens: request -> token ids.
        logprobs: request -> log-probability of each token.
        preemptions: request -> how often it was preempted.
        worlds: members at each iteration, as this rank saw them.
        prefilling: iterations at which this rank had a partly prefilled request.
        status: the session's status at the end.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    preemptions: dict[str, int] = field(default_factory=dict)
    worlds: list[tuple[int, ...]] = field(default_factory=list)
    prefilling: list[int] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)


class Bed:
    """N in-process engines.

    Args:
        model: checkpoint directory.
        settings: engine settings (``world_size`` gives N).
        options: further vLLM engine arguments.
        start_s: how long the start may take.
    """

    def __init__(
        self,
        model: str | Path,
        settings: EngineSettings,
        *,
        options: dict[str, Any] | None = None,
        start_s: float = 300,
    ) -> None:
        self.size = settings.world_size
        self._settings = settings
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, str(model), settings, options or {}, port, theirs), daemon=True
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


def _serve(
    rank: int, model: str, settings: EngineSettings, options: dict[str, Any], port: int, pipe: Connection
) -> None:
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
        served = _Rank(rank, model, settings, options)
        pipe.send(served.facts)
        while True:
            method, *args = pipe.recv()
            pipe.send(getattr(served, method)(*args))
    except EOFError:
        os._exit(0)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        os._exit(1)


class _Rank:
    """One process of the bed."""

    def __init__(self, rank: int, model: str, settings: EngineSettings, options: dict[str, Any]) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from flexfloor.elastic.ballot import Ballot
        from flexfloor.elastic.board import Board
        from flexfloor.elastic.faults import FaultPlan
        from flexfloor.elastic.placement import Placement
        from flexfloor.elastic.session import Session
        from flexfloor.engine import lifetime
        from flexfloor.engine.core import CoreWorker, exchange_over
        from flexfloor.engine.worker import EXTENSION
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

    def wake_all(self) -> dict[str, Any]:
        """See Session.wake_all."""
        self.session.wake_all()
        return self.session.status()

    def loaded(self) -> dict[str, Any]:
        """See Session.loaded."""
        self.session.loaded()
        return self.session.status()

    def strike(self, faults: Sequence[str]) -> None:
        """Faults from now on (see :mod:`flexfloor.elastic.faults`), replacing earlier ones."""
        from flexfloor.elastic.faults import FaultPlan

        self.session.ballot.faults = FaultPlan.of(faults, self.rank)

    def usage(self) -> dict[str, int]:
        """Memory (bytes), file descriptors, threads, shared-memory segments of this process."""
        import psutil

        process = psutil.Process()
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        return {
            "uss": int(process.memory_full_info().uss),
            "fds": process.num_fds(),
            "threads": process.num_threads(),
            "shm": sum("/dev/shm" in line for line in maps),
        }

    def run(self, rollout: Rollout) -> RankResult:
        """One rollout of this rank, in lock-step with the others."""
        from flexfloor.elastic.step import Local, Step

        mine = sorted((r for r in rollout.requests if r.rank == self.rank), key=lambda r: r.at)
        early = sum(r.at == 0 for r in mine)
        expected = early if rollout.expected is None else rollout.expected[self.rank]
        self.events.set_step(0, rollout.step)
        self.session.install(
            Step(
                digest=f"{rollout.step + 1:032x}",
                epoch=0,
                step=rollout.step,
                ladder=rollout.ladder,
                expected=expected,
                rank_order=tuple(range(self.session.world.size)),
                end=rollout.end,
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
            outcome = self.session.sync(
                Local(
                    unfinished=scheduler.get_num_unfinished_requests(),
                    kv_free=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
                )
            )
            result.worlds.append(tuple(self.session.world.members))
            running = outcome.running
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
