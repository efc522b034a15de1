"""How an epoch's prompts become steps (planner.md section 3)."""

from __future__ import annotations

from collections.abc import Sequence

from flexfloor.planner.demand import Prompt


def sorted_layout(prompts: Sequence[Prompt], step_prompts: int) -> list[list[Prompt]]:
    """Steps of ascending prediction, ties by item id, items without prediction last; the short step is the last."""
    return _chunks(sorted(prompts, key=lambda prompt: prompt.sort_key), step_prompts)


def dataset_layout(prompts: Sequence[Prompt], step_prompts: int) -> list[list[Prompt]]:
    """Steps in the order given."""
    return _chunks(list(prompts), step_prompts)


def _chunks(prompts: list[Prompt], step_prompts: int) -> list[list[Prompt]]:
    return [prompts[start : start + step_prompts] for start in range(0, len(prompts), step_prompts)]


def group_sizes(prompts: int, world_size: int) -> list[int]:
    """Sizes of the N groups of a step, ascending: floor(b/N) and ceil(b/N)."""
    small, larger = divmod(prompts, world_size)
    return [small] * (world_size - larger) + [small + 1] * larger


def contiguous_groups(prompts: int, world_size: int) -> list[tuple[int, ...]]:
    """Groups of neighbours in step order, larger groups last."""
    groups, start = [], 0
    for size in group_sizes(prompts, world_size):
        groups.append(tuple(range(start, start + size)))
        start += size
    return groups
