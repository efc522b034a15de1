"""`flexfloor rollout`: runs a plan on real engines and writes RUN_DIR (runtime.md, "Files")."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from flexfloor.config import FlexFloorConfig, load_config
from flexfloor.driver.checks import ModelFacts, Proposal, refuse
from flexfloor.driver.cluster import Cluster, orderly_end, undisturbed
from flexfloor.driver.handles import RayServer
from flexfloor.driver.orders import Progress as ServerProgress
from flexfloor.driver.rollout import RunResult, StepResult, Watcher, bootstrap_plan, run_plan
from flexfloor.driver.room import kv_room
from flexfloor.driver.run_dir import RunDirectory
from flexfloor.driver.spec import ServerSpec
from flexfloor.errors import InputError
from flexfloor.ledger import load_run
from flexfloor.ledger.table import report_table
from flexfloor.plan import EpochPlan
from flexfloor.workload import Workload, read_prompts

app = typer.Typer(add_completion=False)


@app.command()
def rollout(
    model: Annotated[Path, typer.Option(help="Checkpoint folder (Hugging Face format, mixture of experts).")],
    prompts: Annotated[Path, typer.Option(help="prompts.jsonl.")],
    out: Annotated[Path, typer.Option(help="RUN_DIR: responses, events, history, report.")],
    plan: Annotated[Path | None, typer.Option(help="plan.json of `flexfloor plan`.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with a `flexfloor:` section.")] = None,
    bootstrap: Annotated[
        bool, typer.Option("--bootstrap", help="Plan an epoch without history here, without shrinking.")
    ] = False,
    no_shrink: Annotated[bool, typer.Option("--no-shrink", help="Keep the full world; all else as planned.")] = False,
    epoch: Annotated[
        int | None, typer.Option(min=0, help="Epoch of seeds and responses; the plan's without it.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Devices (or CPU slots) to use; all that are visible without it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Run a planned rollout on real engines."""
    workload = read_prompts(prompts)
    planned, settings = _plan_and_config(plan, config, workload, bootstrap=bootstrap, epoch=epoch)
    facts = ModelFacts.read(model)
    refuse(Proposal.here(planned, settings, workload, facts, slots=slots, plan_file=plan))
    console = Console(stderr=True, highlight=False)
    try:
        with orderly_end():
            result = _run(planned, settings, workload, model, out, console, shrink=not no_shrink, epoch=epoch)
    except KeyboardInterrupt:
        raise typer.Abort from None
    if as_json:
        typer.echo(json.dumps({"run_dir": str(out), **asdict(result)}, indent=1, allow_nan=False))
        return
    wide = Console() if Console().is_terminal else Console(width=160)
    wide.print(summary(result))
    wide.print(report_table(load_run(out), None, list(result.notes)))


def _plan_and_config(
    plan: Path | None, config: Path | None, workload: Workload, *, bootstrap: bool, epoch: int | None
) -> tuple[EpochPlan, FlexFloorConfig]:
    if bootstrap == (plan is not None):
        raise InputError("give --plan, or --bootstrap for an epoch without history", field="plan")
    if plan is not None:
        made = EpochPlan.load(plan)
        return made, load_config(config) if config is not None else default_config(made)
    if config is None:
        raise InputError("--bootstrap needs it; name a YAML file with a `flexfloor:` section", field="config")
    settings = load_config(config)
    return bootstrap_plan(settings, workload, epoch or 0), settings


def default_config(plan: EpochPlan) -> FlexFloorConfig:
    """The configuration of a run that names none: what the plan itself says, all else by default."""
    floors = sorted({size for step in plan.steps for size in step.ladder} - {plan.world_size})
    prompts = max((len(step.items) for step in plan.steps), default=1)
    data: dict[str, Any] = {
        "world_size": plan.world_size,
        "responses_per_prompt": 1,
        "step_prompts": max(1, prompts),
        "floors": {"natural": floors},
    }
    return FlexFloorConfig.model_validate(data)


def _run(
    plan: EpochPlan,
    config: FlexFloorConfig,
    workload: Workload,
    model: Path,
    out: Path,
    console: Console,
    *,
    shrink: bool,
    epoch: int | None,
) -> RunResult:
    run_dir = RunDirectory(out, config)
    run_dir.begin(plan, plan.epoch if epoch is None else epoch)
    with Screen(console) as screen:
        spec = ServerSpec.of(
            config,
            model.absolute(),
            events_dir=run_dir.events_dir,
            board=run_dir.board,
            run=run_dir.run_id,
            log=run_dir.log,
        )
        screen.say(f"starting {config.world_size} engines (log: {run_dir.log})")
        with Cluster(config.world_size):
            server = RayServer(spec)
            try:
                statuses = server.start(screen.moved)
                room = kv_room(statuses, config.admissible_sizes)
                return run_plan(
                    plan,
                    config,
                    workload,
                    server,
                    run_dir,
                    shrink=shrink,
                    epoch=epoch,
                    room=room,
                    watcher=screen,
                )
            finally:
                with undisturbed():
                    server.close()
                    run_dir.close()


class Screen(Watcher):
    """Progress on the terminal; one line a step where there is none.

    Args:
        console: where to print.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("responses  {task.fields[world]} ranks  {task.fields[rate]:.0f} tokens/s"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task: TaskID | None = None
        self._steps, self._done, self._mark = 0, 0, (0.0, 0)

    def __enter__(self) -> Screen:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """One line above the bar."""
        self._bar.console.print(text, markup=False, soft_wrap=True)

    def started(self, plan: EpochPlan, responses: int) -> None:
        """See `Watcher`."""
        self._steps = len(plan.steps)
        self._task = self._bar.add_task("step 1", total=responses, world=plan.world_size, rate=0.0)

    def moved(self, progress: ServerProgress) -> None:
        """See `Watcher`."""
        if self._task is None or progress.step is None:
            return
        now, (then, before) = time.monotonic(), self._mark
        rate = (progress.tokens - before) / (now - then) if progress.tokens >= before and then else 0.0
        self._mark = (now, progress.tokens)
        self._bar.update(
            self._task,
            description=f"step {progress.step + 1} of {self._steps} ({progress.phase})",
            completed=self._done + progress.responses,
            world=progress.world,
            rate=rate,
        )

    def finished(self, result: StepResult) -> None:
        """See `Watcher`."""
        self._done += result.responses
        self._mark = (0.0, 0)
        ladder = " > ".join(map(str, result.ladder))
        rate = result.tokens / result.seconds if result.seconds else 0.0
        self.say(
            f"step {result.step + 1} of {self._steps}: {result.responses} responses, {result.tokens} tokens in "
            f"{result.seconds:.1f} s ({rate:.0f} tokens/s), ladder {ladder}"
        )


def summary(result: RunResult) -> Table:
    """The steps of a run as a table."""
    table = Table(title=f"epoch {result.epoch}")
    for name in ("step", "responses", "tokens", "seconds", "tokens/s", "preemptions", "ladder"):
        table.add_column(name, justify="right")
    for step in result.steps:
        table.add_row(
            str(step.step),
            str(step.responses),
            str(step.tokens),
            f"{step.seconds:.2f}",
            f"{step.tokens / step.seconds:.0f}" if step.seconds else "-",
            str(step.preemptions),
            " > ".join(map(str, step.ladder)),
        )
    return table
