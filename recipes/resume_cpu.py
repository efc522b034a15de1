"""Kills a training run with SIGKILL at three moments, resumes it each time, and compares it with one never stopped.

    reference        two epochs of two steps, a checkpoint after each step, frozen policy, seeds by item
    generating       the same run, killed while step 2 generates
    between          resumed from checkpoint 1, killed after the rollout of step 3 and before its update ends
    checkpointing    resumed from checkpoint 2, killed while checkpoint 3 is written
    finish           resumed, runs to the end
    check            history, plans, trained steps and responses must equal the reference's

Each stage is one start of verl; without arguments all run in this order. A kill hits the trainer (verl's task runner)
and the workers that write a checkpoint's shards in one go, the driver right after.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import psutil
import train_cpu
import train_cpu_task
import typer

from flexfloor.history import read_lengths
from flexfloor.plan import EpochPlan

STAGES = ("reference", "generating", "between", "checkpointing", "finish", "check")
PROMPTS, STEPS, RANKS = 16, 4, 4
DEADLINE_S = 540.0


def main(
    stages: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(STAGES)}; all without any.")] = None,
    out: Annotated[Path, typer.Option(help="Where the runs go.")] = train_cpu.HERE.parent / "runs" / "resume_cpu",
    reference: Annotated[Path | None, typer.Option(help="A reference that has run: the frozen arm `on`.")] = None,
) -> None:
    """Runs stages."""
    for stage in stages or STAGES:
        if stage not in STAGES:
            raise typer.BadParameter(f"unknown stage {stage!r}; known: {', '.join(STAGES)}")
        if stage == "check":
            failures = check(reference or out / "reference", out / "killed")
            print("\n".join(failures) or "resume: history, plans, trained steps and responses equal the reference's")
            if failures:
                raise typer.Exit(1)
        else:
            run(stage, out)


def run(stage: str, out: Path) -> None:
    """One start of verl: to its end, or to its kill."""
    folder = (out / ("reference" if stage == "reference" else "killed")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    train, val = train_cpu_task.write(out.resolve() / "data", train_cpu_task.rows(PROMPTS))
    more = ["trainer.total_epochs=2", "trainer.save_freq=1", "actor_rollout_ref.actor.optim.lr=0.0"]
    command = train_cpu.command("cpu_flexfloor", "resume", folder, train, val, more)
    began = time.monotonic()
    with (folder / f"log-{stage}.txt").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=train_cpu.environment(folder), start_new_session=True
        )
        moment, victims = MOMENTS.get(stage), Victims(process.pid)
        while process.poll() is None and time.monotonic() - began < DEADLINE_S:
            if moment is not None and moment(folder):
                killed = victims.kill()
                print(f"{stage}: killed {killed} after {time.monotonic() - began:.0f} s; {left_behind(folder)}")
                if latest(folder) != LATEST[stage]:
                    raise SystemExit(f"{stage}: the kill came too late, checkpoint {latest(folder)} is complete")
                return
            victims.look()
            time.sleep(0.01)
    if process.poll() is None or process.returncode or moment is not None:
        tail = "\n".join((folder / f"log-{stage}.txt").read_text(errors="replace").splitlines()[-15:])
        if process.poll() is None:
            victims.kill()
        raise SystemExit(f"{stage}: exit code {process.returncode}, the moment to kill it never came\n{tail}")
    print(f"{stage}: finished after {time.monotonic() - began:.0f} s")


class Victims:
    """The processes of a run that a kill hits: found ahead, because the moment to kill them is short.

    Args:
        pid: the driver.
    """

    TITLES = ("ray::FlexFloorTaskRunner", "ray::WorkerDict")
    """The trainer, and the workers that write shards (process titles set by Ray)."""

    def __init__(self, pid: int) -> None:
        self._driver = psutil.Process(pid)
        self._found: dict[int, str] = {}
        self._looked = 0.0

    def look(self) -> None:
        """Looks for them every other second, until all are found."""
        if time.monotonic() - self._looked < 2 or len(self._found) == 1 + RANKS:
            return
        for process in self._driver.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                title = " ".join(process.cmdline())
                if title.startswith(self.TITLES):
                    self._found[process.pid] = title.split("::")[1].split(".")[0].split("(")[0]
        self._looked = time.monotonic()

    def kill(self) -> str:
        """SIGKILL to all of them, then to the driver; every process of the run must be gone soon after."""
        order = sorted(self._found, key=lambda pid: self._found[pid] != "FlexFloorTaskRunner")
        for pid in order:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        below = self._driver.children(recursive=True)
        self._driver.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(below, timeout=60)
        if alive:
            raise SystemExit(f"{len(alive)} processes outlived the driver: {[p.name() for p in alive][:5]}")
        counted = Counter(self._found[pid] for pid in order)
        if not counted["FlexFloorTaskRunner"]:
            raise SystemExit("the trainer's process was not found, only the driver was killed")
        return " and ".join(f"{count} {name}" for name, count in sorted(counted.items()))


def left_behind(folder: Path) -> str:
    """What the checkpoints look like after a kill."""
    newest = max((int(p.name.rsplit("_", 1)[1]) for p in folder.glob("global_step_*")), default=0)
    files = sum(path.is_file() for path in (folder / f"global_step_{newest}").rglob("*"))
    return f"newest checkpoint {newest} with {files} files, to resume from {latest(folder)}"


def latest(folder: Path) -> int:
    """The step that verl would resume from."""
    file = folder / "latest_checkpointed_iteration.txt"
    return int(file.read_text()) if file.exists() and file.read_text().strip() else 0


def _rollouts(folder: Path, event: str) -> int:
    file = folder / "flexfloor" / "events" / "driver.jsonl"
    return file.read_text().count(f'"{event}"') if file.exists() else 0


def _generating(folder: Path) -> bool:
    return latest(folder) == 1 and _rollouts(folder, "rollout_start") == 2 and _rollouts(folder, "rollout_end") == 1


def _between(folder: Path) -> bool:
    return latest(folder) == 2 and not (folder / "global_step_3").exists() and _ended(folder) == (1, 0)


def _ended(folder: Path) -> tuple[int, int] | None:
    """Epoch and step of the last rollout that ended."""
    lines = (folder / "flexfloor" / "events" / "driver.jsonl").read_text().splitlines()
    ends = [json.loads(line) for line in lines if '"rollout_end"' in line]
    return (ends[-1]["epoch"], ends[-1]["step"]) if ends else None


LATEST = {"generating": 1, "between": 2, "checkpointing": 2}
"""The checkpoint that each killed stage leaves to resume from."""


def _checkpointing(folder: Path) -> bool:
    """Shards are there, the note that makes them the latest checkpoint is not."""
    return latest(folder) == 2 and next((folder / "global_step_3" / "actor").glob("*.pt"), None) is not None


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "generating": _generating,
    "between": _between,
    "checkpointing": _checkpointing,
}


def check(reference: Path, killed: Path) -> list[str]:
    """What differs between the two runs, one line each."""
    failures = []
    ours, theirs = (
        {(o.item_id, o.epoch): o for o in read_lengths(folder / "flexfloor" / "lengths.jsonl")}
        for folder in (killed, reference)
    )
    if Counter((epoch, len(o.lengths)) for (_, epoch), o in ours.items()) != {(0, 2): PROMPTS, (1, 2): PROMPTS}:
        failures.append("an item was not trained exactly once an epoch")
    failures += [
        f"history of {key} is {ours.get(key)}, not {one}" for key, one in theirs.items() if ours.get(key) != one
    ]
    for epoch in (0, 1):
        plans = [
            EpochPlan.load(folder / "flexfloor" / "plans" / f"epoch-{epoch}.json") for folder in (killed, reference)
        ]
        if plans[0].steps != plans[1].steps:
            failures.append(f"the plan of epoch {epoch} differs")
    failures += [
        f"the responses of step {n} differ" for n in range(1, STEPS + 1) if _said(killed, n) != _said(reference, n)
    ]
    if latest(killed) != STEPS:
        failures.append(f"{killed.name} ended at checkpoint {latest(killed)}, not {STEPS}")
    return failures


def _said(folder: Path, step: int) -> list[str]:
    """Prompts and responses of a step, in no particular order."""
    lines = (folder / "rollouts" / f"{step}.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted(json.dumps([row["input"], row["output"]]) for row in map(json.loads, lines))


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent.parent)
    sys.exit(typer.run(main))
