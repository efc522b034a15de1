"""Plan time, memory and proven gap over world sizes and group sizes, one table.

    python tools/bench_planner.py [--worlds 16,64,256,1024] [--groups 2,16] [--solvers highs,cbc] [--pressure 0.5]
        [--with-table]

Lengths are drawn from a lognormal mixture (no real lengths are needed to time the planner): items differ by their
mean, responses of an item by less, and some reach the global limit. `--pressure` scales the paper's 16-rank capacity
table per response, so that smaller means tighter memory. `--with-table` plans with invented step times, so that every
floor is placed and predicted. Every case runs in a process of its own, so that its memory is its own; "CPU s" is the
mean CPU time a step, which a busy machine does not stretch as it does the other two.
"""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from flexfloor.config import FlexFloorConfig, config_from_mapping
from flexfloor.history import LengthHistory, Observation, replay
from flexfloor.planner import plan_epoch
from flexfloor.step_times import Row, StepTimes

RESPONSES, LIMIT = 16, 16384
PAPER = {2: 131072, 4: 280576, 8: 349952, 16: 380800}
"""Natural capacities of the paper's 16 ranks, KV tokens a rank for two prompts of 16 responses."""


def step_times(sizes: Sequence[int]) -> StepTimes:
    """Invented: a smaller world decodes somewhat slower."""
    curve = {1: 0.005, 32: 0.012, 256: 0.018, 4096: 0.06}
    return StepTimes(
        [Row(ep, batch, s * (1 + 0.1 * max(sizes) / ep / 8)) for ep in sizes for batch, s in curve.items()]
    )


def configuration(world: int, group: int, solver: str, pressure: float, table: str | None = None) -> FlexFloorConfig:
    """The paper's capacities by fraction of the world, scaled to the group size."""
    capacity = {
        world * size // 16: int(tokens * pressure * group / 2)
        for size, tokens in PAPER.items()
        if world * size % 16 == 0
    }
    return config_from_mapping(
        {
            "world_size": world,
            "responses_per_prompt": RESPONSES,
            "step_prompts": world * group,
            "floors": {"natural": sorted(capacity)},
            "kv": {"block_tokens": 128, "capacity": {"natural": capacity}},
            "tail_guard": {"l_max": LIMIT},
            "solver": {"name": solver},
            "rate": {"table": table},
        }
    )


def history(prompts: int, seed: int, epochs: int = 1, typical: float = 5200) -> LengthHistory:
    """Seeded lengths: mean about 6,000 tokens, a few percent at the limit; ``typical`` is the median item's mean."""
    rng = np.random.default_rng(seed)
    means = rng.lognormal(math.log(typical), 0.55, prompts)

    def lengths() -> list[list[int]]:
        drawn = means[:, None] * rng.lognormal(-0.05, 0.4, (prompts, RESPONSES))
        rows: list[list[int]] = np.clip(drawn, 64, LIMIT).astype(int).tolist()
        return rows

    first = lengths()
    tokens = rng.integers(40, 900, prompts)
    rows = [first, *(lengths() for _ in range(epochs - 1))]
    seen = [
        Observation(f"i{k:06d}", epoch, int(tokens[k]), tuple(own[k]))
        for epoch, own in enumerate(rows)
        for k in range(prompts)
    ]
    return replay(seen, 0.3)


def cpu_seconds() -> float:
    """CPU time of this process and of the solver processes it started."""
    return sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def measure(
    world: int, group: int, steps: int, solver: str, pressure: float, repeats: int, with_table: bool = False
) -> dict[str, float]:
    """One case in this process."""
    config = configuration(world, group, solver, pressure)
    if with_table:
        with tempfile.TemporaryDirectory() as folder:
            table = str(Path(folder) / "step_times.csv")
            step_times(config.admissible_sizes).save(table)
            return timed(configuration(world, group, solver, pressure, table), steps, repeats)
    return timed(config, steps, repeats)


def timed(config: FlexFloorConfig, steps: int, repeats: int) -> dict[str, float]:
    """Plans ``repeats`` epochs of ``steps`` steps."""
    seconds, gaps, floors, safe = [], [], [], 0
    spent = cpu_seconds()
    for seed in range(repeats):
        known = history(config.step_prompts * steps, seed)
        begin = time.perf_counter()
        plan = plan_epoch(config, known)
        seconds.append((time.perf_counter() - begin) / steps)
        gaps += [step.optimality_gap for step in plan.steps]
        floors += [step.floor / config.world_size for step in plan.steps]
        safe += sum(step.kv_safe for step in plan.steps)
    return {
        "seconds": float(np.median(seconds)),
        "cpu": (cpu_seconds() - spent) / len(gaps),
        "slowest": max(seconds),
        "gap": max(gaps),
        "floor": float(np.mean(floors)),
        "unsafe": len(gaps) - safe,
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def repairs(seeds: int) -> dict[str, float]:
    """Epochs of five steps whose last ones do not fit: longer lengths, two epochs known, capacity 0.5 to 0.75."""
    seconds, cpu, unsafe, swaps = [], [], 0, 0
    for pressure in (0.5, 0.55, 0.6, 0.65, 0.7, 0.75):
        config = configuration(16, 2, "highs", pressure)
        for seed in range(seeds):
            known = history(160, seed, epochs=2, typical=7500)
            begin, spent = time.perf_counter(), cpu_seconds()
            plan = plan_epoch(config, known)
            seconds.append(time.perf_counter() - begin)
            cpu.append(cpu_seconds() - spent)
            unsafe += sum(not step.kv_safe for step in plan.steps)
            swaps += len(plan.swaps)
    found = {"epochs": len(seconds), "median": float(np.median(seconds)), "slowest": max(seconds)}
    return {**found, "cpu": float(np.mean(cpu)), "slowest_cpu": max(cpu), "unsafe": unsafe, "swaps": swaps}


def separate(*case: object) -> dict[str, float]:
    """The same in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--case", json.dumps(case)], check=True, capture_output=True, text=True
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(
    worlds: Annotated[str, typer.Option(help="World sizes.")] = "16,64,256,1024",
    groups: Annotated[str, typer.Option(help="Prompts a rank.")] = "2,16",
    solvers: Annotated[str, typer.Option(help="Solvers to compare.")] = "highs,cbc",
    pressure: Annotated[str, typer.Option(help="Capacity scales; smaller is tighter.")] = "1.0,0.75",
    repeats: Annotated[int, typer.Option(help="Seeds of a case.")] = 3,
    with_table: Annotated[bool, typer.Option("--with-table", help="Plan with a table of step times.")] = False,
    case: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Time the planner."""
    if case:
        given = json.loads(case)
        print(json.dumps(repairs(*given[1:]) if given[0] == "repairs" else measure(*given)))
        return
    table = Table(title="seconds to plan one step, all floors")
    for name in (
        "ranks",
        "prompts a rank",
        "capacity",
        "solver",
        "median s",
        "slowest s",
        "CPU s",
        "MiB",
        "gap",
        "floor/N",
        "unsafe",
    ):
        table.add_column(name, justify="right")
    times: dict[tuple[int, str, float], list[tuple[int, float]]] = {}
    for group in map(int, groups.split(",")):
        for scale in map(float, pressure.split(",")):
            for solver in solvers.split(","):
                for world in map(int, worlds.split(",")):
                    found = separate(world, group, 1, solver, scale, repeats, with_table)
                    times.setdefault((group, solver, scale), []).append((world, found["cpu"]))
                    table.add_row(
                        str(world),
                        str(group),
                        f"{scale:g}",
                        solver,
                        f"{found['seconds']:.3f}",
                        f"{found['slowest']:.3f}",
                        f"{found['cpu']:.3f}",
                        f"{found['mib']:.0f}",
                        f"{found['gap']:.2%}",
                        f"{found['floor']:.3f}",
                        f"{found['unsafe']:.0f}",
                    )
    console = Console(width=120)
    console.print(table)
    for (group, solver, scale), points in times.items():
        if len(points) > 1:
            slope = np.polyfit(np.log([n for n, _ in points]), np.log([s for _, s in points]), 1)[0]
            console.print(f"{group} prompts a rank, {solver}, capacity {scale:g}: CPU seconds grow as N^{slope:.2f}")
    console.print(told_repairs(separate("repairs", 4)))
    epoch = separate(16, 2, 500, "highs", 1.0, 1)
    console.print(
        "an epoch of 500 steps of 32 prompts on 16 ranks: "
        f"{epoch['seconds'] * 500:.1f} s, CPU {epoch['cpu'] * 500:.1f} s"
    )
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("numpy", "pulp", "highspy"))
    console.print(f"{date.today()}, Python {platform.python_version()}, {versions}, {os.cpu_count()} cores")


def told_repairs(found: dict[str, float]) -> str:
    """The repair cases in words."""
    return (
        f"{found['epochs']:.0f} epochs of 5 steps of 32 prompts that do not all fit: median {found['median']:.2f} s, "
        f"slowest {found['slowest']:.2f} s, CPU mean {found['cpu']:.2f} s, slowest {found['slowest_cpu']:.2f} s; "
        f"{found['swaps']:.0f} swaps, {found['unsafe']:.0f} steps over capacity"
    )


if __name__ == "__main__":
    typer.run(main)
