"""How long a simulation takes: step times at several sizes, planning apart, one core.

python tools/bench_simulate.py
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from flexfloor.config import FlexFloorConfig, config_from_mapping
from flexfloor.history import replay
from flexfloor.planner import plan_epoch
from flexfloor.simulate import Machine, default_costs, drawn, h200_table, simulate_workloads
from flexfloor.simulate.workload import Distribution, Workload

CASES = ((16, 2, 16), (16, 16, 16), (64, 2, 16), (256, 2, 16))
"""Ranks, prompts a rank, responses a prompt; five steps each."""
STEPS = 5
L_MAX = 16384


def settings(ranks: int, prompts: int, responses: int, method: str, kv: int) -> FlexFloorConfig:
    """Floors from an eighth of the ranks up, 256 experts, ``kv`` tokens a rank."""
    floors = [ranks // 8, ranks // 4, ranks // 2, ranks]
    return config_from_mapping(
        {
            "world_size": ranks,
            "responses_per_prompt": responses,
            "step_prompts": ranks * prompts,
            "num_experts": 256,
            "floors": {"natural": floors},
            "kv": {"block_tokens": 128, "capacity": {"natural": dict.fromkeys(floors, kv)}},
            "method": method,
            "engine": {"max_num_seqs": 1024},
        }
    )


def lengths(ranks: int, prompts: int, responses: int) -> Workload:
    """Log-normal lengths of mean about 6,000 tokens, cut at the global limit."""
    support = np.arange(64, L_MAX + 1, 64)
    mass = np.exp(-0.5 * ((np.log(support) - 8.5) / 0.6) ** 2) / support
    spread = Distribution(support, np.cumsum(mass) / mass.sum())
    items = ranks * prompts * STEPS
    return drawn(
        [(spread, 1.0)],
        items=items,
        responses=responses,
        epochs=1,
        correlation=0.6,
        prompt_tokens=256,
        seed=0,
    )


def timed(ranks: int, prompts: int, responses: int, method: str, kv: int) -> tuple[str, ...]:
    """One row of the table."""
    config, work = settings(ranks, prompts, responses, method, kv), lengths(ranks, prompts, responses)
    history = replay(work.epochs[0].observations(L_MAX), config.alpha)
    began = time.process_time()
    plan = plan_epoch(config, history, work.epochs[1].items, epoch=1)
    planned = time.process_time()
    run = simulate_workloads(config, {0: work}, Machine(h200_table(), default_costs(config), True), plan=plan)
    simulated = time.process_time()
    totals = run.ledger().totals
    accounted = time.process_time()
    iterations = sum(outcome.iterations for outcome in run.outcomes[0, 1])
    return (
        str(ranks),
        str(ranks * prompts * responses),
        method,
        f"{kv:,}",
        f"{simulated - planned:.2f}",
        f"{planned - began:.2f}",
        f"{accounted - simulated:.2f}",
        f"{iterations:,}",
        f"{totals.response_tokens / (simulated - planned) / 1e6:.0f}",
        str(totals.seeds[0].preemptions),
        "none" if not run.ledger().problems else str(len(run.ledger().problems)),
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["verl", "flex"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[16, 64, 256])
    chosen = parser.parse_args()
    heads = ("ranks", "responses/step", "method", "KV tokens", "simulate s", "plan s", "account s", "iterations")
    table = Table(title=f"{STEPS} steps; CPU seconds of one core")
    for head in (*heads, "M tokens/s", "preempted", "problems"):
        table.add_column(head, justify="right")
    for ranks, prompts, responses in CASES:
        for method in chosen.methods if ranks in chosen.ranks else ():
            for kv in (1 << 30, 12_000 * prompts * responses // 2):
                table.add_row(*timed(ranks, prompts, responses, method, kv))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
