"""One rank's continuous batching, counted in iterations: what is decoded, prefilled and preempted when.

The ranks of a world iterate in lock step, so what a rank does in its i-th iteration depends on its own requests
alone; time enters later (`world`). Between two irregular iterations (an admission, a prefill, a lack of KV blocks)
every running request gains one token an iteration, so the rank leaps from one finish to the next.

The policy is vLLM's (V1 scheduler, first come first served): running requests first, in order of admission; where a
request finds no block, the latest of the running ones is preempted, loses its blocks and goes to the front of the
queue; a request is admitted only where its whole sequence so far fits, and not in an iteration that preempted;
``batched_tokens`` bounds the tokens of an iteration, so long prefills are chunked. Full blocks of a prompt are shared
by the running responses of that prompt; blocks of preempted requests are not found again (vLLM may find some).
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flexfloor.errors import InputError


class Request(NamedTuple):
    """One response: its prompt, prompt length and tokens to generate (at least one of each)."""

    item_id: str
    prompt_tokens: int
    length: int


@dataclass(frozen=True)
class Limits:
    """What bounds a rank's batch.

    Attributes:
        max_num_seqs: most running requests.
        kv_blocks: KV blocks; None for no limit.
        block_tokens: tokens of a block.
        batched_tokens: most tokens of one iteration.
        prompt_sharing: whether responses of one prompt share its full blocks.
    """

    max_num_seqs: int = 256
    kv_blocks: int | None = None
    block_tokens: int = 1
    batched_tokens: int = 8192
    prompt_sharing: bool = True


class Phase(NamedTuple):
    """Iterations ``start`` to ``end`` (exclusive) with one composition.

    ``decode`` requests gain one token an iteration; ``prefill`` prompt tokens are computed in each (then there is one
    iteration only); ``context`` is the sum of prompt and generated tokens of the decoding requests at ``start``.
    """

    start: int
    end: int
    decode: int
    prefill: int
    context: int


class Preemption(NamedTuple):
    """Request number ``request`` lost its blocks in ``iteration``; ``tokens`` must be computed anew."""

    iteration: int
    request: int
    tokens: int


@dataclass
class RankTrace:
    """All that a rank does in a step.

    Attributes:
        phases: in order, without gaps, from iteration 0 to ``end``.
        finished: (iteration count after which it is finished, index of the request), in order.
        preemptions: in order.
    """

    phases: list[Phase] = field(default_factory=list)
    finished: list[tuple[int, int]] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Iterations until the rank is complete."""
        return self.phases[-1].end if self.phases else 0


class _Live:
    """A request in the queue. While ``base`` is set it decodes: generated = clock - base."""

    __slots__ = ("base", "computed", "index", "item", "length", "prompt", "shared", "stored", "version")

    def __init__(self, index: int, request: Request, shared: int) -> None:
        self.index, self.item = index, request.item_id
        self.prompt, self.length, self.shared = max(1, request.prompt_tokens), request.length, shared
        self.stored = 0
        self.computed = 0
        self.base: int | None = None
        self.version = 0

    def generated(self, clock: int) -> int:
        return self.stored if self.base is None else clock - self.base

    def known(self, clock: int) -> int:
        """Tokens of prompt and response that exist."""
        return self.prompt + self.generated(clock)

    def cached(self, clock: int) -> int:
        """Tokens whose KV is computed."""
        return self.computed if self.base is None else self.prompt + clock - self.base - 1


class _Queue:
    def __init__(self, requests: Sequence[Request], limits: Limits) -> None:
        self.limits, self.trace = limits, RankTrace()
        block = limits.block_tokens
        self.waiting = deque(
            _Live(i, request, (max(1, request.prompt_tokens) - 1) // block if limits.prompt_sharing else 0)
            for i, request in enumerate(requests)
        )
        self._refuse_impossible()
        self.running: list[_Live] = []
        self.holders: Counter[str] = Counter()
        self.finishes: list[tuple[int, int, int]] = []
        self.live = {live.index: live for live in self.waiting}
        self.clock = self.prefilling = 0
        self.offset = 0  # sum of prompt - base over decoding requests: their context less clock times their number
        self.final = 0  # blocks that the running requests hold together in the end, at most
        self.blocked = False

    def _refuse_impossible(self) -> None:
        limit = self.limits.kv_blocks
        for live in self.waiting if limit is not None else ():
            need = self._own(live, live.prompt + live.length - 1) + live.shared
            if need > (limit or 0):
                tokens = (limit or 0) * self.limits.block_tokens
                what = (
                    f"item {live.item!r}: a response of {live.length} tokens never fits into {tokens} KV tokens a rank"
                )
                raise InputError(f"{what}; raise kv.capacity", field="lengths")

    def run(self) -> RankTrace:
        while self.running or self.waiting:
            if not self._leap():
                self._iterate()
        return self.trace

    # -- blocks ------------------------------------------------------------------------------

    def _own(self, live: _Live, tokens: int) -> int:
        """Blocks of ``tokens`` of a request beside its shared prompt."""
        return max(0, -(-tokens // self.limits.block_tokens) - live.shared)

    def _pools(self) -> int:
        if not self.limits.prompt_sharing:
            return 0
        seen = {live.item: live.shared for live in self.running}
        return sum(seen.values())

    # -- leaps -------------------------------------------------------------------------------

    def _leap(self) -> bool:
        """All decode until the next finish or lack of blocks; False where an iteration must be looked at."""
        full = len(self.running) >= self.limits.max_num_seqs
        if self.prefilling or not self.running or (self.waiting and not full and not self.blocked):
            return False
        while self.live[self.finishes[0][1]].version != self.finishes[0][2]:
            heapq.heappop(self.finishes)
        count = self._fitting(self.finishes[0][0] - self.clock)
        if count == 0:
            return False
        self._note(count, len(self.running), 0, self.offset + len(self.running) * self.clock)
        self._finish()
        return True

    def _fitting(self, wanted: int) -> int:
        """How many of the next ``wanted`` iterations find all the blocks that they need."""
        limit = self.limits.kv_blocks
        if limit is None or self.final <= limit:
            return wanted
        pools = self._pools()

        def used(count: int) -> int:
            return pools + sum(self._own(live, live.cached(self.clock) + count) for live in self.running)

        if used(wanted) <= limit:
            return wanted
        low, high = 0, wanted
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if used(middle) <= limit else (low, middle)
        return low

    def _note(self, count: int, decode: int, prefill: int, context: int) -> None:
        self.trace.phases.append(Phase(self.clock, self.clock + count, decode, prefill, context))
        self.clock += count

    def _finish(self) -> None:
        """Take away what is finished now."""
        while self.finishes and self.finishes[0][0] <= self.clock:
            _, index, version = heapq.heappop(self.finishes)
            live = self.live[index]
            if live.version != version:
                continue
            self.running.remove(live)
            self._leave(live)
            self.trace.finished.append((self.clock, index))
            self.blocked = False

    def _leave(self, live: _Live) -> None:
        self._rebase(live, None)
        self.final -= self._own(live, live.prompt + live.length - 1) + live.shared
        self.holders[live.item] -= 1
        live.version += 1

    def _rebase(self, live: _Live, base: int | None) -> None:
        if live.base is not None:
            self.offset -= live.prompt - live.base
        live.base = base
        if base is not None:
            self.offset += live.prompt - base

    # -- one iteration of the scheduler -------------------------------------------------------

    def _iterate(self) -> None:
        limits, clock = self.limits, self.clock
        free: float = float("inf")
        if limits.kv_blocks is not None:
            free = limits.kv_blocks - self._pools()
            free -= sum(self._own(live, live.cached(clock)) for live in self.running)
        budget, preempted = limits.batched_tokens, False
        scheduled: list[tuple[_Live, int]] = []
        position = 0
        while position < len(self.running) and budget > 0:
            live = self.running[position]
            cached = live.cached(clock)
            tokens = min(live.known(clock) - cached, budget)
            need = self._own(live, cached + tokens) - self._own(live, cached)
            while need > free:
                victim = self.running.pop()
                free += self._preempt(victim)
                preempted = True
                if victim is live:
                    break
            else:
                free -= need
                budget -= tokens
                scheduled.append((live, tokens))
                position += 1
                continue
            break
        if not preempted:
            self._admit(scheduled, free, budget)
        self._execute(scheduled)

    def _preempt(self, live: _Live) -> int:
        """Back to the front of the queue; returns the blocks that it gives back."""
        clock = self.clock
        freed, lost = self._own(live, live.cached(clock)), live.cached(clock)
        live.stored, live.computed = live.generated(clock), 0
        self._leave(live)
        if self.holders[live.item] == 0:
            freed += live.shared
        self.waiting.appendleft(live)
        self.trace.preemptions.append(Preemption(clock, live.index, lost))
        return freed

    def _admit(self, scheduled: list[tuple[_Live, int]], free: float, budget: int) -> None:
        self.blocked = False
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            live = self.waiting[0]
            known, first = live.known(self.clock), self.holders[live.item] == 0
            pool = live.shared if first else 0
            if self._own(live, known) + pool > free:
                self.blocked = True
                return
            self.waiting.popleft()
            live.computed = 0 if first else live.shared * self.limits.block_tokens
            tokens = min(known - live.computed, budget)
            free -= self._own(live, live.computed + tokens) + pool
            budget -= tokens
            self.holders[live.item] += 1
            self.final += self._own(live, live.prompt + live.length - 1) + live.shared
            self.running.append(live)
            scheduled.append((live, tokens))

    def _execute(self, scheduled: Sequence[tuple[_Live, int]]) -> None:
        decode = sum(live.base is not None for live, _ in scheduled)
        prefill = sum(tokens for live, tokens in scheduled if live.base is None)
        context = sum(live.known(self.clock) for live, _ in scheduled if live.base is not None)
        ahead = {id(live) for live, _ in scheduled}
        held = [live for live in self.running if live.base is not None and id(live) not in ahead]
        self._note(1, decode, prefill, context)
        for live in held:
            self._expect(live, (live.base or 0) + 1)
        for live, tokens in scheduled:
            if live.base is not None:
                continue
            live.computed += tokens
            if live.computed == live.prompt + live.stored:
                self._expect(live, self.clock - live.stored - 1)
        self.prefilling = sum(live.base is None for live in self.running)
        self._finish()

    def _expect(self, live: _Live, base: int) -> None:
        """It decodes from here on: generated = clock - base."""
        self._rebase(live, base)
        live.version += 1
        heapq.heappush(self.finishes, (base + live.length, live.index, live.version))


def run_rank(requests: Sequence[Request], limits: Limits) -> RankTrace:
    """Simulates one rank whose requests have all arrived.

    Args:
        requests: in order of arrival.
        limits: what bounds the batch.

    Raises:
        InputError: a response alone needs more KV than the rank has.
    """
    return _Queue(requests, limits).run()
