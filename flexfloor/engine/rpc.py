"""How the protocol reaches this rank's worker and the other ranks from inside an engine core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from flexfloor.elastic.ticket import Exchange, Ticket
from flexfloor.elastic.vector import Row, decode, encode


class RpcWorker:
    """The worker of this engine core, called through its executor."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def call(self, method: str, *args: Any) -> Any:
        """One method of the worker's ElasticWorld."""
        return self._executor.collective_rpc("flexfloor_call", args=(method, *args))[0]

    def drain(self) -> None:
        """The worker itself keeps no batches."""

    def prepare(self, ticket: Ticket) -> None:
        self.call("prepare", ticket)

    def stage(self, ticket: Ticket) -> dict[str, float]:
        return dict(self.call("stage", ticket))

    def switch(self, ticket: Ticket) -> None:
        self.call("switch", ticket)

    def capture(self, ticket: Ticket) -> dict[str, Any]:
        return dict(self.call("capture", ticket))

    def capture_wanted(self, load: int) -> int:
        return int(self.call("capture_wanted", load))

    def trial(self, ticket: Ticket) -> None:
        self.call("trial", ticket)

    def undo(self, ticket: Ticket) -> None:
        self.call("undo", ticket)

    def confirm(self, ticket: Ticket) -> None:
        self.call("confirm", ticket)

    def park(self) -> None:
        self.call("park")

    def park_report(self) -> dict[str, Any] | None:
        report: dict[str, Any] | None = self.call("park_report")
        return report

    def wake(self, ticket: Ticket) -> None:
        self.call("wake", ticket)

    def start_wake(self) -> None:
        self.call("start_wake")

    def wake_seconds(self) -> float:
        return float(self.call("wake_seconds"))

    def refill(self, ticket: Ticket) -> dict[str, float]:
        return dict(self.call("refill", ticket))

    def switch_back(self, ticket: Ticket) -> None:
        self.call("switch_back", ticket)

    def loaded(self, version: int) -> None:
        self.call("loaded", version)


class CoreWorker(RpcWorker):
    """RpcWorker that also knows the engine's batches in flight and its scheduler's prefix cache."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine.model_executor)
        self._engine = engine

    def drain(self) -> None:
        """A step of vLLM with nothing to schedule waits for the oldest batch and hands its outputs on."""
        engine = self._engine
        while engine.batch_queue:
            with _nothing_to_schedule(engine.scheduler):
                outputs, executed = engine.step_fn()
            for output in outputs.items() if outputs else ():
                engine.output_queue.put_nowait(output)
            engine.post_step(executed)

    def park(self) -> None:
        """KV contents go: no cached prefix may be found later."""
        if not self._engine.scheduler.reset_prefix_cache():
            raise RuntimeError("the prefix cache still holds blocks of running requests")
        super().park()


@contextmanager
def _nothing_to_schedule(scheduler: Any) -> Iterator[None]:
    scheduler.has_requests = lambda: False
    try:
        yield
    finally:
        del scheduler.has_requests


def exchange_over(group_of: Callable[[], Any], rank: int, size: int) -> Exchange:
    """The all-reduce of one row over the full world's host group, looked up at each call."""

    def exchange(row: Row) -> list[Row]:
        flat = torch.tensor(encode(row, rank, size), dtype=torch.int64)
        dist.all_reduce(flat, group=group_of())
        return decode(flat.tolist(), size)

    return exchange
