"""``flexfloor simulate``: what a plan or a method would take, from response lengths and step times alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flexfloor.config import FlexFloorConfig, load_config
from flexfloor.errors import InputError
from flexfloor.history import read_lengths
from flexfloor.ledger.report import report_json
from flexfloor.ledger.table import report_table
from flexfloor.plan import EpochPlan
from flexfloor.simulate.calibrate import Calibration, calibrate, save_report
from flexfloor.simulate.compare import (
    Comparison,
    MachineOf,
    WorkloadsOf,
    comparison_table,
    method_variants,
    notes_of,
    presets_in,
    simulate_arms,
)
from flexfloor.simulate.costs import default_costs, h200_table, load_costs, save_costs
from flexfloor.simulate.run import Machine, SimulatedRun, simulate_workloads
from flexfloor.simulate.sweep import SweepResult, parse_sweep, run_sweep
from flexfloor.simulate.workload import Distribution, Workload, drawn, from_observations, read_distribution
from flexfloor.step_times import StepTimes

app = typer.Typer(add_completion=False)


@app.command()
def simulate(
    config: Annotated[
        Path | None, typer.Option(help="YAML with a `flexfloor:` section; with --compare a folder of presets too.")
    ] = None,
    lengths: Annotated[
        Path | None, typer.Option(help="lengths.jsonl: its first epoch is history, later ones are simulated.")
    ] = None,
    pmf: Annotated[
        list[str] | None,
        typer.Option(help="CSV output_tokens,probability to draw lengths from; FILE=WEIGHT, repeated, mixes several."),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Simulate this plan.json instead of planning.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a run folder for `flexfloor report`.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="All presets of the --config folder, or all methods of one file.")
    ] = False,
    sweep: Annotated[
        list[str] | None, typer.Option(help="floors, mu, n or ranks, with values as in mu=1,1.16; may be repeated.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write --compare and --sweep as one page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    table: Annotated[
        Path | None, typer.Option(help="CSV of decode step times instead of the built-in H200 one.")
    ] = None,
    costs: Annotated[Path | None, typer.Option(help="YAML with a `costs:` section.")] = None,
    extrapolate: Annotated[
        bool, typer.Option("--extrapolate", help="Answer for EP sizes and batches outside of the table, labelled.")
    ] = False,
    seed: Annotated[list[int] | None, typer.Option(help="Seed of drawn lengths or noise; may be repeated.")] = None,
    items: Annotated[int, typer.Option(min=1, help="Drawn items.")] = 160,
    responses: Annotated[
        int | None, typer.Option(min=1, help="Drawn responses an item; the configuration's without it.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Drawn epochs after the bootstrap.")] = 1,
    correlation: Annotated[float, typer.Option(help="Same-item correlation of drawn lengths (normal scores).")] = 0.6,
    growth: Annotated[
        float, typer.Option(help="How fast the spread within an item grows with its length (drawn lengths).")
    ] = 0.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens of drawn items.")] = 256,
    scale: Annotated[float, typer.Option(help="Factor on drawn lengths.")] = 1.0,
    noise: Annotated[
        float, typer.Option(min=0.0, help="For a file of one epoch: log-normal sd of the next epoch's lengths.")
    ] = 0.0,
    bootstrap: Annotated[bool, typer.Option("--bootstrap", help="Simulate and log the first epoch too.")] = False,
    calibrate_from: Annotated[
        Path | None, typer.Option("--calibrate", help="Write step times and costs of this RUN_DIR to the folder --out.")
    ] = None,
) -> None:
    """Simulate rollouts from response lengths: lock-step decoding, KV limits, transitions, the same event log.

    Step times come from a table (EP size, batch). What is assumed is printed with every result.
    """
    if calibrate_from is not None:
        _calibrate(calibrate_from, out, as_json=as_json)
        return
    if config is None:
        raise InputError("is missing; name a YAML file with a `flexfloor:` section", field="--config")
    if scale <= 0:
        raise InputError(f"must be positive, got {scale:g}", field="--scale")
    source = Source(lengths, pmf or [], tuple(dict.fromkeys(seed or [0])), noise)
    source.draw = {
        "items": items,
        "epochs": epochs,
        "correlation": correlation,
        "growth": growth,
        "prompt_tokens": prompt_tokens,
        "scale": scale,
    }
    source.responses = responses
    machine = _machine(table, costs, extrapolate=extrapolate)
    if compare or sweep:
        if plan is not None or out is not None or bootstrap:
            raise InputError("--plan, --out and --bootstrap go with a single run", field="--compare/--sweep")
        _many(config, source, machine, compare=compare, sweeps=sweep or [], html=html, as_json=as_json)
        return
    if html is not None:
        raise InputError("goes with --compare or --sweep; `flexfloor report --html` draws a run", field="--html")
    settings = load_config(config)
    made = EpochPlan.load(plan) if plan is not None else None
    if made is not None and made.world_size != settings.world_size:
        what = f"is {made.world_size}, the configuration's is {settings.world_size}"
        raise InputError(what, file=plan, field="world_size")
    name = out.resolve().name if out is not None else "simulated"
    run = simulate_workloads(
        settings, source.workloads(settings), machine(settings), name=name, bootstrap=bootstrap, plan=made
    )
    if out is not None:
        run.save(out)
    _print_run(run, as_json=as_json)


class Source:
    """Where true lengths come from.

    Args:
        lengths: a lengths.jsonl, or None.
        pmf: distributions, each FILE or FILE=WEIGHT.
        seeds: one workload each.
        noise: see `from_observations`.

    Raises:
        InputError: not exactly one of the two, or a malformed file.
    """

    def __init__(self, lengths: Path | None, pmf: Sequence[str], seeds: tuple[int, ...], noise: float) -> None:
        if (lengths is None) == (not pmf):
            raise InputError("give one of them: --lengths FILE or --pmf FILE", field="--lengths/--pmf")
        self._lengths, self.seeds, self._noise = lengths, seeds, noise
        if lengths is not None and len(seeds) > 1 and not noise:
            raise InputError("several seeds change nothing for a lengths file without --noise", field="--seed")
        if pmf and noise:
            raise InputError("goes with --lengths; drawn epochs differ anyway (--correlation)", field="--noise")
        if any(one < 0 for one in seeds):
            raise InputError("must not be negative", field="--seed")
        self._observations = read_lengths(lengths) if lengths is not None else []
        self._parts = [_part(text) for text in pmf]
        self.draw: dict[str, Any] = {}
        self.responses: int | None = None

    def workloads(self, config: FlexFloorConfig) -> Mapping[int, Workload]:
        """The workload of each seed."""
        if self._parts:
            count = self.responses or config.responses_per_prompt
            return {s: drawn(self._parts, responses=count, seed=s, **self.draw) for s in self.seeds}
        return {
            s: from_observations(self._observations, file=self._lengths, noise=self._noise, seed=s) for s in self.seeds
        }


def _part(text: str) -> tuple[Distribution, float]:
    name, equals, weight = text.rpartition("=")
    if not equals:
        return read_distribution(text), 1.0
    try:
        value = float(weight)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise InputError(f"weight must be a positive number, got {weight!r}", file=name, field="--pmf")
    return read_distribution(name), value


def _machine(table: Path | None, costs: Path | None, *, extrapolate: bool) -> MachineOf:
    given = StepTimes.load(table) if table is not None else None
    charged = load_costs(costs) if costs is not None else None

    def machine(config: FlexFloorConfig) -> Machine:
        rate: Any = getattr(config, "rate", None)
        named, more = getattr(rate, "table", None), getattr(rate, "extrapolate", False)
        times = given or (StepTimes.load(named) if named else h200_table())
        return Machine(times, charged or default_costs(config), extrapolate or more)

    return machine


def _many(
    config: Path,
    source: Source,
    machine: MachineOf,
    *,
    compare: bool,
    sweeps: Sequence[str],
    html: Path | None,
    as_json: bool,
) -> None:
    workloads: WorkloadsOf = source.workloads
    notes: list[str] = []
    found: Comparison | None = None
    if compare:
        if config.is_dir():
            configs, notes = presets_in(config)
        else:
            configs = method_variants(load_config(config))
        found = simulate_arms(configs, workloads, machine)
    swept: list[SweepResult] = []
    if sweeps:
        settings = load_config(config / "flex_n2.yaml" if config.is_dir() else config)
        swept = [run_sweep(parse_sweep(text, settings), settings, workloads, machine) for text in sweeps]
        notes += [note for one in swept for note in one.notes]
    arms = [arm for point in (found, *(p for one in swept for p in one.points)) if point for arm in point.arms]
    notes = [*notes_of(arms), *(found.unequal if found else ()), *dict.fromkeys(notes)]
    if html is not None:
        from flexfloor.simulate.page import write_page

        lead = f"{config.name}, seed {', '.join(map(str, source.seeds))}"
        write_page(html, comparison=found, sweeps=swept, lead=lead, notes=notes)
    if as_json:
        data: dict[str, Any] = found.to_json() if found else {}
        data |= {"sweeps": [one.to_json() for one in swept]} if swept else {}
        typer.echo(json.dumps({**data, "assumptions": notes}, indent=2, allow_nan=False))
        return
    console = _console()
    if found is not None:
        console.print(comparison_table(found))
    for one in swept:
        console.print(_sweep_table(one))
    _print_notes(console, notes)
    if html is not None:
        console.print(f"Wrote {html}", markup=False)


def _sweep_table(swept: SweepResult) -> Table:
    table = Table(title=f"sweep of {swept.sweep.variable}")
    for head in (swept.sweep.variable, "Arm", "Q tokens/s", "Q gain", "E tokens/rank-s", "E gain", "T s", "H rank-s"):
        table.add_column(head, justify="left" if head == "Arm" else "right")
    for value, point in zip(swept.sweep.values, swept.points, strict=True):
        for place, arm in enumerate(point.arms):
            totals, gains = arm.ledger.totals, arm.gains
            table.add_row(
                "" if place else str(value),
                arm.name,
                f"{totals.throughput:,.1f}",
                f"{gains.throughput:+.1%}" if gains else "-",
                f"{totals.efficiency.mid:,.1f}",
                f"{gains.efficiency.mid:+.1%}" if gains else "-",
                f"{totals.window_seconds:,.1f}",
                f"{totals.occupied.mid:,.0f}",
            )
    return table


def _print_run(run: SimulatedRun, *, as_json: bool) -> None:
    ledger = run.ledger()
    if as_json:
        typer.echo(json.dumps({**report_json(ledger), "assumptions": run.notes}, indent=2, allow_nan=False))
        return
    console = _console()
    console.print(report_table(ledger, None, []))
    _print_notes(console, run.notes)


def _calibrate(run_dir: Path, out: Path | None, *, as_json: bool) -> None:
    found = calibrate(run_dir)
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            save_report(found, out / "calibration.json")
        except OSError as error:
            raise InputError(f"cannot be written ({error.strerror}); name a writable place", file=out) from error
        found.table.save(out / "step_times.csv", [f"calibrated from {run_dir.resolve().name}"])
        save_costs(found.costs, out / "costs.yaml")
    if as_json:
        data = {
            "step_times": [vars(knot) for knot in found.knots],
            "costs": found.costs.model_dump(mode="json"),
            "equations": found.equations,
            "unknowns": found.unknowns,
            "explained": found.explained,
            "median_error": found.error,
            "notes": list(found.notes),
        }
        typer.echo(json.dumps(data, indent=2, allow_nan=False))
        return
    console = _console()
    console.print(_calibration_table(found))
    _print_notes(console, found.notes)
    for name in ("step_times.csv", "costs.yaml", "calibration.json") if out is not None else ():
        console.print(f"Wrote {out / name if out else name}", markup=False)


def _calibration_table(found: Calibration) -> Table:
    told = f"{found.equations} intervals, {found.unknowns} unknown times; predicted / measured {found.explained:.3f}"
    table = Table(title="step times of the run", caption=f"{told}; median error of an interval {found.error:.1%}")
    for head in ("EP", "Batch", "Decode ms", "Iterations near"):
        table.add_column(head, justify="right")
    for knot in found.knots:
        table.add_row(str(knot.ep), str(knot.batch), f"{knot.seconds * 1e3:.2f}", str(knot.iterations))
    return table


def _print_notes(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=160)
