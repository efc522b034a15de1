"""The main job on one machine: learn lengths, plan, shrink 4 -> 2 -> 1 where the plan says so, prove, compare.

    epoch 0  no history yet, no shrinking     ->  length history
    epoch 1  planned from it, three arms:  flex    the plan
                                           static  the same plan, shrinking off: must be identical request by request
                                           verl    dataset order, no shaping, no shrinking: the baseline

Real vLLM engines, started by Ray; one start serves all arms.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from footprint import Footprint
from rich.console import Console
from rich.rule import Rule

from flexfloor.cli.plan import summary as plan_table
from flexfloor.cli.rollout import Screen
from flexfloor.config import FlexFloorConfig, load_config
from flexfloor.driver.at_hand import ranks_share_cpu
from flexfloor.driver.checks import ModelFacts, Proposal, refuse
from flexfloor.driver.cluster import Cluster, orderly_end, undisturbed
from flexfloor.driver.handles import RayServer, Server
from flexfloor.driver.identity import compare_runs
from flexfloor.driver.rollout import bootstrap_plan, run_plan
from flexfloor.driver.run_dir import RunDirectory
from flexfloor.driver.spec import ServerSpec
from flexfloor.errors import FlexFloorError, InputError, RefusedError
from flexfloor.history import read_lengths, replay
from flexfloor.ledger import load_run
from flexfloor.ledger.table import report_table
from flexfloor.plan import EpochPlan
from flexfloor.planner import plan_epoch
from flexfloor.workload import Workload, read_prompts

HERE = Path(__file__).resolve().parent
RUN = "quickstart"
ON_CPU = "All ranks share this machine's cores here"
ON_DEVICES = "The model is tiny and its first steps compile kernels"
NOTE = "{why}: seconds, Q and the gains say that the accounting works, nothing about a real rollout on devices."

USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]

console = Console() if Console().is_terminal else Console(width=140)


@dataclass
class Job:
    """One quickstart: where things lie and what is started."""

    config: FlexFloorConfig
    workload: Workload
    model: Path
    out: Path
    server: Server | None = None

    def arm(self, name: str, plan: EpochPlan, *, shrink: bool = True) -> Path:
        """Runs a plan into a folder of its own."""
        if self.server is None:
            raise RuntimeError("the server is not started")
        run_dir = RunDirectory(self.out / name, self.config)
        try:
            with Screen(console) as screen:
                run_plan(
                    plan, self.config, self.workload, self.server, run_dir, shrink=shrink, run_id=RUN, watcher=screen
                )
        finally:
            run_dir.close()
        return run_dir.path


def title(text: str) -> None:
    """A heading."""
    console.print(Rule(text, align="left"))


def checkpoint(given: Path | None) -> Path:
    """The checkpoint: the given one, the shipped one, or one that is trained now."""
    if given is not None:
        return given
    shipped = sorted((HERE / "data").glob("*/config.json"))
    if shipped:
        return shipped[0].parent
    made = HERE.parent / "runs" / "checkpoint"
    if not (made / "config.json").exists():
        title("Training a small checkpoint, once (a few minutes)")
        script = HERE.parent / "tools" / "make_checkpoint.py"
        subprocess.run([sys.executable, str(script), "--out", str(made)], check=True)
    return made


def arms(job: Job) -> bool:
    """Epoch 0, the plan, the three arms, the comparison. Returns whether shrinking changed nothing."""
    title("Epoch 0: nothing is known about lengths, so nothing shrinks; the history is filled")
    first = bootstrap_plan(job.config, job.workload, 0)
    learned = job.arm("epoch0", first)

    title("Epoch 1: planned from the lengths of epoch 0 (the same as `flexfloor plan`)")
    history = replay(read_lengths(learned / "lengths.jsonl"), job.config.alpha)
    items = list(job.workload)
    flex = plan_epoch(job.config, history, items)
    verl = plan_epoch(job.config.model_copy(update={"method": "verl"}), history, items)
    console.print(plan_table(flex))

    title("Arm 1 of 3, flex: ranks leave when they are done, memory is given back")
    flex_run = job.arm("flex", flex)
    title("Arm 2 of 3, static: the same plan and seeds, shrinking off")
    static_run = job.arm("static", flex, shrink=False)
    title("Arm 3 of 3, verl: dataset order, no shaping, no shrinking")
    verl_run = job.arm("verl", verl)

    title("Did shrinking change anything? Tokens and logprobs of flex and static, compared exactly")
    identity = compare_runs(flex_run, static_run)
    console.print(f"{identity}", style="bold green" if identity.whole else "bold red")
    if identity.first_difference:
        console.print(f"first difference: {identity.first_difference}", markup=False)

    title("What shrinking and shaping saved: flex beside verl")
    note = NOTE.format(why=ON_CPU if ranks_share_cpu() else ON_DEVICES)
    console.print(report_table(load_run(flex_run), load_run(verl_run), [note]))
    return identity.whole


def run(
    model: Annotated[Path | None, typer.Option(help="Checkpoint folder; the shipped one without it.")] = None,
    prompts: Annotated[Path, typer.Option(help="prompts.jsonl.")] = HERE / "data" / "prompts.jsonl",
    config: Annotated[Path, typer.Option(help="YAML file with a `flexfloor:` section.")] = HERE / "quickstart.yaml",
    out: Annotated[Path | None, typer.Option(help="Where the runs go; runs/quickstart-TIME without it.")] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Devices (or CPU slots) to use; all that are visible without it.")
    ] = None,
) -> None:
    """Runs the main job and says what it does while it does it."""
    began = time.monotonic()
    settings, workload, folder = load_config(config), read_prompts(prompts), checkpoint(model)
    target = out or HERE.parent / "runs" / time.strftime("quickstart-%Y%m%d-%H%M%S")
    job = Job(settings, workload, folder.resolve(), target)
    first = bootstrap_plan(settings, workload, 0)
    facts = ModelFacts.read(job.model)
    refuse(Proposal.here(first, settings, workload, facts, slots=slots))

    title(f"Starting {settings.world_size} vLLM engines under Ray (half a minute to a minute)")
    console.print(f"model {job.model}, {len(workload)} prompts, {settings.responses_per_prompt} responses each")
    console.print(f"everything is written below {target}", soft_wrap=True)
    with Footprint() as footprint, orderly_end():
        spec = ServerSpec.of(
            settings,
            job.model,
            events_dir=target / "events",
            board=target / "board",
            run=RUN,
            log=target / "server.log",
        )
        with Cluster(settings.world_size):
            job.server = RayServer(spec)
            try:
                job.server.start(lambda _: None)
                console.print(f"ready after {time.monotonic() - began:.0f} s")
                same = arms(job)
            finally:
                with undisturbed():
                    job.server.close()
    seconds, peak = time.monotonic() - began, footprint.peak_bytes / 2**30
    console.print(f"took {seconds:.0f} s, peak memory {peak:.2f} GiB over all processes; nothing is left running")
    console.print(f"look again with: flexfloor report {target}/flex --baseline {target}/verl", soft_wrap=True)
    if not same:
        raise typer.Exit(1)


def main() -> None:
    """Entry point: one line for bad input, never a traceback."""
    app = typer.Typer(add_completion=False)
    app.command()(run)
    try:
        sys.exit(app(standalone_mode=False))
    except USAGE_ERROR as error:
        sys.exit(_complain(str(error), 2))
    except (InputError, RefusedError) as error:
        sys.exit(_complain(str(error), 2))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(_complain("stopped", 130))
    except FlexFloorError as error:
        sys.exit(_complain(str(error), 1))


def _complain(message: str, code: int) -> int:
    print(f"quickstart: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
