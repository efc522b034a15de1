"""Is the simulator right about real rollouts on this machine?

Calibration rounds and real rollouts take turns on one set of engines, so that a machine that drifts drifts for both.
The table is measured on prompts of its own; the rollouts' lengths are the true ones, and nothing is fitted to them.

    warm up  ->  [ calibration round, flex rollout, verl rollout ] x N  ->  table, costs  ->  simulated flex and verl

Compared: T and H (occupied rank-seconds) of each arm, median over the turns, and the ratio flex / verl of H / (N T).

Usage: python tools/simulator_check.py --model recipes/data/tiny-moe --out DIR [--turns 4] [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flexfloor.config import FlexFloorConfig, load_config
from flexfloor.driver.calibrate import Calibrated, Campaign, Watcher
from flexfloor.driver.calibration import Grid
from flexfloor.driver.checks import ModelFacts
from flexfloor.driver.handles import LocalServer
from flexfloor.driver.rollout import bootstrap_plan, run_plan
from flexfloor.driver.run_dir import RunDirectory
from flexfloor.driver.spec import ServerSpec
from flexfloor.history import read_lengths, replay
from flexfloor.ledger import report_json
from flexfloor.plan import EpochPlan
from flexfloor.planner import plan_epoch
from flexfloor.simulate import Machine, from_observations, simulate_workloads
from flexfloor.workload import Workload, read_prompts

RUN = "check"
DATA = Path(__file__).resolve().parents[1] / "recipes"


class Told(Watcher):
    """Counts on the terminal."""


def account(report: dict[str, Any]) -> dict[str, float]:
    """T, H (middle of its bounds) and H / (N T) of a report."""
    seconds = float(report["window_seconds"])
    occupied = statistics.mean(report["occupied_rank_seconds"])
    return {"T": seconds, "H": occupied, "share": occupied / (seconds * report["ranks"])}


def rollout(
    name: str, plan: EpochPlan, config: FlexFloorConfig, workload: Workload, server: LocalServer, out: Path
) -> tuple[dict[str, float], Path]:
    """One real arm."""
    directory = RunDirectory(out / name, config)
    try:
        result = run_plan(plan, config, workload, server, directory, run_id=RUN)
    finally:
        directory.close()
    return account(result.report), directory.path


def simulated(plan: EpochPlan, config: FlexFloorConfig, lengths: Path, found: Calibrated) -> dict[str, float]:
    """The same arm, simulated from the lengths that it really had."""
    observed = [seen for seen in read_lengths(lengths) if seen.epoch == plan.epoch]
    run = simulate_workloads(
        config, {0: from_observations(observed)}, Machine(found.table, found.costs, True), plan=plan
    )
    return account(report_json(run.ledger()))


def main() -> None:
    """Run the check and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=DATA / "quickstart.yaml")
    parser.add_argument("--prompts", type=Path, default=DATA / "data" / "prompts.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config, workload = load_config(options.config), read_prompts(options.prompts)
    out = options.out.absolute()
    (out / "calibration" / "events").mkdir(parents=True)
    spec = ServerSpec.of(
        config,
        options.model.absolute(),
        events_dir=out / "events",
        board=out / "board",
        run=RUN,
        log=out / "server.log",
    )
    server = LocalServer(spec)
    real: dict[str, list[dict[str, float]]] = {"flex": [], "verl": []}
    try:
        statuses = server.start()
        most = config.engine.max_num_seqs or 16
        grid = Grid(tuple(1 << k for k in range(most.bit_length())), (16,), tokens=20, rounds=options.turns)
        facts = ModelFacts.read(options.model)
        campaign = Campaign(server, statuses, config, facts, grid, out / "calibration" / "events", Told())
        first = bootstrap_plan(config, workload, 0)
        _, learned = rollout("epoch0", first, config, workload, server, out)
        history = replay(read_lengths(learned / "lengths.jsonl"), config.alpha)
        items = list(workload)
        plans = {
            name: plan_epoch(config.model_copy(update={"method": name}), history, items) for name in ("flex", "verl")
        }
        campaign.warm_up()
        paths: dict[str, Path] = {}
        for turn in range(options.turns):
            campaign.round()
            for name in ("flex", "verl") if turn % 2 else ("verl", "flex"):
                answer, paths[name] = rollout(f"{name}{turn}", plans[name], config, workload, server, out)
                real[name].append(answer)
        found = campaign.conclude()
    finally:
        server.close()
    result: dict[str, Any] = {"notes": list(found.notes), "table": [list(row) for row in found.table.rows], "arms": {}}
    table = Table("arm", "figure", "real, median", "real, spread", "simulated", "simulated / real", title="simulator")
    for name, answers in real.items():
        predicted = simulated(plans[name], config, paths[name] / "lengths.jsonl", found)
        result["arms"][name] = {"real": answers, "simulated": predicted}
        for figure in ("T", "H", "share"):
            values = [answer[figure] for answer in answers]
            middle = statistics.median(values)
            table.add_row(
                name,
                {"T": "T, s", "H": "H, rank-s", "share": "H / (N T)"}[figure],
                f"{middle:.3f}",
                f"{min(values):.3f} to {max(values):.3f}",
                f"{predicted[figure]:.3f}",
                f"{predicted[figure] / middle:.3f}",
            )
    ratios = [flex["share"] / verl["share"] for flex, verl in zip(real["flex"], real["verl"], strict=True)]
    told = result["arms"]["flex"]["simulated"]["share"] / result["arms"]["verl"]["simulated"]["share"]
    result["ratio"] = {"real": ratios, "simulated": told}
    middle = statistics.median(ratios)
    table.add_row(
        "flex / verl", "H / (N T)", f"{middle:.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}", f"{told:.3f}",
        f"{told / middle:.3f}",
    )  # fmt: skip
    console = Console() if Console().is_terminal else Console(width=120)
    console.print(table)
    for note in found.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
