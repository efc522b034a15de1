"""Train the small Qwen3-MoE checkpoint of the quickstart on CPU, or draw prompts for it.

- ``python tools/make_checkpoint.py --out DIR`` trains, measures and saves; all defaults give the shipped one
- ``... --out DIR --steps N`` with a smaller N gives one that is often wrong, to start RL from
- ``... --prompts FILE --count 32`` draws prompts and writes answers.jsonl beside them
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from checkpoint.prompts import draw_prompts, write_prompts
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from flexfloor.errors import InputError

if TYPE_CHECKING:
    from checkpoint.measurement import Accuracy

STEPS = 900
MEASURED_PROMPTS = 192

console = Console()


def run(
    out: Annotated[Path | None, typer.Option(help="Folder of the checkpoint to make.")] = None,
    steps: Annotated[int, typer.Option(help="Optimiser steps; fewer give a weaker model.")] = STEPS,
    seed: Annotated[int, typer.Option(help="Seed of weights and data, or of the prompts.")] = 0,
    threads: Annotated[int, typer.Option(help="Threads of torch; the weights depend on it.")] = 1,
    measured: Annotated[int, typer.Option(help="Held-out prompts to measure with.")] = MEASURED_PROMPTS,
    prompts: Annotated[Path | None, typer.Option(help="Write prompts to this file.")] = None,
    count: Annotated[int, typer.Option(help="How many prompts to write.")] = 32,
) -> None:
    """Train and save a checkpoint (--out), draw prompts (--prompts), or both."""
    if out is None and prompts is None:
        raise InputError("nothing to do; give --out DIR, --prompts FILE or both")
    for name, value in (("--steps", steps), ("--threads", threads), ("--measured", measured)):
        if value < 1:
            raise InputError(f"must be 1 or more, not {value}", field=name)
    if prompts is not None:
        _make_prompts(prompts, count, seed)
    if out is not None:
        if out.exists() and not out.is_dir():
            raise InputError("is a file; give a folder", file=out, field="--out")
        _make_checkpoint(out, steps=steps, seed=seed, threads=threads, measured=measured)


def _make_prompts(file: Path, count: int, seed: int) -> None:
    try:
        asked = draw_prompts(count, seed)
        answers = write_prompts(file, asked)
    except ValueError as error:
        raise InputError(str(error), field="--count") from error
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", file=file, field="--prompts") from error
    lengths = sorted(question.answer_tokens for question in asked)
    console.print(
        f"{count} prompts in {file}, right answers in {answers}: {lengths[0]} to {lengths[-1]} tokens, "
        f"median {lengths[len(lengths) // 2]}, mean {sum(lengths) / len(lengths):.1f}",
        soft_wrap=True,
    )


def _make_checkpoint(out: Path, *, steps: int, seed: int, threads: int, measured: int) -> None:
    import torch
    from checkpoint import measurement, saving, training
    from checkpoint.model import build_model
    from checkpoint.tokenizer import build_tokenizer

    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed)
    started = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("training", total=steps)
        for state in training.train(model, tokenizer, steps=steps, seed=seed):
            bar.update(task, completed=state.step, description=f"training, loss {state.loss:.3f}")
            if not console.is_terminal and state.step % max(1, steps // 10) == 0:
                print(f"step {state.step} of {steps}, loss {state.loss:.3f}", flush=True)
        seconds = time.monotonic() - started
        model = model.to(torch.bfloat16)
        saving.save_model(out, model, tokenizer)
        asked = measurement.held_out(measured, seed)
        task = bar.add_task("measuring", total=3)
        accuracy: dict[str, Accuracy] = {}
        for way, chat, sample in (("greedy", False, False), ("chat greedy", True, False), ("sampled", False, True)):
            torch.manual_seed(seed)
            answers = measurement.generate(model, tokenizer, asked, chat=chat, sample=sample)
            accuracy[way] = measurement.accuracy(asked, answers)
            bar.advance(task)
    shares = measurement.expert_shares(model, tokenizer, asked[::3])
    how = saving.Training(seed=seed, steps=steps, threads=threads, seconds=round(seconds, 1))
    record = saving.save_record(out, how, accuracy, shares)
    console.print(_accuracy_table(accuracy), _balance_table(shares))
    console.print(f"trained for {seconds:.0f} s; digest {saving.digest(out)[:16]}; record in {record}", soft_wrap=True)


def _accuracy_table(accuracy: dict[str, Accuracy]) -> Table:
    table = Table(
        "decoding", "prompts", "right", "ended", "exact length", "mean gap (tokens)", title="Held-out prompts"
    )
    for way, result in accuracy.items():
        shares = (f"{share:.1%}" for share in (result.right, result.ended, result.exact_length))
        table.add_row(way, str(result.prompts), *shares, f"{result.mean_gap:.2f}")
    return table


def _balance_table(shares: list[list[float]]) -> Table:
    experts = len(shares[0])
    table = Table("layer", "least", "most", title=f"Load of an expert (even: {1 / experts:.1%})")
    for layer, loads in enumerate(shares):
        table.add_row(str(layer), f"{min(loads):.1%}", f"{max(loads):.1%}")
    return table


if __name__ == "__main__":
    try:
        typer.run(run)
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
