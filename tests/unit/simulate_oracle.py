"""A slow simulator for tests: one iteration at a time, every figure computed from scratch in each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flexfloor.simulate.batching import Limits, Request
from flexfloor.step_times import StepTimes


@dataclass
class Slow:
    index: int
    request: Request
    generated: int = 0
    computed: int = 0
    preempted: int = 0

    @property
    def prompt(self) -> int:
        return max(1, self.request.prompt_tokens)


class SlowRank:
    """vLLM's scheduler, written plainly."""

    def __init__(self, requests: Sequence[Request], limits: Limits) -> None:
        self.limits = limits
        self.waiting = [Slow(i, request) for i, request in enumerate(requests)]
        self.running: list[Slow] = []
        self.finished: list[tuple[int, int]] = []
        self.preemptions: list[tuple[int, int]] = []
        self.iterations = 0
        self.decode = self.prefill = self.context = 0

    @property
    def complete(self) -> bool:
        return not self.waiting and not self.running

    def shared(self, request: Slow) -> int:
        return (request.prompt - 1) // self.limits.block_tokens if self.limits.prompt_sharing else 0

    def used(self, tokens: dict[int, int]) -> int:
        """Blocks in use where request i of the running ones holds ``tokens[i]`` tokens."""
        total = sum(
            max(0, math.ceil(tokens[r.index] / self.limits.block_tokens) - self.shared(r)) for r in self.running
        )
        return total + sum({r.request.item_id: self.shared(r) for r in self.running}.values())

    def fits(self, tokens: dict[int, int]) -> bool:
        return self.limits.kv_blocks is None or self.used(tokens) <= self.limits.kv_blocks

    def step(self) -> None:
        """One iteration."""
        held = {r.index: r.computed for r in self.running}
        chosen: list[tuple[Slow, int]] = []
        budget, preempted, position = self.limits.batched_tokens, False, 0
        while position < len(self.running) and budget:
            request = self.running[position]
            count = min(request.prompt + request.generated - request.computed, budget)
            lost = False
            while not self.fits({**held, request.index: request.computed + count}):
                victim = self.running.pop()
                self.preemptions.append((self.iterations, victim.index))
                victim.computed = 0
                self.waiting.insert(0, victim)
                preempted = True
                if victim is request:
                    lost = True
                    break
            if lost:
                break
            held[request.index] = request.computed + count
            chosen.append((request, count))
            budget -= count
            position += 1
        while not preempted and self.waiting and budget and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            sibling = any(r.request.item_id == request.request.item_id for r in self.running)
            self.running.append(request)
            if not self.fits({**held, request.index: request.prompt + request.generated}):
                self.running.pop()
                break
            self.waiting.pop(0)
            request.computed = self.shared(request) * self.limits.block_tokens if sibling else 0
            count = min(request.prompt + request.generated - request.computed, budget)
            held[request.index] = request.computed + count
            chosen.append((request, count))
            budget -= count
        was_decoding = {
            r.index: r.generated > 0 and r.computed == r.prompt + r.generated - 1 and r in self._decoding
            for r, _ in chosen
        }
        self.decode = sum(was_decoding.values())
        self.context = sum(r.prompt + r.generated for r, _ in chosen if was_decoding[r.index])
        self.prefill = sum(count for r, count in chosen if not was_decoding[r.index])
        self.iterations += 1
        for request, count in chosen:
            request.computed += count
            if request.computed == request.prompt + request.generated:
                request.generated += 1
                self._decoding.append(request)
            if request.generated == request.request.length:
                self.running.remove(request)
                self.finished.append((self.iterations, request.index))

    @property
    def _decoding(self) -> list[Slow]:
        return self.__dict__.setdefault("decoding", [])

    def drop_preempted(self) -> None:
        self.__dict__["decoding"] = [r for r in self._decoding if r in self.running]


@dataclass
class SlowWorld:
    seconds: float
    iterations: int
    tokens: int
    dummy_steps: int
    dummy_seconds: float
    preemptions: int
    ranks: list[SlowRank]


def slow_world(
    groups: Sequence[Sequence[Request]],
    limits: Limits,
    table: StepTimes,
    *,
    prefill_rate: float = math.inf,
    prefill_step: float = 0.0,
    captures: Sequence[int] = (),
) -> SlowWorld:
    """A full world that never shrinks, token by token."""
    ranks = [SlowRank(group, limits) for group in groups]
    curve = table.curve(len(groups), extrapolate=True, experts=128)
    seconds, iterations, dummy, dummy_seconds = 0.0, 0, 0, 0.0
    while not all(rank.complete for rank in ranks):
        idle = [rank for rank in ranks if rank.complete]
        for rank in ranks:
            rank.decode = rank.prefill = rank.context = 0
            if not rank.complete:
                rank.drop_preempted()
                rank.step()
        batch = max(rank.decode for rank in ranks)
        padded = next((size for size in sorted(captures) if size >= batch), batch)
        context = max((rank.context for rank in ranks), default=0) / batch if batch else 0.0
        lasted = curve.seconds(padded, idle=bool(idle), context=context) if batch else 0.0
        most = max(rank.prefill for rank in ranks)
        if most:
            lasted = max(lasted + most / prefill_rate, prefill_step)
        seconds += lasted
        iterations += 1
        dummy += len(idle)
        dummy_seconds += lasted * len(idle)
    return SlowWorld(
        seconds,
        iterations,
        sum(r.length for group in groups for r in group),
        dummy,
        dummy_seconds,
        sum(len(rank.preemptions) for rank in ranks),
        ranks,
    )
