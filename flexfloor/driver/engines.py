"""The engines of one replica: vLLM's AsyncLLM front end, its engine cores, and calls to each of them.

The only module of the driver that imports vllm.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flexfloor.driver.at_hand import ranks_share_cpu
from flexfloor.driver.children import ForkServer, Spawn, children_of, warm_up
from flexfloor.driver.orders import Request, Sampling
from flexfloor.driver.spec import CPU_KV_BYTES, ServerSpec
from flexfloor.driver.watchdog import SUPPORT
from flexfloor.errors import EngineLostError, RefusedError

_FAILED_CORE = re.compile(r"EngineCore_DP(\d+)'?: (-?\d+)")
_ERROR_LINE = re.compile(r"^(?:\(\S+ pid=\d+\) )?(?:ERROR [^]]*\] )?((?:\w+\.)*\w*(?:Error|Changed|Exception): .+)")


class NoAnswerError(Exception):
    """An engine did not answer a call in time."""

    def __init__(self, rank: int, call: str, seconds: float) -> None:
        self.rank, self.call, self.seconds = rank, call, seconds
        super().__init__(f"rank {rank} did not answer '{call}' within {seconds:.0f} s")


class CallFailedError(Exception):
    """An engine answered a call with an error. ``answers`` holds the others' answers by rank."""

    def __init__(self, rank: int, what: str, answers: dict[int, dict[str, Any]]) -> None:
        self.rank, self.what, self.answers = rank, what, answers
        super().__init__(f"rank {rank}: {what}")


def async_scheduling() -> bool | None:
    """Whether vLLM prepares a batch while the one before runs: its own choice (None) on CUDA, elsewhere not.

    VLLM never does on CPU; on Ascend batches in flight across a transition were not read.
    """
    from vllm.platforms import current_platform

    return None if current_platform.is_cuda() else False


class Engines:
    """AsyncLLM with one engine core a rank.

    Args:
        llm: the AsyncLLM.
        world_size: ranks.
    """

    def __init__(self, llm: Any, world_size: int) -> None:
        self.llm, self.world_size = llm, world_size

    @classmethod
    def start(cls, spec: ServerSpec) -> Engines:
        """Starts front end and engine cores; blocks until all have loaded the model.

        Raises:
            EngineLostError: an engine process ended while starting.
            RefusedError: vLLM does not accept the engine options.
        """
        if ranks_share_cpu():
            warm_up()
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.utils.gc_utils import freeze_gc_heap
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        arguments = {
            "distributed_executor_backend": UniProcExecutor,
            "async_scheduling": async_scheduling(),
            **spec.engine,
        }
        on_cpu = current_platform.is_cpu()
        # As vLLM's API server does: a full collection among all modules keeps tokens back for a third of a second. Done
        # before the front end exists, which has cycles and must be collected when it ends.
        freeze_gc_heap()
        if on_cpu:
            arguments["enforce_eager"] = True
            arguments.setdefault("kv_cache_memory_bytes", CPU_KV_BYTES)
        try:
            with children_of(ForkServer() if on_cpu else Spawn()):
                return cls(AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)), spec.world_size)
        except BaseException as error:
            gc.unfreeze()
            if isinstance(error, RuntimeError):
                raise _start_failure(error, spec.log) from error
            if isinstance(error, ValueError | TypeError):
                remedy = "correct `engine.vllm`"
                raise RefusedError(f"vLLM refuses its options: {_reason(error)}", remedy=remedy) from error
            raise

    def processes(self) -> dict[int, BaseProcess]:
        """Engine-core processes by rank; vLLM's coordinator under `SUPPORT`."""
        resources = self.llm.engine_core.resources
        found: dict[int, BaseProcess] = dict(enumerate(resources.engine_manager.processes))
        if resources.coordinator is not None:
            found[SUPPORT] = resources.coordinator.proc
        return found

    async def call(self, name: str, values: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """One of the session's calls on every rank; answers by rank."""
        return await self._gather(name, "flexfloor_call", (name, json.dumps(values)), timeout_s)

    async def install(self, values: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Installs a step on every rank; acknowledgements by rank. A refusal on one rank withdraws it on all."""
        try:
            return await self._gather("install", "flexfloor_install", (json.dumps(values),), timeout_s)
        except CallFailedError:
            client = self.llm.engine_core
            taken_back = json.dumps({"digest": values["digest"]})
            for engine in client.core_engines:
                await client._call_utility_async("flexfloor_call", "withdraw", taken_back, engine=engine)
            raise

    async def _gather(self, name: str, method: str, args: Sequence[str], timeout_s: float) -> list[dict[str, Any]]:
        client = self.llm.engine_core
        calls = [
            asyncio.wait_for(client._call_utility_async(method, *args, engine=engine), timeout_s)
            for engine in client.core_engines
        ]
        answers: dict[int, dict[str, Any]] = {}
        failure: Exception | None = None
        for rank, answer in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
            if isinstance(answer, TimeoutError):
                raise NoAnswerError(rank, name, timeout_s)
            if isinstance(answer, Exception):
                failure = failure or CallFailedError(rank, str(answer), answers)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answers[rank] = json.loads(answer)
        if failure is not None:
            raise failure
        return [answers[rank] for rank in sorted(answers)]

    async def forget_prompts(self) -> None:
        """Drops cached prompt blocks, so that a step does not depend on the steps before it."""
        await self.llm.reset_prefix_cache()

    async def submit(self, request_id: str, request: Request, sampling: Sampling, rank: int) -> Any:
        """Sends one request to a rank; returns the queue of its outputs.

        Raises:
            RefusedError: vLLM does not accept its prompt.
        """
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import TextPrompt, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            n=1,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=request.seed if sampling.seeded else None,
            max_tokens=request.max_tokens,
            ignore_eos=sampling.ignore_eos,
            logprobs=0 if sampling.logprobs else None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        content = request.content
        prompt = (
            TextPrompt(prompt=content) if isinstance(content, str) else TokensPrompt(prompt_token_ids=list(content))
        )
        self.llm._run_output_handler()
        try:
            return await self.llm.add_request(request_id, prompt, params, data_parallel_rank=rank)
        except (VLLMClientError, ValueError) as error:
            what = f"vLLM refuses the prompt of item {request.item_id!r}: {_reason(error)}"
            raise RefusedError(what, remedy="correct it, or name a model folder that goes with it") from error

    def shut_down(self) -> None:
        """Ends front end and engine cores the way vLLM does; errors on the way are of no interest any more."""
        with contextlib.suppress(Exception):
            self.llm.shutdown(timeout=1.0)
        self.llm = None
        gc.unfreeze()


def _reason(error: Exception) -> str:
    """The first thing that an error says, on one line; pydantic's list several, by field."""
    said = str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        said = ": ".join([*(str(part) for part in first["loc"]), first["msg"]])
    return " ".join(said.split()) or type(error).__name__


def _start_failure(error: RuntimeError, log: str | None) -> EngineLostError:
    found = _FAILED_CORE.search(str(error))
    rank = int(found[1]) if found else 0
    cause = _last_error(log) or " ".join(str(error).split())
    return EngineLostError(rank, "start", f"the engine did not start: {cause}" + (f" (see {log})" if log else ""))


def _last_error(log: str | None) -> str | None:
    """The last line of a log that states the exception of an engine core, FlexFloor's own before others."""
    if log is None:
        return None
    try:
        lines = Path(log).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found = [match[1] for line in lines if "pid=" in line and (match := _ERROR_LINE.match(line))]
    own = [text for text in found if text.startswith("flexfloor.")]
    return (own or found or [None])[-1]
