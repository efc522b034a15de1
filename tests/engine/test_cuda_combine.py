"""The exact sums of CUDA's invariant combine, its kernel interpreted on the host (tests/gpu runs it compiled)."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton, whose interpreter runs the kernel, is not installed")

SCRIPT = """
import itertools
import torch
from flexfloor.engine.devices.cuda_combine import sum_slots

generator = torch.Generator().manual_seed(1)
rows, topk, width = 3, 4, 70
slots = torch.randn(rows, topk, width, generator=generator) * torch.logspace(-9, 3, width)
slots = slots.bfloat16()

def summed(mine):
    sums = torch.empty(rows, width, dtype=torch.float64)
    sum_slots(sums, torch.where(torch.tensor(mine)[:, None], slots, 0))
    return sums

whole = summed([True] * topk)
assert torch.equal(whole, slots.double().mul(2.0**36).round().mul(2.0**-36).sum(1))
plain, other = slots.float().sum(1).bfloat16(), 0
for owners in itertools.product((0, 1), repeat=topk):
    parts = [summed([owner == rank for owner in owners]) for rank in (0, 1)]
    assert torch.equal(parts[0] + parts[1], whole)
    stock = [torch.stack([slots[:, i] for i in range(topk) if owners[i] == r]).float().sum(0).bfloat16()
             for r in (0, 1) if r in owners]
    other += int((sum(stock) != plain).sum())
assert other, "the model's own dtype gives equal sums too: the case shows nothing"

slots[1, 2, 5] = float("nan")
assert summed([True] * topk).isnan().nonzero().tolist() == [[1, 5]]
print("exact")
"""


def test_every_grouping_of_slots_into_ranks_gives_the_same_sum():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "exact"
