"""What the elastic engine costs and gives back, measured on real vLLM engines in one run.

1. Overhead without a plan: four stock engines and four with FlexFloor's hooks stand side by side and run the same
   requests in turn (stock, ours, ours, stock, ...); the figure is the ratio of throughputs, pair by pair, with the 95 %
   interval of its median, and beside it the ratio of the CPU seconds that the engine processes spent on a token, which
   other load on the machine moves less. Stock against stock (neighbouring pairs) shows what is noise. Stock on CPU
   means stock vLLM plus what it lacks to run EP there at all (engine/devices/cpu_ops.py), on both sides.
2. The hooks alone, without a plan: microseconds that they add to an iteration of the engine loop (all but the
   all-reduce, which replaces vLLM's own at the same interval).
3. Transitions: rollouts that shrink 4 -> 2 -> 1 and restore; time by part (median, max) and bytes given back, from the
   event log.

Usage: python tools/bench_engine.py --model recipes/data/tiny-moe [--pairs 24] [--rollouts 12] [--json out.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.progress import track
from rich.table import Table
from unplanned import interval, submit_all

from flexfloor.config import config_from_mapping
from flexfloor.driver.engines import Engines
from flexfloor.driver.orders import Request, Sampling
from flexfloor.driver.spec import ServerSpec
from flexfloor.elastic.ballot import Ballot
from flexfloor.elastic.board import Board
from flexfloor.elastic.faults import FaultPlan
from flexfloor.elastic.placement import Placement
from flexfloor.elastic.session import Session
from flexfloor.engine.core import ElasticCore

RANKS = 4
BUSY = [[48] * 6] * RANKS
SKEWED = [[80, 20], [10, 8], [40, 12], [9, 10]]


def spec(model: Path, folder: Path, *, stock: bool) -> ServerSpec:
    """How one arm is started."""
    section = {
        "world_size": RANKS,
        "responses_per_prompt": 1,
        "step_prompts": RANKS,
        "floors": {"natural": [1, 2]},
        "engine": {"kv_cache_bytes": 64 << 20, "max_num_seqs": 16, "max_model_len": 512, "block_size": 32},
    }
    made = ServerSpec.of(
        config_from_mapping(section),
        model,
        events_dir=folder / "events",
        board=folder / "board",
        run="bench",
        smallest_floor=RANKS if stock else 1,
    )
    if stock:
        del made.engine["worker_extension_cls"]
    return made


class Arm(NamedTuple):
    """One set of four engines and the processes that it runs in."""

    engines: Engines
    processes: list[psutil.Process]

    @classmethod
    def start(cls, made: ServerSpec) -> Arm:
        """Start the engines of ``made``."""
        before = {process.pid for process in psutil.Process().children(recursive=True)}
        os.environ.update(made.environment())
        engines = Engines.start(made)
        after = psutil.Process().children(recursive=True)
        return cls(engines, [process for process in after if process.pid not in before])

    def cpu_seconds(self) -> float:
        """CPU seconds, user and system, of the engine processes so far."""
        return sum(sum(process.cpu_times()[:2]) for process in self.processes)


class Speed(NamedTuple):
    """Of one rollout."""

    tokens_per_s: float
    cpu_s_per_token: float


async def measured(arm: Arm, name: str) -> Speed:
    """The busy rollout on one arm."""
    before = arm.cpu_seconds()
    tokens, seconds = await rollout(arm.engines, name, BUSY)
    return Speed(tokens / seconds, (arm.cpu_seconds() - before) / tokens)


async def rollout(engines: Engines, name: str, lengths: Sequence[Sequence[int]]) -> tuple[int, float]:
    """All requests at once; tokens and seconds."""
    requests = [
        Request("bench", i, rank, (5 + rank, 7 + i, 9), n, i, False)
        for rank, row in enumerate(lengths)
        for i, n in enumerate(row)
    ]
    served = await submit_all(engines, requests, Sampling(temperature=0.0, ignore_eos=True), name)
    return served.tokens, served.seconds


async def overhead(stock: Arm, ours: Arm, pairs: int) -> dict[str, Any]:
    """Ratios ours / stock of neighbouring runs, order alternating."""
    await measured(stock, "warm")
    await measured(ours, "warm")
    found: dict[str, list[Speed]] = {"stock": [], "ours": []}
    for pair in track(range(pairs), description="pairs"):
        order = [("stock", stock), ("ours", ours)]
        for label, arm in order if pair % 2 else reversed(order):
            found[label].append(await measured(arm, f"{label}{pair}"))
    arms = list(zip(found["ours"], found["stock"], strict=True))
    # Odd pairs end with ours, even ones with stock: a stock run that ends a pair stands beside the next one's first.
    neighbours = list(zip(found["stock"][::2], found["stock"][1::2], strict=False))
    return {
        "throughput": interval([a.tokens_per_s / b.tokens_per_s for a, b in arms]),
        "cpu_per_token": interval([a.cpu_s_per_token / b.cpu_s_per_token for a, b in arms]),
        "noise": interval([a.tokens_per_s / b.tokens_per_s for a, b in neighbours]),
        "cpu_noise": interval([a.cpu_s_per_token / b.cpu_s_per_token for a, b in neighbours]),
    }


def hooks_us(iterations: int = 100_000) -> float:
    """Microseconds that FlexFloor adds to an iteration without a plan."""
    pool = SimpleNamespace(get_num_free_blocks=lambda: 100)
    scheduler = SimpleNamespace(
        get_num_unfinished_requests=lambda: 6, kv_cache_manager=SimpleNamespace(block_pool=pool)
    )
    core = ElasticCore.__new__(ElasticCore)
    core.engine = SimpleNamespace(
        step_counter=0, dp_sync_interval=32, pending_pause=False, batch_queue=None, scheduler=scheduler
    )
    with tempfile.TemporaryDirectory() as folder:
        board = Board(Path(folder) / "board", RANKS)
        ballot = Ballot(0, lambda row: [row] * RANKS, lambda *_, **__: None, board, FaultPlan())
        worker: Any = SimpleNamespace()
        core.session = Session(RANKS, Placement.linear(16, RANKS, 16), worker, ballot)
        core._steps = 0
        began = time.perf_counter()
        for _ in range(iterations):
            core.step(lambda: True)
            core.sync(True)
        return (time.perf_counter() - began) / iterations * 1e6


async def transitions(ours: Engines, folder: Path, rollouts: int) -> dict[str, Any]:
    """Shrinks and restores of ``rollouts`` steps, by part."""
    for step in range(rollouts):
        await ours.forget_prompts()
        await ours.install(
            {
                "digest": f"{step + 1:032x}",
                "epoch": 0,
                "step": step,
                "ladder": [4, 2, 1],
                "expected": [len(row) for row in SKEWED],
                "rank_order": list(range(RANKS)),
            },
            60,
        )
        await rollout(ours, f"t{step}", SKEWED)
        while any(status["step"] is not None for status in await ours.call("status", {}, 60)):
            await asyncio.sleep(0.01)
    events = [
        json.loads(line) for path in (folder / "events").glob("rank-*.jsonl") for line in path.read_text().splitlines()
    ]
    found: dict[str, Any] = {}
    for target in (2, 1):
        commits = [e for e in events if e["event"] == "stage_commit" and e["to"] == target]
        parts = ("agree", "prepare", "channel", "move", "groups", "switch", "capture", "trial", "first_step")
        found[f"EP {2 * target} -> {target}"] = {p: spread([c[p] for c in commits if p in c]) for p in parts}
        found[f"EP {2 * target} -> {target}"]["total"] = spread(
            [
                sum(c[p] for p in ("prepare", "stage", "switch", "capture", "trial") if isinstance(c.get(p), float))
                + c["move"]
                + c["groups"]
                + c["channel"]
                for c in commits
            ]
        )
    found["restore"] = {"total": spread([e["duration"] for e in events if e["event"] == "restore_end"])}
    sleeps = [e for e in events if e["event"] == "sleep_end"]
    found["released_bytes"] = {
        "weights and KV": spread([e["released_bytes"] for e in sleeps]),
        "process": spread([e["process_bytes_before"] - e["process_bytes_after"] for e in sleeps]),
    }
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and maximum."""
    return {"median": statistics.median(values), "max": max(values), "n": len(values)} if values else {}


def show(result: dict[str, Any]) -> None:
    """The figures as tables."""
    console = Console()
    table = Table("ours / stock, no plan", "median", "95 % interval", "pairs", title="overhead")
    names = {
        "throughput": "tokens per second",
        "cpu_per_token": "CPU seconds a token",
        "noise": "stock / stock, tokens per second",
        "cpu_noise": "stock / stock, CPU seconds a token",
    }
    for key, name in names.items():
        ratio = result["overhead"][key]
        table.add_row(
            name, f"{ratio['median']:.4f}", f"{ratio['low']:.4f} to {ratio['high']:.4f}", str(len(ratio["ratios"]))
        )
    console.print(table)
    console.print(f"hooks without a plan: {result['hooks_us']:.1f} us an iteration")
    for name, parts in result["transitions"].items():
        table = Table("part", "median", "max", "n", title=name)
        scale, unit = (2**20, "MiB") if name == "released_bytes" else (1e-3, "ms")
        for part, values in parts.items():
            if values:
                table.add_row(part, *(f"{values[k] / scale:.2f} {unit}" for k in ("median", "max")), str(values["n"]))
        console.print(table)


async def main() -> None:
    """Run both measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--rollouts", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arms = {}
        for label in ("stock", "ours"):
            made = spec(options.model, Path(folder) / label, stock=label == "stock")
            arms[label] = Arm.start(made)
        try:
            result = {
                "hooks_us": hooks_us(),
                "overhead": await overhead(arms["stock"], arms["ours"], options.pairs),
                "transitions": await transitions(arms["ours"].engines, Path(folder) / "ours", options.rollouts),
            }
        finally:
            for arm in arms.values():
                arm.engines.shut_down()
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main())
