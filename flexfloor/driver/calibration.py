"""What a calibration measures on running engines, and what it makes of the answers.

Decode step times: for each EP size, batch and context one step whose leavers get one token and whose survivors get
``batch`` requests of equal length. Once the world has shrunk and every request decodes, tokens arrive one a step; the
time between them, end to end as a rollout meets it, is the step time. With ``idle`` only one survivor has requests and
the others run dummy steps. Prefill: one request a rank with a short and with a long prompt. Transitions: the event log
of all these steps. Points are visited in rounds, each round in another order, so that a machine that drifts does not
bend the table; medians over the rounds are kept.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Literal, NamedTuple

from flexfloor.config import FlexFloorConfig
from flexfloor.driver.orders import Request, Response, Sampling, StepOrder
from flexfloor.simulate.calibrate import CLEARLY
from flexfloor.simulate.costs import Load
from flexfloor.step_times import Row, StepTimes

Kind = Literal["decode", "idle", "prefill"]

SETTLE = 8
"""Steps that a world gets for prefill and for its shrink, beyond what chunked prompts need."""
FEWEST = 6
"""Decode steps without which a point says nothing."""
CHUNK = 2048
"""Prompt tokens of an iteration where the configuration names none (vLLM's smallest default)."""
SHORT_PROMPT = 2
DRAWN = Sampling(temperature=1.0, ignore_eos=True)
BLOCK = 128


@dataclass(frozen=True)
class Grid:
    """What is measured.

    Attributes:
        batches: requests a rank.
        contexts: prompt tokens of a request.
        tokens: decode steps of a point.
        rounds: how often each point is measured.
        idle: whether worlds with idle ranks are measured too.
        seed: seed of the prompts.
        sampling: how tokens are drawn; a seed for every request takes the sampler a while.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    tokens: int = 32
    rounds: int = 3
    idle: bool = True
    seed: int = 0
    sampling: Sampling = DRAWN


class Point(NamedTuple):
    """One step of a calibration: EP size, requests on a busy rank, their prompt tokens, and what it is for."""

    ep: int
    batch: int
    prompt: int
    kind: Kind = "decode"


@dataclass(frozen=True)
class Room:
    """What the engines have room for.

    Attributes:
        kv_tokens: KV tokens a rank.
        block_tokens: tokens of a block.
        sequences: requests a rank at once.
        length: longest sequence, tokens.
        chunk: prompt tokens that one iteration computes.
        vocabulary: token ids that prompts are drawn from.
    """

    kv_tokens: int
    block_tokens: int
    sequences: int
    length: int
    chunk: int
    vocabulary: int

    @classmethod
    def of(cls, config: FlexFloorConfig, kv_tokens: int, positions: int | None, vocabulary: int | None) -> Room:
        """Of started engines."""
        engine = config.engine
        return cls(
            kv_tokens,
            engine.block_size or BLOCK,
            engine.max_num_seqs or 256,
            engine.max_model_len or positions or 4096,
            int(engine.vllm.get("max_num_batched_tokens", CHUNK)),
            vocabulary or 100,
        )

    def response(self, point: Point, grid: Grid) -> int:
        """Tokens that a busy request generates: enough for prefill, shrink and the steps that count."""
        return SETTLE + ceil(point.batch * point.prompt / self.chunk) + grid.tokens

    def lacks(self, point: Point, grid: Grid) -> str | None:
        """Why a point cannot be measured without preemption; None where it can."""
        tokens = point.prompt + self.response(point, grid)
        blocks = ceil(tokens / self.block_tokens) * point.batch
        if point.batch > self.sequences:
            return f"engine.max_num_seqs is {self.sequences}"
        if tokens > self.length:
            return f"{tokens} tokens are more than the engine's longest sequence of {self.length}"
        if blocks * self.block_tokens > self.kv_tokens:
            return f"{blocks * self.block_tokens} KV tokens are needed, a rank has {self.kv_tokens}"
        return None


def points(config: FlexFloorConfig, grid: Grid, room: Room, notes: list[str]) -> list[Point]:
    """The points that there is room for; the others are named in ``notes``."""
    wanted = [
        Point(ep, batch, prompt, kind)
        for kind in (("decode", "idle") if grid.idle else ("decode",))
        for ep in config.admissible_sizes
        if kind == "decode" or ep > 1
        for batch in grid.batches
        for prompt in grid.contexts
    ]
    kept = []
    for point in wanted:
        why = room.lacks(point, grid)
        if why is None:
            kept.append(point)
        else:
            notes.append(f"batch {point.batch} with {point.prompt}-token prompts is left out: {why}")
    longest = min(room.chunk, room.length - SETTLE - grid.tokens, room.kv_tokens // 2)
    if longest >= 8 * SHORT_PROMPT:
        kept += [Point(config.world_size, 1, tokens, "prefill") for tokens in (SHORT_PROMPT, longest)]
    return kept


def rounds(wanted: Sequence[Point], grid: Grid) -> Iterator[list[Point]]:
    """Without end: all points, each round in another order (the same for the same seed)."""
    order = random.Random(grid.seed)
    while True:
        yield order.sample(wanted, len(wanted))


def order_of(point: Point, index: int, config: FlexFloorConfig, grid: Grid, room: Room, events_dir: str) -> StepOrder:
    """The step that measures a point; ranks leave in the configured order."""
    world = config.world_size
    members = config.leave_order[world - point.ep :]
    busy = members[-1:] if point.kind == "idle" else members
    draw = random.Random(f"{grid.seed}.{index}")
    requests = []
    for rank in range(world):
        count, prompt, tokens = 1, SHORT_PROMPT, 1
        if rank in busy:
            count, prompt, tokens = point.batch, point.prompt, room.response(point, grid)
        for sample in range(count):
            content = tuple(draw.randrange(room.vocabulary) for _ in range(prompt))
            requests.append(Request(f"{index}.{rank}", sample, rank, content, tokens, draw.getrandbits(31), False))
    return StepOrder(
        digest=f"{index + 1:064x}",
        epoch=0,
        step=index,
        ladder=(world,) if point.ep == world else (world, point.ep),
        rank_order=config.leave_order,
        requests=tuple(requests),
        sampling=grid.sampling,
        run="calibration",
        events_dir=events_dir,
        seed=grid.seed,
        timed=True,
    )


def step_seconds(responses: Iterable[Response], since: float) -> float | None:
    """Mean seconds of a decode step while all of these requests decode; None where too few steps lie in that window.

    Args:
        responses: the busy requests, timed.
        since: not before this time (the shrink's commit).
    """
    times = [response.times for response in responses]
    start = max([since, *(own[0] for own in times)])
    end = min(own[-1] for own in times)
    inside = [[t for t in own if start < t <= end] for own in times]
    found = [(own[-1] - own[0]) / (len(own) - 1) for own in inside if len(own) > FEWEST]
    return statistics.median(found) if len(found) == len(times) else None


@dataclass
class Findings:
    """Answers by point, one a round."""

    seconds: dict[Point, list[float]] = field(default_factory=lambda: defaultdict(list))
    first_token: dict[Point, list[float]] = field(default_factory=lambda: defaultdict(list))

    def median(self, point: Point) -> float:
        """Seconds of a decode step."""
        return statistics.median(self.seconds[point])

    def spread(self, point: Point) -> float:
        """Largest over smallest round."""
        return max(self.seconds[point]) / min(self.seconds[point])

    def measured(self, kind: Kind) -> list[Point]:
        """Points of a kind with an answer."""
        return sorted(point for point, answers in self.seconds.items() if point.kind == kind and answers)

    def load(self) -> Load:
        """Which batch of the world a step is charged for, as the points with idle ranks tell."""
        largest = mean = 0.0
        for point in self.measured("idle"):
            own = [p for p in self.measured("decode") if (p.ep, p.prompt) == (point.ep, point.prompt)]
            if len(own) < 2 or point.batch % point.ep:
                continue
            curve = StepTimes([Row(p.ep, p.batch, self.median(p)) for p in own]).curve(point.ep, extrapolate=True)
            told = self.median(point)
            largest += abs(curve.seconds(point.batch) / told - 1)
            mean += abs(curve.seconds(point.batch / point.ep) / told - 1)
        return "mean" if mean < CLEARLY * largest else "largest"

    def table(self, load: Load, grid: Grid, room: Room, name: str) -> StepTimes:
        """The step-time table. Rows with idle ranks are kept where a step is charged for the largest batch."""
        several = len(grid.contexts) > 1
        kinds: tuple[Kind, ...] = ("decode", "idle") if load == "largest" else ("decode",)
        rows = [
            Row(
                p.ep,
                p.batch,
                self.median(p),
                p.kind == "idle",
                p.prompt + room.response(p, grid) - grid.tokens / 2 if several else 0.0,
            )
            for kind in kinds
            for p in self.measured(kind)
        ]
        return StepTimes(rows, name)

    def prefill(self, table: StepTimes, world_size: int) -> tuple[float | None, float]:
        """Prompt tokens a second and rank (None: none seen), and seconds from rollout_start to the first step."""
        asked = sorted((point for point, answers in self.first_token.items() if answers), key=lambda p: p.prompt)
        if not asked:
            return None, 0.0
        step = table.curve(world_size, extrapolate=True).seconds(1)
        first = [statistics.median(self.first_token[point]) for point in asked]
        tokens = asked[-1].prompt - asked[0].prompt
        rate = tokens / (first[-1] - first[0]) if first[-1] > first[0] else None
        return rate, max(0.0, first[0] - step)
