"""Requests without a plan, sent at once, vLLM untouched, and ratios: what the measurements beside stock vLLM share."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import comb
from typing import Any, NamedTuple

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


class Served(NamedTuple):
    """What a client saw of requests that were sent at once.

    Attributes:
        seconds: until the last of them was through.
        tokens: of all responses.
        step_s: median time between two tokens of a request; 0.0 where no request has three tokens.
    """

    seconds: float
    tokens: int
    step_s: float


async def submit_all(engines: Engines, requests: Sequence[Request], sampling: Sampling, name: str) -> Served:
    """Sends all requests, each to its own rank, and takes their tokens in."""
    began = time.perf_counter()
    queues = [await engines.submit(f"{name}.{i}", r, sampling, r.rank) for i, r in enumerate(requests)]
    arrivals = await asyncio.gather(*(drain(queue) for queue in queues))
    seconds = time.perf_counter() - began
    # A collector that is read late hands over several tokens at once: such a gap is not one step.
    steps = [b - a for own in arrivals for (a, _), (b, count) in pairwise(own) if count == 1]
    tokens = sum(count for own in arrivals for _, count in own)
    return Served(seconds, tokens, statistics.median(steps) if steps else 0.0)


async def drain(queue: Any) -> list[tuple[float, int]]:
    """When tokens of one request came, and how many."""
    arrivals: list[tuple[float, int]] = []
    while True:
        output = queue.get_nowait() or await queue.get()
        arrivals.append((time.perf_counter(), len(output.outputs[0].token_ids)))
        if output.finished:
            return arrivals


def interval(ratios: Sequence[float]) -> dict[str, Any]:
    """Median and its 95 % interval from order statistics (binomial), with all values."""
    ordered, n = sorted(ratios), len(ratios)
    below = 0.0
    lowest = 0
    for k in range(n):
        below += comb(n, k) / 2**n
        if below > 0.025:
            lowest = k
            break
    return {
        "median": statistics.median(ordered),
        "low": ordered[max(0, lowest - 1)],
        "high": ordered[min(n - 1, n - lowest)],
        "ratios": list(ratios),
    }
