"""A second, slow prediction: one decode step a token, one rank at a time, written from the definitions of T and H."""

from __future__ import annotations


def token_by_token(ranks, sizes, times, curves, costs, prompt=0.0):
    """(T, H) of whole-numbered response lengths, one list a rank, and quorum times, one a stage after the first."""
    world, clock = sizes[0], 0.0
    if len(sizes) > 1:
        clock += costs.prepare_s
    charged = dict.fromkeys(range(sizes[0]), None)  # rank -> when its memory is free, None while it takes part
    by_end = sorted(range(sizes[0]), key=lambda rank: max(ranks[rank], default=0))
    last = max(max(lengths, default=0) for lengths in ranks)
    for position in range(last):
        reached = [size for size, time in zip(sizes[1:], times, strict=True) if time <= position]
        if reached and reached[-1] < world:
            clock += costs.shrink_s
            for rank in by_end[: sizes[0] - reached[-1]]:
                if charged[rank] is None:
                    charged[rank] = clock + costs.release_s
            world = reached[-1]
        members = [rank for rank in charged if charged[rank] is None]
        assert len(members) == world
        running = [sum(length > position for length in ranks[rank]) for rank in members]
        assert sum(running) == sum(length > position for lengths in ranks for length in lengths)
        context = prompt + position + 0.5
        clock += curves[world].seconds(max(running), idle=min(running) == 0, context=context)
    began = clock
    asleep = [when for when in charged.values() if when is not None]
    if asleep:
        clock = max(clock, *asleep) + costs.restore_s
    held = [clock if when is None or when >= began else when + (clock - began) for when in charged.values()]
    return clock, sum(held)
