"""Requests without a plan, sent at once, and vLLM untouched: what the measurements beside stock vLLM share."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from flexfloor.driver.engines import Engines
from flexfloor.driver.orders import Request, Sampling
from flexfloor.driver.spec import ServerSpec


@contextmanager
def untouched(spec: ServerSpec) -> Iterator[None]:
    """While engines of ``spec`` start: no settings, no hooks in use, no spare rows; ``spec`` stays so."""
    kept = dict(os.environ)
    os.environ.update(spec.environment())
    os.environ.pop("FLEXFLOOR_ENGINE")
    del spec.engine["worker_extension_cls"]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


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
