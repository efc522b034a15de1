"""``flexfloor report``: what a run generated, and with how much of its ranks' time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flexfloor.errors import InputError
from flexfloor.ledger.report import report_json
from flexfloor.ledger.run import load_run
from flexfloor.ledger.table import report_table

app = typer.Typer(add_completion=False)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run: events*.jsonl or events/*.jsonl lie in it.")],
    baseline: Annotated[Path | None, typer.Option(help="Folder of the run to compare with.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page to this file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome/Perfetto trace to this file.")] = None,
    note: Annotated[list[str] | None, typer.Option(help="A line to print under the table; may be repeated.")] = None,
) -> None:
    """Report throughput, occupied rank-time and efficiency of RUN_DIR, with the bounds that its clocks leave.

    Checks of the log that fail are listed as problems and do not change the exit code.
    """
    run = load_run(run_dir)
    beside = load_run(baseline) if baseline else None
    notes = note or []
    try:
        if html:
            from flexfloor.ledger.html import write_html

            write_html(run, html, baseline=beside, notes=notes)
        if trace:
            from flexfloor.ledger.trace import write_trace

            write_trace(run, trace)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", file=error.filename or html or trace) from None
    if as_json:
        typer.echo(json.dumps(report_json(run, beside), indent=2, allow_nan=False))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(report_table(run, beside, notes))
    for path in (html, trace):
        if path:
            console.print(f"Wrote {path}", markup=False)
