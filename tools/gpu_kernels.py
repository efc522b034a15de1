"""Whether the bits of a token's row depend on the batch that it is in, kernel by kernel, and what each takes; one GPU.

    experts   vLLM's Triton experts: tiles that it picks for each batch, those of its batch-invariant mode, others
    dense     torch's linear (cuBLAS), and the one of that mode

Rows are compared with those of a batch of 64; "differ" counts the values that are not the same bit for bit.

Usage: python tools/gpu_kernels.py --json kernels.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu.bench import versions
from rich.console import Console
from rich.table import Table

EXPERTS = {
    "a3b, EP2": (64, 2048, 768, 8),
    "a3b, EP1": (128, 2048, 768, 8),
    "small": (32, 1024, 512, 8),
    "quickstart": (16, 128, 64, 4),
}
"""Rows of experts, hidden size, inner size, experts a token."""
DENSE = (
    (2048, 5120),
    (4096, 2048),
    (2048, 128),
    (2048, 151936),
    (2048, 32000),
    (1024, 1536),
    (1024, 32000),
    (128, 632),
)
"""Inputs and outputs of dense layers of these shapes."""
EXPERT_BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 512)
DENSE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
TIMED = (16, 32, 64, 128)
REFERENCE = 64


def tile(m: int, n: int, k: int, warps: int, stages: int) -> dict[str, int]:
    """A tiling of the fused experts' kernel."""
    sizes = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": 1, "SPLIT_K": 1}
    return {**sizes, "num_warps": warps, "num_stages": stages}


TILES: dict[str, dict[str, int] | None] = {
    "picked": None,
    "batch-invariant": {
        "BLOCK_SIZE_M": 64,
        "BLOCK_SIZE_N": 64,
        "BLOCK_SIZE_K": 32,
        "GROUP_SIZE_M": 8,
        "SPLIT_K": 1,
    },
    "16x64x64": tile(16, 64, 64, 4, 4),
    "16x64x128": tile(16, 64, 128, 4, 4),
    "32x64x64": tile(32, 64, 64, 4, 3),
    "64x128x64": tile(64, 128, 64, 4, 3),
    "128x128x64": tile(128, 128, 64, 8, 3),
    "64x64x128": tile(64, 64, 128, 4, 3),
}


def timed_us(call: Callable[[], Any]) -> float:
    """Microseconds of a call within a captured graph."""
    from triton.testing import do_bench_cudagraph

    return round(1e3 * float(do_bench_cudagraph(call)), 1)


def experts(rows: int, hidden: int, inner: int, topk: int) -> dict[int, dict[str, Any]]:
    """Batch -> tiling -> what differs, and what a layer takes."""
    import torch
    from vllm.model_executor.layers.fused_moe import fused_experts, override_config

    generator = torch.Generator("cuda").manual_seed(1)

    def drawn(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", generator=generator)

    most = max(EXPERT_BATCHES)
    tokens = drawn(most, hidden).bfloat16()
    up, down = (drawn(rows, 2 * inner, hidden) * 0.02).bfloat16(), (drawn(rows, hidden, inner) * 0.02).bfloat16()
    chosen, weights = drawn(most, rows).topk(topk).indices.int(), drawn(most, topk).sigmoid()

    def run(batch: int, config: dict[str, int] | None) -> Any:
        with override_config(config):
            return fused_experts(tokens[:batch], up, down, weights[:batch], chosen[:batch])

    reference = run(REFERENCE, None)
    found: dict[int, dict[str, Any]] = {}
    for batch in EXPERT_BATCHES:
        found[batch] = {}
        common = min(batch, REFERENCE)
        for name, config in TILES.items():
            row = {"differ": int((run(batch, config)[:common] != reference[:common]).sum())}
            if batch in TIMED:
                row["us"] = timed_us(lambda config=config, batch=batch: run(batch, config))  # type: ignore[misc]
            found[batch][name] = row
    return found


def dense(inputs: int, outputs: int) -> dict[int, dict[str, Any]]:
    """Batch -> layer -> what differs, and what it takes."""
    import torch
    from vllm.model_executor.determinism.batch_invariant import linear_batch_invariant

    generator = torch.Generator("cuda").manual_seed(2)
    tokens = torch.randn(max(DENSE_BATCHES), inputs, device="cuda", generator=generator).bfloat16()
    weight = (torch.randn(outputs, inputs, device="cuda", generator=generator) * 0.02).bfloat16()
    layers = {"picked": torch.nn.functional.linear, "batch-invariant": linear_batch_invariant}
    found: dict[int, dict[str, Any]] = {batch: {} for batch in DENSE_BATCHES}
    for name, layer in layers.items():
        reference = layer(tokens[:REFERENCE], weight)
        for batch in DENSE_BATCHES:
            common = min(batch, REFERENCE)
            row = {"differ": int((layer(tokens[:batch], weight)[:common] != reference[:common]).sum())}
            if batch in TIMED:
                row["us"] = timed_us(lambda layer=layer, batch=batch: layer(tokens[:batch], weight))  # type: ignore[misc]
            found[batch][name] = row
    return found


def show(result: dict[str, Any]) -> None:
    """What differs, and the time at a batch of 64."""
    table = Table("kernel", "shape", "variant", "batches that differ", f"us at {REFERENCE}")
    for kernel in ("experts", "dense"):
        for shape, batches in result[kernel].items():
            for name in batches[REFERENCE]:
                differ = [str(batch) for batch, row in batches.items() if row[name]["differ"]]
                table.add_row(kernel, shape, name, ", ".join(differ) or "-", str(batches[REFERENCE][name]["us"]))
    Console(width=120).print(table)


def main() -> None:
    """Compare, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    result: dict[str, Any] = {"versions": versions()}
    result["experts"] = {name: experts(*shape) for name, shape in EXPERTS.items()}
    result["dense"] = {f"{inputs} x {outputs}": dense(inputs, outputs) for inputs, outputs in DENSE}
    options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    show(result)


if __name__ == "__main__":
    main()
