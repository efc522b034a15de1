"""EP N -> ... -> N on CUDA devices through AsyncLLM and the engine-core processes: identity, graphs, time, memory.

One server runs a list of rollouts ("arms") one after another. ``static`` arms keep the full world, ``flex`` arms shrink
and restore; every arm's tokens and log-probabilities are compared with the first static arm of the same requests, and
the event log says what each transition cost by part, what the leaver gave back and which decode steps were replayed.

    small   4 layers, 32 experts, seeded weights written on the spot, invariant combine, poisoned rows: bit-identity
    wide    two layers of the a3b shape, seeded weights: bit-identity with its kernels
    a3b     the Qwen3-30B-A3B shape, dummy weights: what a transition costs

Usage: python tools/gpu_elastic.py --shape small --json small.json [--combine invariant] [--cycles 5] [--ladder 4 2 1]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu.arms import Load
from gpu.bench import Bench, versions
from gpu.serving import four_ranks, server_spec
from gpu.shapes import SHAPES, write_config, write_weights

__all__ = ["SHAPES", "Bench", "Load", "four_ranks", "server_spec", "write_weights"]


def lengths(
    ladder: Sequence[int], long: tuple[int, ...], short: int, later: int, each: int = 16
) -> tuple[tuple[int, ...], ...]:
    """Response lengths by rank: ``long`` on rank 0, ``each`` of ``short`` on the others.

    ``later`` is what a rank's responses are longer for each smaller world that it is still in.
    """
    stays = [sum(size > rank for size in ladder[1:]) for rank in range(1, ladder[0])]
    return (long, *((short + later * stages,) * each for stages in stays))


def long_first(prompts: Load, ladder: tuple[int, ...]) -> Load:
    """64 long responses on rank 0; ``prompts`` tells prompt length and vocabulary."""
    return replace(prompts, lengths=lengths(ladder, tuple(160 if i % 2 else 110 for i in range(64)), 40, 25))


def warm_up(bench: Bench, prompts: Load, full: tuple[int, ...]) -> None:
    """Batches of all sizes that follow, in the full world."""
    bench.arm("warm-up", replace(prompts, lengths=((24,) * 64, *((24,) * 16,) * (full[0] - 1)), prompt=64), full)


def arms(bench: Bench, prompts: Load, cycles: int, ladder: tuple[int, ...]) -> None:
    """The arms of one server; ``prompts`` tells prompt length and vocabulary."""
    full = ladder[:1]
    load = long_first(prompts, ladder)
    swapped = lengths(ladder, tuple(120 if i % 2 else 90 for i in range(24)), 30, 15, each=12)[::-1]
    other = replace(prompts, lengths=swapped)
    drawn = replace(load, temperature=1.0)
    warm_up(bench, prompts, full)
    bench.arm("static", load, full)
    bench.arm("static again", load, full)
    bench.arm("flex, graphs captured", load, ladder)
    bench.arm("static after restore", load, full)
    bench.arm("flex, graphs kept", load, ladder)
    bench.arm("static other", other, full)
    bench.arm("flex other, the last rank survives", other, ladder)
    bench.arm("flex other, graphs kept", other, ladder)
    bench.arm("static drawn", drawn, full)
    bench.arm("flex drawn", drawn, ladder)
    bench.arm("flex, topology only", load, ladder, end="topology")
    bench.wake_all()
    bench.arm("static after wake", load, full)
    for cycle in range(cycles):
        bench.arm(f"cycle {cycle}", load, ladder)
    bench.arm("static at the end", load, full)


def transitions(bench: Bench, prompts: Load, ladder: tuple[int, ...]) -> None:
    """Only what shows a transition by part: each survivor's first one, then kept graphs and early wakes."""
    full = ladder[:1]
    load = long_first(prompts, ladder)
    other = replace(load, lengths=load.lengths[::-1])
    warm_up(bench, prompts, full)
    bench.arm("static", load, full)
    bench.arm("flex, first after start", load, ladder)
    bench.arm("flex, the last rank survives, its first", other, ladder)
    for turn in range(3):
        bench.arm(f"kept {turn}", load, ladder)
        bench.arm(f"kept, the last rank survives {turn}", other, ladder)


def memory_spread(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """MiB by which memory in use just before and after a leaver's sleep differs between cycles, at most on one rank."""
    slept = [row for r in records if r["arm"].startswith("cycle") for row in r["released"]]
    spread = {}
    for when in ("before", "after") if slept else ():
        own = [[row[when] for row in slept if row["rank"] == rank] for rank in {row["rank"] for row in slept}]
        spread[when] = round(max(max(used) - min(used) for used in own) / (1 << 20), 1)
    return spread


def main() -> None:
    """Run the arms and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--combine", choices=("stock", "invariant"), default="invariant")
    parser.add_argument("--arms", choices=("all", "transitions"), default="all")
    parser.add_argument("--cycles", type=int, default=0, help="shrinks and restores at the end of all arms")
    parser.add_argument("--ladder", type=int, nargs="+", default=[2, 1], help="EP sizes; one device a rank")
    parser.add_argument("--prompt", type=int, default=96, help="tokens of a prompt")
    parser.add_argument("--use", type=float, default=0.8, help="share of the device's memory for the engine")
    parser.add_argument("--limit", type=float, default=280.0, help="seconds until stacks are printed and all ends")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    os.environ["PYTHONFAULTHANDLER"] = "1"
    shape = SHAPES[options.shape]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dummy = options.shape == "a3b"
        model = (write_config if dummy else write_weights)(folder / "model", shape)
        ladder = tuple(options.ladder)
        spec = server_spec(
            model, folder, dummy=dummy, combine=options.combine, poison=not dummy, use=options.use, ladder=ladder
        )
        result: dict[str, Any] = {
            "shape": options.shape,
            "combine": options.combine,
            "prompt": options.prompt,
            "versions": versions(),
        }

        def keep() -> None:
            options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")

        bench = Bench(spec, folder, options.limit, at_limit=keep)
        result |= {
            "start_s": round(bench.start_s, 1),
            "facts": [status["facts"] for status in bench.statuses],
            "arms": bench.records,
        }
        print("START", result["start_s"], json.dumps(result["facts"]), flush=True)
        try:
            prompts = Load((), options.prompt, vocabulary=shape["vocab_size"])
            if options.arms == "all":
                arms(bench, prompts, options.cycles, ladder)
            else:
                transitions(bench, prompts, ladder)
        finally:
            result["cycle_memory_spread_mib"] = memory_spread(bench.records)
            keep()
            bench.server.close()
    print("DONE", options.json, flush=True)


if __name__ == "__main__":
    main()
