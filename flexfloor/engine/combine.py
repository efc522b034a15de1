"""The EP-invariant combine (verification mode).

vLLM adds the ranks' partial expert outputs in the model's dtype, in an order that depends on
the EP size, so that a token's output changes in the last bits when the world shrinks. Here
the experts return one row a top-k slot: only one rank contributes to a slot, so its sum over
ranks is exact, and the slots are then added in float32 in their own order, at every EP size.
It costs top-k times the combine traffic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flexfloor.engine import upstream

SumSlots = Callable[[torch.Tensor, torch.Tensor], None]


def sum_slots(output: torch.Tensor, slots: torch.Tensor) -> None:
    """Output [M, K] <- sum over topk of slots [M, topk * K], in float32, slot 0 first."""
    parts = slots.view(slots.shape[0], -1, output.shape[1]).float().unbind(1)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    output.copy_(total)


_sum_slots: SumSlots = sum_slots


def apply(total: SumSlots = sum_slots) -> None:
    """Patch dispatch/combine of this process; the experts must return [M, topk * K].

    Args:
        total: sums as :func:`sum_slots` does.
    """
    global _sum_slots
    _sum_slots = total
    upstream.check(upstream.COMBINE)
    from vllm.model_executor.layers.fused_moe.prepare_finalize.naive_dp_ep import (
        MoEPrepareAndFinalizeNaiveDPEPModular,
    )
    from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import MoEPrepareAndFinalizeNoDPEPModular

    upstream.replace(MoEPrepareAndFinalizeNaiveDPEPModular, "finalize", _finalize_group)
    upstream.replace(MoEPrepareAndFinalizeNoDPEPModular, "finalize", _finalize_alone)


def _finalize_group(
    self: Any,
    output: torch.Tensor,
    fused_expert_output: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    apply_router_weight_on_input: bool,
    weight_and_reduce_impl: Any,
) -> None:
    from vllm.distributed import get_ep_group

    _sum_slots(output, get_ep_group().combine(fused_expert_output, is_sequence_parallel=self.is_sequence_parallel))


def _finalize_alone(
    self: Any,
    output: torch.Tensor,
    fused_expert_output: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    apply_router_weight_on_input: bool,
    weight_and_reduce_impl: Any,
) -> None:
    _sum_slots(output, fused_expert_output)
