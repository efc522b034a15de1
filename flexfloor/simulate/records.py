"""What a step is simulated from and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flexfloor.simulate.batching import Limits, RankTrace, Request


@dataclass(frozen=True)
class StepInput:
    """What a step is simulated from.

    Attributes:
        groups: the requests of each rank, in order of arrival.
        ladder: EP sizes from the world size down; the world size alone never shrinks.
        residency: natural or planned.
        rank_order: all ranks, first to leave in front.
        capture_sizes: captured decode batch sizes, ascending.
        limits: what bounds a rank's batch.
        experts: logical experts of a layer, divisible by every size of the ladder.
        capacity: expert rows a rank.
    """

    groups: tuple[tuple[Request, ...], ...]
    ladder: tuple[int, ...]
    residency: str
    rank_order: tuple[int, ...]
    capture_sizes: tuple[int, ...]
    limits: Limits
    experts: int
    capacity: int


@dataclass(frozen=True)
class Mark:
    """An event before it is stamped with its run: seconds after rollout_start, name, rank (None: driver), fields."""

    t: float
    event: str
    rank: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepOutcome:
    """What came out of a simulated step.

    Attributes:
        seconds: from rollout_start to rollout_end.
        tokens: generated tokens W.
        iterations: engine iterations.
        commits: (from, to, survivors, iterations before it) of every shrink.
        marks: the events in order.
        traces: what each rank did.
        dummy_steps: member iterations without requests.
        dummy_seconds: time in them, rank-seconds.
    """

    seconds: float
    tokens: int
    iterations: int
    commits: tuple[tuple[int, int, tuple[int, ...], int], ...]
    marks: tuple[Mark, ...]
    traces: tuple[RankTrace, ...]
    dummy_steps: int
    dummy_seconds: float
