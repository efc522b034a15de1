"""Arms of the CPU training recipe, each a real verl run in a process of its own, and the report on what they show.

train       FlexFloor: three epochs; epoch 0 learns lengths, epochs 1 and 2 shrink
stock-a     stock verl, the same steps: its dataset has the prompts in the order of the plans of `train`
stock-b     stock verl again, another seed: how far two stock runs differ
on, off     frozen policy: the same plan with shrinking and without; every response must be equal
greedy-*    frozen policy, greedy, vLLM's stock combine: agreement with stock verl's placement and of stock with itself
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import train_cpu_report
import train_cpu_task
import typer

from flexfloor.plan import EpochPlan

HERE = Path(__file__).resolve().parent
EPOCHS = 3
TRAINED = [
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.optim.lr=3.0e-4",
]
FROZEN = ["actor_rollout_ref.actor.optim.lr=0.0"]
RESPONSES = ["+flexfloor.verl.responses=true"]
GREEDY = ["actor_rollout_ref.rollout.top_k=1"]
MANY, FEW = 24, 16
"""Prompts of the arms that train, and of those that keep the policy frozen."""

ARMS: dict[str, tuple[str, int, list[str]]] = {
    "train": ("cpu_flexfloor", MANY, [*TRAINED, f"trainer.total_epochs={EPOCHS}", "trainer.save_freq=3"]),
    "stock-a": ("cpu", MANY, [*TRAINED, "trainer.total_epochs=1"]),
    "stock-b": ("cpu", MANY, [*TRAINED, "trainer.total_epochs=1", "actor_rollout_ref.rollout.seed=1043"]),
    "on": ("cpu_flexfloor", FEW, [*FROZEN, *RESPONSES, "trainer.total_epochs=2"]),
    "off": ("cpu_flexfloor", FEW, [*FROZEN, *RESPONSES, "trainer.total_epochs=2", "+flexfloor.verl.shrink=false"]),
    "greedy-stock": ("cpu", FEW, [*FROZEN, *GREEDY, "trainer.total_epochs=1"]),
    "greedy-moved": ("cpu", FEW, [*FROZEN, *GREEDY, "trainer.total_epochs=1", "data.shuffle=true", "data.seed=7"]),
    "greedy-flex": (
        "cpu_flexfloor",
        FEW,
        [*FROZEN, *GREEDY, "trainer.total_epochs=2", "flexfloor.engine.combine=stock"],
    ),
}


def command(preset: str, name: str, folder: Path, train: Path, val: Path, more: Sequence[str]) -> list[str]:
    """The command line of one verl run into ``folder``."""
    return [
        *(sys.executable, "-m", "verl_integration.main", "--config-name", preset),
        f"actor_rollout_ref.model.path={HERE / 'data' / 'tiny-moe'}",
        *(f"data.train_files={train}", f"data.val_files={val}"),
        f"reward.custom_reward_function.path={HERE / 'train_cpu_task.py'}",
        "reward.custom_reward_function.name=compute_score",
        "trainer.logger=[console,file]",
        f"trainer.experiment_name={name}",
        f"trainer.default_local_dir={folder}",
        f"trainer.rollout_data_dir={folder / 'rollouts'}",
        f"hydra.run.dir={folder / 'hydra'}",
        *more,
    ]


def environment(folder: Path) -> dict[str, str]:
    """Variables of a verl run into ``folder``."""
    own = {"VERL_PLATFORM": "cpu", "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"), "RAY_DEDUP_LOGS": "0"}
    return {**os.environ, **own}


def planned_rows(out: Path) -> list[dict[str, Any]]:
    """The dataset in the order in which `train` visited it, epoch by epoch.

    Raises:
        SystemExit: `train` has not run.
    """
    rows = {row["extra_info"]["item_id"]: row for row in train_cpu_task.rows()}
    plans = sorted((out / "train" / "flexfloor" / "plans").glob("epoch-*.json"))
    if len(plans) < EPOCHS:
        raise SystemExit("run the arm `train` first: the stock arms repeat its steps")
    return [rows[item] for plan in plans for step in EpochPlan.load(plan).steps for item in step.items]


def run_arm(name: str, out: Path, more: Sequence[str] = ()) -> int:
    """Runs one arm into ``out / name``; returns its exit code. Its output goes to log.txt there.

    Raises:
        SystemExit: the arm has run there already; verl would resume it and begin its metrics anew.
    """
    preset, prompts, overrides = ARMS[name]
    folder = (out / name).resolve()
    if folder.exists():
        raise SystemExit(f"{folder} holds a run of {name}: remove it, or name another --out")
    folder.mkdir(parents=True)
    rows = planned_rows(out) if name.startswith("stock") else train_cpu_task.rows(prompts)
    train, val = train_cpu_task.write(folder / "data", rows)
    began = time.monotonic()
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(
            command(preset, name, folder, train, val, [*overrides, *more]),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(folder),
        )
    print(f"{name}: exit code {done.returncode} after {time.monotonic() - began:.0f} s", flush=True)
    if done.returncode:
        print("\n".join((folder / "log.txt").read_text(errors="replace").splitlines()[-15:]), flush=True)
    return done.returncode


def main(
    arms: Annotated[list[str] | None, typer.Argument(help=f"Arms to run: {', '.join(ARMS)}; all without any.")] = None,
    out: Annotated[Path, typer.Option(help="Where the runs go.")] = HERE.parent / "runs" / "train_cpu",
    report: Annotated[bool, typer.Option(help="Report on the arms that are there, after running.")] = True,
    override: Annotated[list[str] | None, typer.Option(help="Further verl overrides for every arm.")] = None,
) -> None:
    """Runs arms of the recipe and reports."""
    for name in arms if arms is not None else list(ARMS):
        if name not in ARMS:
            raise typer.BadParameter(f"unknown arm {name!r}; known: {', '.join(ARMS)}")
        if run_arm(name, out, override or ()):
            raise typer.Exit(1)
    if report:
        figures: dict[str, Any] = train_cpu_report.figures(out)
        (out / "report.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        print(train_cpu_report.text(figures))
        if figures["failed"]:
            raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
