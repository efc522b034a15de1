"""``flexfloor doctor``: what this machine lacks, with an exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from flexfloor.doctor import Finding, Machine, Request, State, inspect
from flexfloor.doctor.checks import chosen

app = typer.Typer(add_completion=False)

MARKS = {State.OK: "[green]ok[/]", State.WARNING: "[yellow]look[/]", State.MISSING: "[red]missing[/]"}


@app.command()
def doctor(
    platform: Annotated[str, typer.Option(help="auto (by the devices that are here), cpu, cuda or ascend.")] = "auto",
    config: Annotated[Path | None, typer.Option(help="YAML file of the run, to look at its options too.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks of the full world; the configuration's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Check what this machine can run.

    Exit code 0 when all that is required is there, 1 when something is missing (each is named, with what to do),
    2 for bad input. Nothing is imported, started or changed.
    """
    found_on, findings = inspect(Machine(), Request.of(chosen(platform), config, ranks))
    lacking = [finding for finding in findings if finding.state is State.MISSING]
    if as_json:
        rows = [finding._asdict() for finding in findings]
        typer.echo(json.dumps({"platform": found_on, "ready": not lacking, "findings": rows}, indent=1))
    else:
        _show(found_on, findings, lacking)
    if lacking:
        raise typer.Exit(1)


def _show(platform: str, findings: list[Finding], lacking: list[Finding]) -> None:
    console = Console() if Console().is_terminal else Console(width=160)
    table = Table(title=f"flexfloor on {platform}")
    for name in ("area", "what", "state", "found", "to do"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        mark = MARKS[finding.state]
        table.add_row(finding.area, finding.name, mark, _plain(finding.found), _plain(finding.remedy))
    console.print(table)
    if lacking:
        names = ", ".join(f"{finding.area}: {finding.name}" for finding in lacking)
        console.print(f"missing: {names}", markup=False)
    else:
        console.print("ready: all that is required is there", markup=False)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
