"""Expert rows, tables and dispatch on Ascend: what of vllm-ascend knows the world.

There are no redundant experts. At a world of W each member exposes exactly E/W rows, and expert ids become physical
ids, rank in the world x E/W + row: `log2phy` maps what the router picked, and the expert map is indexed by physical
ids (contract: allgather-map-after-log2phy). Both tables are installed in every layer when the weights are loaded, so
that the first graphs are captured with them, and are only ever written in place.

Grouped matmul wants as many weights as groups (unproven: grouped-matmul-rows), so the parameter of a layer shows the
active rows and the whole tensor, spare rows included, is kept beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexfloor.engine import upstream
from flexfloor.engine.coordinators import Group, coordinator_fields
from flexfloor.engine.devices import ascend_limits
from flexfloor.engine.experts import ROW_PARAMETERS
from flexfloor.engine.wiring import Wiring
from flexfloor.errors import ProtocolError, RefusedError

STORED = "flexfloor_rows"
FORMAT_ND = 2
_patched = False


def patch() -> None:
    """Keep spare rows beside the parameters and install the tables when weights are loaded.

    vLLM's own method creates the weights, before vllm-ascend puts its method in place; only then are vllm-ascend's
    classes loaded, and only in workers (unproven: plugin-before-worker-patches).
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    create = UnquantizedFusedMoEMethod.create_weights

    def create_weights(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        create(self, layer, *args, **kwargs)
        _patch_processing()

    upstream.replace(UnquantizedFusedMoEMethod, "create_weights", create_weights)


def _patch_processing() -> None:
    global _patched
    if _patched:
        return
    _patched = True
    from vllm_ascend.ops.fused_moe.routed_experts import AscendUnquantizedFusedMoEMethod as Method

    process = Method.process_weights_after_loading

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        process(self, layer)
        expose(layer)

    upstream.replace(Method, "process_weights_after_loading", process_weights_after_loading)


def expose(layer: Any) -> None:
    """Show a layer's active rows only. The first call keeps the whole tensors and installs the tables.

    Args:
        layer: AscendRoutedExperts, its weights processed.
    """
    if STORED not in layer.__dict__:
        whole = [getattr(layer, name).data for name in ROW_PARAMETERS]
        for name, tensor in zip(ROW_PARAMETERS, whole, strict=True):
            _refuse_layout(name, tensor)
        layer.__dict__[STORED] = whole
        install_tables(layer, whole[0].device)
    narrow(layer, [getattr(layer, name).data for name in ROW_PARAMETERS], layer.moe_config.num_local_experts)


def narrow(layer: Any, tensors: Sequence[torch.Tensor], rows: int) -> None:
    """Point the parameters of a layer at the first ``rows`` rows of ``tensors``."""
    for name, tensor in zip(ROW_PARAMETERS, tensors, strict=True):
        getattr(layer, name).data = tensor[:rows]


def _refuse_layout(name: str, tensor: torch.Tensor) -> None:
    import torch_npu

    layout = int(torch_npu.get_npu_format(tensor))
    if layout != FORMAT_ND or not tensor.is_contiguous():
        raise RefusedError(
            f"{name} lies in format {layout}, not in contiguous ND", remedy="set weight_nz_mode: 0, enable_fused_mc2: 0"
        )


def install_tables(layer: Any, device: torch.device) -> None:
    """Give a layer the two tables of the full world, where physical and logical ids are the same."""
    experts = int(layer.moe_config.num_experts)
    there = layer.ascend_expert_map
    if there is None or there.numel() != experts or layer.log2phy is not None or there.device != device:
        raise RefusedError(
            "the layer's expert map is not the plain one", remedy="remove eplb_config and expert_map_path"
        )
    layer.log2phy = torch.arange(experts, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Tables:
    """The two tables of one rank in one world (host tensors, int32, [E]).

    Attributes:
        row_of: physical id -> row on this rank, -1 elsewhere.
        log2phy: logical id -> physical id.
        rows: active rows E/W of every member.
    """

    row_of: torch.Tensor
    log2phy: torch.Tensor
    rows: int

    @classmethod
    def of(cls, maps: Mapping[int, Sequence[int]], ranks: Sequence[int], rank: int) -> Tables:
        """From the rows of every expert on every member.

        Raises:
            ProtocolError: the rows are not 0 .. E/W - 1 on each member, each expert on one.
        """
        experts, size = len(maps[ranks[0]]), len(ranks)
        rows = experts // size
        log2phy = torch.full((experts,), -1, dtype=torch.int32)
        for place, member in enumerate(ranks):
            own = {expert: row for expert, row in enumerate(maps[member]) if row >= 0}
            if sorted(own.values()) != list(range(rows)):
                raise ProtocolError(f"rank {member} has the active rows {sorted(own.values())}, not 0 to {rows - 1}")
            for expert, row in own.items():
                log2phy[expert] = place * rows + row
        if sorted(log2phy.tolist()) != list(range(experts)):
            raise ProtocolError("an expert is active on two members or on none")
        row_of = torch.full((experts,), -1, dtype=torch.int32)
        first = list(ranks).index(rank) * rows
        row_of[first : first + rows] = torch.arange(rows, dtype=torch.int32)
        return cls(row_of, log2phy, rows)


class AscendWiring(Wiring):
    """The wiring of an NPUWorker; see :class:`flexfloor.engine.wiring.Wiring`."""

    def coordinators(self) -> tuple[Any, ...]:
        """DP, EP and MC2; vllm-ascend caches these objects, so they stay and change in place."""
        from vllm.distributed import get_dp_group, get_ep_group
        from vllm_ascend.distributed.parallel_state import get_mc2_group

        return get_dp_group(), get_ep_group(), get_mc2_group()

    def world_fields(self, group: Group, rank: int) -> tuple[dict[str, Any], ...]:
        """Each coordinator gets its own device group."""
        found = []
        for kind in ("dp", "ep", "mc2"):
            part = group.parts[kind]
            found.append({**coordinator_fields(group, rank, part.communicator), "device_group": part.device})
        return tuple(found)

    def set_dp(self, size: int, rank: int) -> None:
        """The runner caches both (contract: runner-caches-dp); DP metadata is built from them."""
        super().set_dp(size, rank)
        self.runner.dp_size, self.runner.dp_rank = size, rank

    def first_tables(self) -> Tables:
        """Expert e on rank e / (E/N)."""
        config = self.config.parallel_config
        size, experts = config.data_parallel_size, self.experts.experts
        rows = experts // size
        maps = {rank: [e - rank * rows if e // rows == rank else -1 for e in range(experts)] for rank in range(size)}
        return Tables.of(maps, range(size), config.data_parallel_rank)

    def world_tables(self, maps: Mapping[int, Sequence[int]], ranks: Sequence[int], rank: int) -> Tables:
        """See :class:`Tables`."""
        return Tables.of(maps, ranks, rank)

    def set_tables(self, tables: Tables) -> None:
        """Write both tables of every layer in place and show E/W rows; nothing is written while asleep."""
        self.tables = tables
        for layer in self.experts.layers:
            experts = layer.routed_experts
            if not self.asleep():
                experts.ascend_expert_map.copy_(tables.row_of)
                experts.log2phy.copy_(tables.log2phy)
            narrow(experts, experts.__dict__[STORED], tables.rows)
            experts.local_num_experts = tables.rows
            experts.expert_map_manager._local_num_experts = tables.rows
            layer.moe_config.num_local_experts = tables.rows

    def sharers(self, layer: Any) -> tuple[Any, ...]:
        """There is no modular kernel here."""
        return layer.routed_experts.moe_config, layer._quant_method.moe

    def kernels(self) -> dict[Any, Any]:
        """The communication methods by key."""
        from vllm_ascend.ops.fused_moe.moe_comm_method import _MoECommMethods

        return dict(_MoECommMethods)

    def put_kernels(self, parallel: Any, kernels: dict[Any, Any]) -> None:
        """Use the methods of an earlier world again; their own table may have been lost in sleep."""
        from vllm_ascend.ops.fused_moe.moe_comm_method import _MoECommMethods

        for layer in self.experts.layers:
            self.set_parallel(layer, parallel)
        _MoECommMethods.clear()
        _MoECommMethods.update(kernels)
        if not self.asleep():
            self._rewrite_dispatchers()

    def rebuild(self, size: int) -> None:
        """Clear the methods, build those of the new world, and look at what they hold.

        Dispatchers freeze world, rank and communicator name when they are made, and vllm-ascend's refresh renews the
        name alone (contract: mc2-refresh-name-only), so they are made anew.
        """
        from vllm.config import set_current_vllm_config
        from vllm_ascend.ops.fused_moe.moe_comm_method import _MoECommMethods, setup_moe_comm_method

        layers = {}
        with set_current_vllm_config(self.config):
            for layer in self.experts.layers:
                self.set_parallel(layer, self.parallel_of(layer, size))
                layers[layer.moe_config.num_experts] = layer
            _MoECommMethods.clear()
            for layer in layers.values():
                setup_moe_comm_method(layer.moe_config)
            _, ep, mc2 = self.coordinators()
            for method in _MoECommMethods.values():
                _check_dispatcher(method.token_dispatcher, size, mc2.rank_in_group, ep.rank_in_group, self.tables.rows)
            ascend_limits.check_selection(self.config, size, self.experts.experts)

    def woken(self) -> None:
        """Every table that load made without saving it: expert maps, log2phy, the dispatchers' expert ids."""
        super().woken()
        self._rewrite_dispatchers()

    def refilled(self) -> None:
        """The router's float32 weights are derived from weights that have just come back."""
        for layer in self.experts.layers:
            derived = getattr(layer.gate, "weight_fp32", None)
            if derived is not None:
                derived.data.copy_(layer.gate.weight.data)

    def _rewrite_dispatchers(self) -> None:
        for method in self.kernels().values():
            dispatcher = method.token_dispatcher
            ids = getattr(dispatcher, "expert_ids_per_ep_rank", None)
            if ids is not None:
                ids.copy_(torch.arange(dispatcher.num_experts, dtype=torch.int32) % dispatcher.num_local_experts)


def _check_dispatcher(dispatcher: Any, size: int, mc2_rank: int, ep_rank: int, rows: int) -> None:
    """Raise ProtocolError where a new dispatcher holds another world than this one."""
    wanted = {
        "ep_world_size": size,
        "ep_rank_id": mc2_rank,
        "num_experts_local": rows,
        "num_local_experts": rows,
        "local_expert_indices": [ep_rank * rows + row for row in range(rows)],
    }
    for name, value in wanted.items():
        if hasattr(dispatcher, name) and getattr(dispatcher, name) != value:
            raise ProtocolError(f"{type(dispatcher).__name__}.{name} is {getattr(dispatcher, name)}, not {value}")
