"""What a rank needs to know of a plan's step, and what the engine tells the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexfloor.errors import RefusedError


@dataclass(frozen=True)
class Step:
    """The part of a plan's step that a rank needs.

    Attributes:
        digest: hexadecimal digest of the step's plan, equal on all ranks.
        epoch: epoch of the plan.
        step: step within the epoch.
        ladder: sizes from N down to the floor.
        expected: trajectories this rank will get.
        rank_order: all ranks, first to leave in front.
        gate: wait for every trajectory on every rank before the first step.
        auto_close: the step ends by itself when everything expected is complete.
        end: ``full`` or ``topology``: what the restore after generation brings back.
        predicted: survivors that planned residency makes ready beforehand, one set a stage; empty: natural residency.
    """

    digest: str
    epoch: int
    step: int
    ladder: tuple[int, ...]
    expected: int
    rank_order: tuple[int, ...]
    gate: bool = True
    auto_close: bool = True
    end: str = "full"
    predicted: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Local:
    """What the engine knows about its own rank at a sync point.

    Attributes:
        unfinished: requests in the scheduler that are not finished.
        kv_free: free KV blocks.
        pause: vLLM's two-phase pause is pending.
        tokens_left: most tokens that an unfinished request may still give (needed while a plan is armed).
    """

    unfinished: int = 0
    kv_free: int = 0
    pause: bool = False
    tokens_left: int = 0


@dataclass(frozen=True)
class Outcome:
    """What the engine loop does next: go on or end the wave; whether a pause is agreed."""

    running: bool
    paused: bool


def check_predicted(predicted: Sequence[Sequence[int]], ladder: Sequence[int]) -> None:
    """Refuse predicted survivors that are no way down the ladder.

    Args:
        predicted: survivors of each stage, ascending; empty: nothing is predicted.
        ladder: sizes from the full world down.

    Raises:
        RefusedError: names the stage and the remedy.
    """
    if not predicted:
        return
    above = set(range(ladder[0]))
    if len(predicted) != len(ladder) - 1:
        what = f"{len(predicted)} survivor sets are predicted for the ladder {list(ladder)}"
        raise RefusedError(what, remedy="predict one a stage, or none")
    for size, survivors in zip(ladder[1:], predicted, strict=True):
        if len(survivors) != size or list(survivors) != sorted(set(survivors)) or not set(survivors) <= above:
            raise RefusedError(
                f"predicted survivors {list(survivors)} are not {size} of the ranks {sorted(above)}",
                remedy="predict each stage's survivors among the stage's before",
            )
        above = set(survivors)


def check_ladder(ladder: Sequence[int], world: int, experts: int, capacity: int) -> None:
    """Refuse a ladder that these engines cannot run.

    Args:
        ladder: sizes from the full world down.
        world: N.
        experts: logical experts E.
        capacity: expert rows a rank.

    Raises:
        RefusedError: names the size and the remedy.
    """
    sizes = list(ladder)
    if not sizes or sizes[0] != world or sizes != sorted(set(sizes), reverse=True) or sizes[-1] < 1:
        raise RefusedError(f"ladder {sizes} does not decrease from {world}", remedy="plan for this world_size")
    for size in sizes:
        if experts % size:
            raise RefusedError(
                f"EP size {size} does not divide {experts} experts", remedy="choose floors that divide the expert count"
            )
        if experts // size > capacity:
            raise RefusedError(
                f"EP size {size} needs {experts // size} expert rows a rank, {capacity} were allocated",
                remedy=f"start the engines with a smallest floor of {size} or plan a larger floor",
            )
