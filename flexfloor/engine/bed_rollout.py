"""What the in-process test bed is asked to do and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class BedRequest:
    """One request.

    Attributes:
        name: its id, unique in the rollout.
        rank: where it runs.
        prompt: token ids.
        max_tokens: upper bound of its length.
        temperature: 0 for greedy.
        seed: sampling seed.
        at: iteration at which it arrives.
        ignore_eos: run to ``max_tokens``.
    """

    name: str
    rank: int
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    at: int = 0
    ignore_eos: bool = True


@dataclass(frozen=True)
class Rollout:
    """One rollout of all ranks.

    Attributes:
        requests: all requests.
        ladder: sizes from N down; (N,) never shrinks.
        expected: trajectories a rank, default: counted from ``requests`` that arrive at 0.
        restore_at: iterations at which the full world is asked for.
        end: ``full`` or ``topology``.
        step: number of the step.
        predicted: survivors of each stage that are made ready beforehand.
        kv_tokens: KV tokens a rank; None: all that there is room for.
    """

    requests: tuple[BedRequest, ...]
    ladder: tuple[int, ...]
    expected: tuple[int, ...] | None = None
    restore_at: tuple[int, ...] = ()
    end: str = "full"
    step: int = 0
    predicted: tuple[tuple[int, ...], ...] = ()
    kv_tokens: int | None = None


@dataclass
class RankResult:
    """What one rank reports of a rollout.

    Attributes:
        tokens: request -> token ids.
        logprobs: request -> log-probability of each token.
        preemptions: request -> how often it was preempted.
        worlds: members at each iteration, as this rank saw them.
        prefilling: iterations at which this rank had a partly prefilled request.
        status: the session's status at the end.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    preemptions: dict[str, int] = field(default_factory=dict)
    worlds: list[tuple[int, ...]] = field(default_factory=list)
    prefilling: list[int] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
