"""The EP-invariant combine (verification mode).

vLLM adds the ranks' partial expert outputs in the model's dtype, in an order that depends on
the EP size, so that a token's output changes in the last bits when the world shrinks. A device
replaces that by something that no grouping of the top-k slots into ranks can change: on CPU one
row a slot travels (only one rank contributes to a slot, so its sum over ranks is exact) and the
slots are added in float32 in their own order, at top-k times the traffic; CUDA sums exactly, see
:mod:`flexfloor.engine.devices.cuda_combine`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flexfloor.engine import upstream

Finish = Callable[[torch.Tensor, torch.Tensor], object]
Travelling = Callable[[torch.Tensor], torch.Tensor]


def sum_slots(output: torch.Tensor, slots: torch.Tensor) -> None:
    """Output [M, K] <- sum over topk of slots [M, topk * K], in float32, slot 0 first."""
    parts = slots.view(slots.shape[0], -1, output.shape[1]).float().unbind(1)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    output.copy_(total)


def _as_it_is(experts: torch.Tensor) -> torch.Tensor:
    return experts


_finish: Finish = sum_slots
_travelling: Travelling = _as_it_is


def apply(finish: Finish = sum_slots, travelling: Travelling = _as_it_is) -> None:
    """Patch dispatch/combine of this process.

    Args:
        finish: writes the layer's output [M, K] from what the combine has summed over the ranks.
        travelling: what the experts have returned, as it is summed over the ranks.
    """
    global _finish, _travelling
    _finish, _travelling = finish, travelling
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

    part = _travelling(fused_expert_output)
    _finish(output, get_ep_group().combine(part, is_sequence_parallel=self.is_sequence_parallel))


def _finalize_alone(
    self: Any,
    output: torch.Tensor,
    fused_expert_output: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    apply_router_weight_on_input: bool,
    weight_and_reduce_impl: Any,
) -> None:
    _finish(output, _travelling(fused_expert_output))
