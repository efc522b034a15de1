"""A server of CUDA ranks and the rollouts that ran on it."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexfloor.driver.engines import Engines
from flexfloor.driver.handles import LocalServer
from flexfloor.driver.orders import Sampling, StepOrder
from flexfloor.driver.spec import ServerSpec
from gpu.arms import Arm, Load


class Bench:
    """The server and the arms that ran on it.

    Args:
        spec: how it is started.
        folder: where each arm's events go.
        limit_s: after this the engine processes print their stacks and everything ends.
        at_limit: is called before.
    """

    def __init__(
        self, spec: ServerSpec, folder: Path, limit_s: float, at_limit: Callable[[], None] = lambda: None
    ) -> None:
        self._folder, self._count = folder, 0
        self.records: list[dict[str, Any]] = []
        self._references: dict[Load, Arm] = {}
        self.server = LocalServer(spec)
        self._watch(limit_s, at_limit)
        began = time.perf_counter()
        self.statuses = self.server.start()
        self.start_s = time.perf_counter() - began

    def _watch(self, limit_s: float, at_limit: Callable[[], None]) -> None:
        def out() -> None:
            print(f"LIMIT of {limit_s} s reached", flush=True)
            at_limit()
            for pid in self.server.server.pids().values():
                os.kill(pid, signal.SIGABRT)
            time.sleep(3)
            faulthandler.dump_traceback(all_threads=True)
            os._exit(3)

        timer = threading.Timer(limit_s, out)
        timer.daemon = True
        timer.start()

    def arm(self, name: str, load: Load, ladder: tuple[int, ...], end: str = "full", **more: Any) -> Arm:
        """Run one rollout, keep and print its record; ``more`` are further fields of its `StepOrder`."""
        events = self._folder / f"arm-{self._count}"
        order = StepOrder(
            digest=hashlib.sha256(f"{self._count}{ladder}".encode()).hexdigest(),
            epoch=0,
            step=self._count,
            ladder=ladder,
            rank_order=tuple(range(ladder[0])),
            requests=load.requests(),
            sampling=Sampling(temperature=load.temperature, ignore_eos=True, logprobs=True),
            run="gpu",
            events_dir=str(events / "events"),
            end=end,
            timed=True,
            **more,
        )
        self._count += 1
        began = time.perf_counter()
        responses = self.server.run_step(order)
        seconds = time.perf_counter() - began
        arm = Arm.of(events, responses, name=name, ladder=ladder, seconds=seconds)
        record = arm.record(self._references.get(load))
        if len(ladder) == 1:
            self._references.setdefault(load, arm)
        self.records.append(record)
        print("ARM", json.dumps(record), flush=True)
        return arm

    def wake_all(self) -> None:
        """After a topology restore: memory and weights of the sleepers."""
        engines = self._engines()
        self.server.wait(engines.call("wake_all", {}, 60.0))

    def sleep_and_reload(self) -> None:
        """As a trainer does between steps: sleep, weights' memory, weights from disk, KV's memory."""
        engines = self._engines()

        async def renew() -> None:
            await engines.llm.sleep(2)
            await engines.llm.wake_up(["weights"])
            await engines.llm.collective_rpc("reload_weights")
            await engines.llm.wake_up(["kv_cache"])
            await engines.call("loaded", {}, 60.0)

        self.server.wait(renew())

    def status(self) -> list[dict[str, Any]]:
        """Each rank's status now."""
        return self.server.wait(self._engines().call("status", {}, 60.0))

    def _engines(self) -> Engines:
        engines = self.server.server._engines
        if engines is None:
            raise RuntimeError("the server is not started")
        return engines


def versions() -> dict[str, str]:
    """What ran."""
    import torch
    import vllm
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return {
        "vllm": vllm.__version__,
        "torch": str(torch.__version__),
        "nccl": NCCLLibrary().ncclGetVersion(),
        "device": torch.cuda.get_device_name(0),
        "devices": str(torch.cuda.device_count()),
    }
