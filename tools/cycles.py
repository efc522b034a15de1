"""Many shrink/restore cycles in one set of processes: what a long training run does to memory and descriptors.

Usage: python tools/cycles.py --model recipes/data/tiny-moe [--cycles 200]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from flexfloor.engine.settings import EngineSettings
from flexfloor.engine.testbed import Bed, BedRequest, Rollout

LENGTHS = ((18, 4, 9, 5), (4, 18, 5, 9), (5, 9, 4, 18), (9, 5, 18, 4))
EVERY = 25


def rollout(step: int) -> Rollout:
    """One request a rank; which ranks survive changes from step to step."""
    made = tuple(
        BedRequest(f"s{step}-{rank}", rank, (5 + rank, 6, 7), n) for rank, n in enumerate(LENGTHS[step % len(LENGTHS)])
    )
    return Rollout(made, (4, 2, 1), step=step)


def main() -> None:
    """Run the cycles and print what each rank holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--cycles", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = EngineSettings(
            world_size=4, smallest_floor=1, combine="stock", events_dir=f"{folder}/events", board=f"{folder}/board"
        )
        bed = Bed(options.model, settings, options={"skip_tokenizer_init": True})
        table = Table("cycles", "rank", "memory, MiB", "descriptors", "threads", "shared segments")
        try:
            for step in track(range(options.cycles + 1), description="cycles"):
                if step % EVERY == 0:
                    for rank, use in enumerate(bed.call("usage")):
                        row = (use["uss"] >> 20, use["fds"], use["threads"], use["shm"])
                        table.add_row(str(step), str(rank), *map(str, row))
                bed.run(rollout(step))
        finally:
            bed.close()
    Console().print(table)


if __name__ == "__main__":
    main()
