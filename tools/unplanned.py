"""Requests without a plan, sent at once: what the measurements of plain throughput share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from flexfloor.driver.engines import Engines
from flexfloor.driver.orders import Request, Sampling


async def submit_all(engines: Engines, requests: Sequence[Request], sampling: Sampling, name: str) -> tuple[float, int]:
    """Seconds and tokens of all requests, each on its own rank."""
    began = time.perf_counter()
    queues = [await engines.submit(f"{name}.{i}", r, sampling, r.rank) for i, r in enumerate(requests)]
    tokens = sum(await asyncio.gather(*(drain(queue) for queue in queues)))
    return time.perf_counter() - began, tokens


async def drain(queue: Any) -> int:
    """Tokens of one request."""
    tokens = 0
    while True:
        output = queue.get_nowait() or await queue.get()
        tokens += len(output.outputs[0].token_ids)
        if output.finished:
            return tokens
