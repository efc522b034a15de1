"""The EP-invariant combine for vLLM's Triton experts: one row a top-k slot, summed by one kernel.

The second matrix product already leaves one row a slot, zero where the expert is not local; stock
vLLM adds the slots before the ranks' sums are combined. Here they travel apart (see
:mod:`flexfloor.engine.combine`) and one kernel adds them in float32, slot 0 first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from flexfloor.engine import combine, upstream

BLOCK = 1024


def apply() -> None:
    """Patch this process."""
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    shapes = TritonExperts.workspace_shapes

    def workspace_shapes(self: Any, M: int, N: int, K: int, topk: int, *args: Any, **kwargs: Any) -> Any:  # noqa: N803
        first, second, _ = shapes(self, M, N, K, topk, *args, **kwargs)
        return first, second, (M, topk * K)

    def moe_sum(self: Any, input: torch.Tensor, output: torch.Tensor) -> None:  # noqa: A002
        output.view(input.shape).copy_(input)

    upstream.replace(TritonExperts, "workspace_shapes", workspace_shapes)
    upstream.replace(TritonExperts, "moe_sum", moe_sum)
    combine.apply(sum_slots)


def sum_slots(output: torch.Tensor, slots: torch.Tensor) -> None:
    """Output [M, K] <- sum over topk of slots [M, topk * K], in float32, slot 0 first."""
    rows, width = output.shape
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        _sum_slots[grid](output, slots, width, slots.shape[1] // width, output.stride(0), slots.stride(0), BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_slots(  # type: ignore[no-untyped-def]  # noqa: ANN202
    output,  # noqa: ANN001
    slots,  # noqa: ANN001
    width,  # noqa: ANN001
    topk: tl.constexpr,
    out_stride,  # noqa: ANN001
    slot_stride,  # noqa: ANN001
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    total = tl.zeros((block,), dtype=tl.float32)
    for slot in tl.static_range(topk):
        total += tl.load(slots + row * slot_stride + slot * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * out_stride + column, total.to(output.dtype.element_ty), mask=inside)
