"""`flexfloor plan`: lengths.jsonl and flexfloor.yaml in, plan.json out (planner.md section 7)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from flexfloor.config import load_config
from flexfloor.errors import InputError
from flexfloor.history import LengthHistory, read_lengths, replay
from flexfloor.plan import EpochPlan
from flexfloor.planner import plan_epoch

app = typer.Typer(add_completion=False)


@app.command()
def plan(
    lengths: Annotated[Path, typer.Option(help="lengths.jsonl: one line an item and epoch.")],
    config: Annotated[Path, typer.Option(help="YAML file with a `flexfloor:` section.")],
    out: Annotated[Path, typer.Option(help="Where to write plan.json.")],
    items: Annotated[
        Path | None, typer.Option(help="Item ids of the epoch, one a line, repeats allowed; all items without it.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no table.")] = False,
) -> None:
    """Plan an epoch from a length history."""
    settings = load_config(config)
    history = replay(read_lengths(lengths), settings.alpha)
    chosen = read_items(items) if items is not None else None
    made = plan_epoch(settings, history, chosen)
    made.save(out)
    _warn(chosen, history)
    if not quiet:
        Console().print(summary(made))


def read_items(path: str | Path) -> list[str]:
    """Item ids of a file, one a line; blank lines are skipped.

    Raises:
        InputError: the file is missing, not text, or holds no id.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(f"cannot be read ({reason}); name a file with one item id a line", file=path) from error
    ids = [line.strip() for line in text.split("\n") if line.strip()]
    if not ids:
        raise InputError("is empty; give it one item id a line", file=path)
    return ids


def _warn(chosen: list[str] | None, history: LengthHistory) -> None:
    unseen = [item for item in dict.fromkeys(chosen or []) if item not in history.items]
    if unseen:
        text = f"note: {len(unseen)} items have no history, the first is {unseen[0]!r}"
        Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


def summary(made: EpochPlan) -> Table:
    """The steps of a plan as a table."""
    table = Table(title=f"epoch {made.epoch}, method {made.method}, {made.world_size} ranks")
    for name in ("step", "prompts", "cap", "tail", "ladder", "quorum times", "release area", "gap", "KV safe"):
        table.add_column(name, justify="right")
    for step in made.steps:
        table.add_row(
            str(step.step),
            str(len(step.items)),
            "-" if step.cap is None else str(step.cap),
            f"{step.tail:g}",
            " > ".join(map(str, step.ladder)),
            ", ".join(f"{time:g}" for time in step.quorum_times) or "-",
            f"{step.release_area:g}",
            f"{step.optimality_gap:.2%}",
            "yes" if step.kv_safe else "no",
        )
    return table
