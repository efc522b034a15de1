"""What vLLM 0.30 on CPU lacks for data-parallel expert parallelism.

* ``CpuCommunicator.all_gatherv`` and ``reduce_scatterv`` raise NotImplementedError; dispatch
  and combine need them.
* ``CPUUnquantizedExperts.apply`` ignores ``expert_map`` and reads out of range. Here only the
  (token, slot) pairs whose expert is local are computed, so no other row is ever read.
* In verification mode (``invariant``) the experts return one row a top-k slot; the combine
  then has one non-zero contributor a slot and is exact (see :mod:`flexfloor.engine.combine`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from flexfloor.engine import combine as combine_mode
from flexfloor.engine import upstream


def apply(combine: str) -> None:
    """Patch this process; ``combine`` is ``stock`` or ``invariant``."""
    upstream.check(upstream.CPU)
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    upstream.replace(CpuCommunicator, "all_gatherv", _all_gatherv)
    upstream.replace(CpuCommunicator, "reduce_scatterv", _reduce_scatterv)
    experts = _invariant_experts if combine == "invariant" else _local_experts
    upstream.replace(CPUUnquantizedExperts, "apply", experts)
    if combine == "invariant":
        upstream.replace(CPUUnquantizedExperts, "workspace_shapes", _slot_shapes)
        combine_mode.apply()


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Concatenate along dim 0 over the group; ``sizes`` are rows a rank. A list is sent as one message."""
    if dim != 0:
        raise NotImplementedError("all_gatherv on CPU gathers along dim 0")
    tensors = input_ if isinstance(input_, list) else [input_]
    rows = [tensors[0].shape[0]] * self.world_size if sizes is None else sizes
    flat = [t.contiguous().reshape(t.shape[0], -1).view(torch.uint8) for t in tensors]
    widths = [t.shape[1] for t in flat]
    packed = torch.cat(flat, dim=1) if len(flat) > 1 else flat[0]
    longest = max(rows)
    if packed.shape[0] < longest:
        packed = torch.cat([packed, packed.new_zeros(longest - packed.shape[0], packed.shape[1])])
    gathered = packed.new_empty(self.world_size * longest, packed.shape[1])
    dist.all_gather_into_tensor(gathered, packed.contiguous(), group=self.device_group)
    kept = torch.cat([part[:n] for part, n in zip(gathered.split(longest), rows, strict=True)])
    parts = [
        part.contiguous().view(tensor.dtype).reshape(-1, *tensor.shape[1:])
        for part, tensor in zip(kept.split(widths, dim=1), tensors, strict=True)
    ]
    return parts if isinstance(input_, list) else parts[0]


def _reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """Sum over the group; this rank keeps its ``sizes`` rows of dim 0."""
    if dim not in (0, -1) or (dim == -1 and input_.dim() != 1):
        raise NotImplementedError("reduce_scatterv on CPU scatters along dim 0")
    rows = [input_.shape[0] // self.world_size] * self.world_size if sizes is None else sizes
    total = input_.clone()
    dist.all_reduce(total, group=self.device_group)
    start = sum(rows[: self.rank_in_group])
    return total[start : start + rows[self.rank_in_group]].contiguous()


def _pairs(
    experts: Any,
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: Any,
    expert_map: torch.Tensor | None,
    skip_weighted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs [P, K] of the local (token, slot) pairs, with their token [P] and slot [P] indices."""
    from vllm._custom_ops import cpu_fused_moe

    rows = ids if expert_map is None else expert_map[ids.long()]
    token, slot = (rows >= 0).nonzero(as_tuple=True)
    out = hidden.new_empty(token.shape[0], hidden.shape[1])
    if token.shape[0]:
        cpu_fused_moe(
            out,
            hidden[token],
            w1,
            w2,
            experts.w1_bias,
            experts.w2_bias,
            weights[token, slot].unsqueeze(1).contiguous(),
            rows[token, slot].unsqueeze(1).to(ids.dtype).contiguous(),
            activation.value,
            experts.isa,
            skip_weighted,
        )
    return out, token, slot


def _local_experts(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    a1q_scale: torch.Tensor | None,
    a2_scale: torch.Tensor | None,
    workspace13: torch.Tensor,
    workspace2: torch.Tensor,
    expert_tokens_meta: Any,
    apply_router_weight_on_input: bool,
) -> None:
    """Partial sums over local experts, [M, K]; the stock combine adds them in the model's dtype."""
    out, token, _ = _pairs(
        self, hidden_states, w1, w2, topk_weights, topk_ids, activation, expert_map, apply_router_weight_on_input
    )
    total = torch.zeros(output.shape, dtype=torch.float32).index_add_(0, token, out.float())
    output.copy_(total)


def _invariant_experts(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    a1q_scale: torch.Tensor | None,
    a2_scale: torch.Tensor | None,
    workspace13: torch.Tensor,
    workspace2: torch.Tensor,
    expert_tokens_meta: Any,
    apply_router_weight_on_input: bool,
) -> None:
    """One row a slot, [M, topk * K]; zero where the expert is not local."""
    out, token, slot = _pairs(
        self, hidden_states, w1, w2, topk_weights, topk_ids, activation, expert_map, apply_router_weight_on_input
    )
    output.zero_()
    output.view(topk_ids.shape[0], topk_ids.shape[1], -1)[token, slot] = out


def _slot_shapes(self: Any, M: int, N: int, K: int, topk: int, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:  # noqa: N803
    """Output [M, topk * K]; no workspace."""
    return (0,), (0,), (M, topk * K)
