"""`flexfloor calibrate`: measures capacity, step times and transition costs of engines on this machine."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from flexfloor.config import FlexFloorConfig, load_config
from flexfloor.driver.calibrate import Calibrated, Campaign, Watcher, capacities, evidence, save
from flexfloor.driver.calibration import Grid, Point
from flexfloor.driver.checks import ModelFacts, Proposal, refuse
from flexfloor.driver.cluster import Cluster, orderly_end, undisturbed
from flexfloor.driver.handles import RayServer, Server
from flexfloor.driver.orders import Sampling
from flexfloor.driver.room import changes, kv_room
from flexfloor.driver.spec import ServerSpec
from flexfloor.errors import InputError
from flexfloor.plan import EpochPlan
from flexfloor.workload import Workload

app = typer.Typer(add_completion=False)


@app.command()
def calibrate(
    model: Annotated[Path, typer.Option(help="Checkpoint folder (Hugging Face format, mixture of experts).")],
    config: Annotated[Path, typer.Option(help="YAML file with a `flexfloor:` section: ranks, floors, engine.")],
    out: Annotated[Path, typer.Option(help="New folder for the tables and the evidence.")],
    batches: Annotated[
        str, typer.Option(help="Requests a rank, comma-separated; powers of two up to engine.max_num_seqs without it.")
    ] = "",
    contexts: Annotated[str, typer.Option(help="Prompt tokens, comma-separated; several give a context axis.")] = "16",
    tokens: Annotated[int, typer.Option(min=8, help="Decode steps of a measurement.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="How often each point is measured; the median counts.")] = 3,
    idle: Annotated[bool, typer.Option(help="Measure worlds with idle ranks too.")] = True,
    capacity: Annotated[
        bool, typer.Option(help="Start engines once a floor and read what KV they have room for.")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts.")] = 0,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Devices (or CPU slots) to use; all that are visible without it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Measure KV capacity, decode step times and transition costs of running engines."""
    settings = load_config(config)
    facts = ModelFacts.read(model)
    most = settings.engine.max_num_seqs or 256
    grid = Grid(
        _numbers(batches, "batches") or tuple(1 << k for k in range(most.bit_length())),
        _numbers(contexts, "contexts"),
        tokens,
        rounds,
        idle,
        seed,
        replace(Sampling.of(settings), ignore_eos=True),
    )
    if not grid.contexts:
        raise InputError("names no prompt length; write for example 16 or 64,1024", field="contexts")
    folder = out.absolute()
    if (folder / "events").exists():
        raise InputError("holds a calibration or a run already; name another --out", file=folder)
    nothing = EpochPlan(
        epoch=0, world_size=settings.world_size, method=settings.method, config_digest=settings.digest(), steps=()
    )
    refuse(Proposal.here(nothing, settings, Workload([]), facts, slots=slots, plan_file=config))
    _make(folder)
    console = Console(stderr=True, highlight=False)
    try:
        with orderly_end():
            found = _run(settings, facts, grid, folder, console, capacity=capacity)
    except KeyboardInterrupt:
        raise typer.Abort from None
    paths = save(found, folder, settings.residency, facts.path.absolute().name)
    if as_json:
        typer.echo(json.dumps({"out": str(folder), **evidence(found)}, indent=1, allow_nan=False))
        return
    wide = Console() if Console().is_terminal else Console(width=160)
    for table in _tables(found):
        wide.print(table)
    for note in found.notes:
        wide.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    for path in paths:
        wide.print(f"Wrote {path}", markup=False, highlight=False, soft_wrap=True)


def _numbers(text: str, field: str) -> tuple[int, ...]:
    with suppress(ValueError):
        numbers = [int(part) for part in text.split(",") if part.strip()]
        if all(number > 0 for number in numbers):
            return tuple(sorted(set(numbers)))
    raise InputError(f"must be whole numbers above 0 with commas between, got {text!r}", field=field)


def _make(folder: Path) -> None:
    try:
        for name in ("events", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot be made ({error.strerror}); name a writable place", file=folder) from error


def _run(
    config: FlexFloorConfig, model: ModelFacts, grid: Grid, folder: Path, console: Console, *, capacity: bool
) -> Calibrated:
    sizes = config.admissible_sizes
    with Screen(console) as screen, Cluster(config.world_size):

        def start(floor: int) -> tuple[Server, list[dict[str, Any]]]:
            spec = ServerSpec.of(
                config,
                model.path.absolute(),
                events_dir=folder / "events",
                board=folder / "board",
                run="calibration",
                log=folder / "logs" / f"server-{floor}.log",
                smallest_floor=floor,
            )
            screen.say(f"starting {config.world_size} engines with expert rows for floor {floor} (log: {spec.log})")
            server = RayServer(spec)
            try:
                return server, server.start()
            except BaseException:
                with undisturbed():
                    server.close()
                raise

        server, statuses = start(sizes[-1])
        try:
            found = Campaign(server, statuses, config, model, grid, folder / "events", screen).run()
        finally:
            with undisturbed():
                server.close()
        if not capacity:
            return found
        table = kv_room(statuses, sizes)
        if not changes(statuses):
            table |= capacities(sizes[:-1], start)
    return replace(found, capacity=table)


def _tables(found: Calibrated) -> list[Table]:
    rows = Table(title="decode step times", caption=f"a step is charged for the {found.costs.load} batch of its ranks")
    for head in ("EP", "Batch a rank", "Prompt", "Ranks", "Median ms", "Rounds apart"):
        rows.add_column(head, justify="right")
    for kind in ("decode", "idle"):
        for point in found.findings.measured(kind):
            busy = "all busy" if kind == "decode" else "one busy"
            told = f"{found.findings.median(point) * 1e3:.2f}", f"{found.findings.spread(point) - 1:.0%}"
            rows.add_row(str(point.ep), str(point.batch), str(point.prompt), busy, *told)
    if not found.capacity:
        return [rows]
    capacity = Table(title="KV tokens a rank")
    for head in ("Floor", "Tokens"):
        capacity.add_column(head, justify="right")
    for floor, tokens in found.capacity.items():
        capacity.add_row(str(floor), f"{tokens:,}")
    return [rows, capacity]


class Screen(Watcher):
    """Progress on the terminal.

    Args:
        console: where to print.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("engines", total=None)

    def __enter__(self) -> Screen:
        """Shows the bar."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Takes it away."""
        self._progress.stop()

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(text, markup=False, soft_wrap=True)

    def planned(self, steps: int) -> None:
        """See `Watcher`."""
        self.say(f"measuring in {steps} steps; the first of each kind warms up")
        self._progress.update(self._task, total=steps, description="measuring")

    def measured(self, point: Point) -> None:
        """See `Watcher`."""
        told = f"measured EP {point.ep}, batch {point.batch}"
        self._progress.update(self._task, advance=1, description=told)
