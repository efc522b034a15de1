"""Writes the step times that the paper's setting is assumed to have, with a context axis.

    python tools/paper_step_times.py --out docs/results/paper-step-times.csv

Measured on two H200 are EP 1 and EP 2 at 256-token prompts. EP 4 to 16 are answered by the fitted size model (see
docs/simulate.md). What a longer context adds is not measured; it is taken as the KV cache of the batch read once a
step at 80 % of the memory bandwidth of the same device: 48 layers, 4 KV heads of 128, bf16, 4.8 TB/s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexfloor.simulate import h200_table
from flexfloor.step_times import Row, StepTimes

SIZES, BATCHES, EXPERTS = (1, 2, 4, 8, 16), (1, 8, 32, 64, 128, 256), 128
MEASURED_CONTEXT, LONG_CONTEXT = 256, 16640
KV_BYTES = 48 * 2 * 4 * 128 * 2
"""KV bytes of a token: layers, keys and values, heads, head size, bytes."""
BYTES_PER_S = 0.8 * 4.8e12


def main(out: Annotated[Path, typer.Option(help="Where the table goes.")]) -> None:
    """Write the table."""
    measured, rows = h200_table(), []
    for size in SIZES:
        curve = measured.curve(size, extrapolate=True, experts=EXPERTS)
        for batch in BATCHES:
            for context in (MEASURED_CONTEXT, LONG_CONTEXT):
                reading = batch * (context - MEASURED_CONTEXT) * KV_BYTES / BYTES_PER_S
                rows.append(Row(size, batch, curve.seconds(batch) + reading, context=float(context)))
        if measured.source(size) == "measured":
            rows += [
                row._replace(context=float(MEASURED_CONTEXT)) for row in measured.rows if row.idle and row.ep == size
            ]
    told = [
        "EP 1 and EP 2 at context 256: measured on 2 x H200, Qwen3-30B-A3B shape",
        "EP 4 to 16: EXTRAPOLATED by the size model; context 16,640: ASSUMED, KV read once at 80 % of 4.8 TB/s",
        "written by tools/paper_step_times.py",
    ]
    StepTimes(rows).save(out, told)


if __name__ == "__main__":
    typer.run(main)
