"""The EP-invariant combine for vLLM's Triton experts: partial sums that are exact, so that no order can change them.

The second matrix product leaves one row a top-k slot, zero where the expert is not local. Stock vLLM adds a rank's
slots and then the ranks' sums in the model's dtype, so a token's output depends on who holds which expert. Here a slot
is rounded to a multiple of 2**-36 and added in float64: as long as no sum reaches 2**16, nothing is rounded any more,
and the sum is the same for every grouping of slots into ranks. A bfloat16 value of at least 2**-29 is not changed by
the rounding. Four times the combine traffic of bfloat16, no kernel more than stock vLLM. NaN and infinity pass.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from flexfloor.engine import combine, upstream

BLOCK = 1024
SNAP = tl.constexpr(1.5 * 2.0**16)
"""Added and taken away again, it leaves a float64 below 2**15 rounded to a multiple of 2**-36."""


def apply() -> None:
    """Patch this process."""
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    shapes = TritonExperts.workspace_shapes

    def workspace_shapes(self: Any, M: int, N: int, K: int, topk: int, *args: Any, **kwargs: Any) -> Any:  # noqa: N803
        first, second, _ = shapes(self, M, N, K, topk, *args, **kwargs)
        return first, second, (M, K * torch.float64.itemsize // self.moe_config.in_dtype.itemsize)

    def moe_sum(self: Any, input: torch.Tensor, output: torch.Tensor) -> None:  # noqa: A002
        sum_slots(output.view(torch.float64), input)

    upstream.replace(TritonExperts, "workspace_shapes", workspace_shapes)
    upstream.replace(TritonExperts, "moe_sum", moe_sum)
    combine.apply(torch.Tensor.copy_, lambda sums: sums.view(torch.float64))


def sum_slots(sums: torch.Tensor, slots: torch.Tensor) -> None:
    """Sums [M, K] of float64 <- sum over topk of slots [M, topk, K]."""
    rows, topk, width = slots.shape
    if rows:
        _sum_slots[(rows, triton.cdiv(width, BLOCK))](sums, slots, width, topk, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_slots(  # type: ignore[no-untyped-def]  # noqa: ANN202
    sums,  # noqa: ANN001
    slots,  # noqa: ANN001
    width,  # noqa: ANN001
    topk: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    total = tl.zeros((block,), dtype=tl.float64)
    snap = tl.full((block,), SNAP, dtype=tl.float64)
    for slot in tl.static_range(topk):
        value = tl.load(slots + (row * topk + slot) * width + column, mask=inside, other=0.0).to(tl.float64)
        total += (value + snap) - snap
    tl.store(sums + row * width + column, total, mask=inside)
