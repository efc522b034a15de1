"""Writes a lengths.jsonl to try planner and simulator with: invented, seeded, the same on every machine.

    python tools/example_lengths.py --out lengths.jsonl

Items differ by a log-normal factor, responses of one item by a smaller one, so that long items stay long. Defaults: the
paper's 160 items and 16 responses, two epochs, mean about 6,000 tokens, limit 16,384.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from flexfloor.history import Observation, write_lengths


def observations(items: int, responses: int, epochs: int, limit: int, seed: int) -> list[Observation]:
    """Lengths of every item in every epoch."""
    random = np.random.default_rng(seed)
    own = 4900 * random.lognormal(0, 0.6, items)
    prompts = random.integers(60, 400, items)
    found = []
    for epoch in range(epochs):
        lengths = np.clip(own[:, None] * random.lognormal(0, 0.22, (items, responses)), 32, limit).astype(int)
        found += [
            Observation(f"q{k:03d}", epoch, int(prompts[k]), tuple(row)) for k, row in enumerate(lengths.tolist())
        ]
    return found


def main(
    out: Annotated[Path, typer.Option(help="Where the lengths go.")],
    items: Annotated[int, typer.Option(min=1)] = 160,
    responses: Annotated[int, typer.Option(min=1, help="Responses an item.")] = 16,
    epochs: Annotated[int, typer.Option(min=1)] = 2,
    limit: Annotated[int, typer.Option(min=32, help="Longest response, tokens.")] = 16384,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Write example lengths."""
    write_lengths(out, observations(items, responses, epochs, limit, seed))


if __name__ == "__main__":
    typer.run(main)
