"""What of vLLM's worker knows the world, besides scheduler and KV.

Coordinators, DP size and rank, expert maps, MoE configuration, dispatch and combine: all of it changes in
place, because vLLM and vllm-ascend cache these objects in many others. The stock wiring serves every device whose
experts run in vLLM's modular kernels; a device that wires its experts differently overrides parts of it.

Order of a switch (measured on vLLM 0.30): coordinators, DP size and rank, expert maps, MoE parallel
configuration, dispatch/combine objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexfloor.engine.coordinators import Group, coordinator_fields, fields_of, put
from flexfloor.engine.experts import ExpertRows
from flexfloor.errors import ProtocolError


@dataclass
class Wired:
    """The wiring as it stood at one moment.

    Attributes:
        coordinators: fields of each coordinator.
        size, rank: DP size and DP rank.
        tables: what :meth:`Wiring.set_tables` installed.
        parallel: the MoE parallel configuration.
        kernels: dispatch and combine objects.
    """

    coordinators: list[dict[str, Any]]
    size: int
    rank: int
    tables: Any
    parallel: Any
    kernels: Any


class Wiring:
    """The wiring of one worker.

    Args:
        worker: the vLLM worker.
        experts: its expert rows.
        asleep: whether its memory is given away now.
    """

    def __init__(self, worker: Any, experts: ExpertRows, asleep: Callable[[], bool]) -> None:
        self.worker, self.runner, self.config = worker, worker.model_runner, worker.vllm_config
        self.experts, self.asleep = experts, asleep
        self.tables: Any = self.first_tables()

    # -- moves -------------------------------------------------------------------------------

    def state(self) -> Wired:
        """The wiring now."""
        parallel = self.config.parallel_config
        return Wired(
            [fields_of(coordinator) for coordinator in self.coordinators()],
            parallel.data_parallel_size,
            parallel.data_parallel_rank,
            self.tables,
            self.experts.layers[0].moe_config.moe_parallel_config,
            self.kernels(),
        )

    def point(self, group: Group, maps: Mapping[int, Sequence[int]], rank: int) -> None:
        """Point this worker at the world of ``group``.

        Args:
            group: its process groups.
            maps: member -> row of every expert, -1 where it is not active.
            rank: this rank in the full world.
        """
        for coordinator, fields in zip(self.coordinators(), self.world_fields(group, rank), strict=True):
            put(coordinator, fields)
        self.set_dp(len(group.ranks), group.ranks.index(rank))
        self.set_tables(self.world_tables(maps, group.ranks, rank))
        self.rebuild(len(group.ranks))

    def put(self, wired: Wired) -> None:
        """Point this worker at a world that it has been in."""
        for coordinator, fields in zip(self.coordinators(), wired.coordinators, strict=True):
            put(coordinator, fields)
        self.set_dp(wired.size, wired.rank)
        self.set_tables(wired.tables)
        self.put_kernels(wired.parallel, wired.kernels)

    def woken(self) -> None:
        """Memory has come back with undefined contents: write every table again."""
        self.set_tables(self.tables)

    def refilled(self) -> None:
        """Weights have come back: derive again what was derived from them."""

    # -- parts -------------------------------------------------------------------------------

    def coordinators(self) -> tuple[Any, ...]:
        """The live coordinators that a switch changes."""
        from vllm.distributed import get_dp_group, get_ep_group

        return get_dp_group(), get_ep_group()

    def world_fields(self, group: Group, rank: int) -> tuple[dict[str, Any], ...]:
        """Fields of each of :meth:`coordinators` in the world of ``group``."""
        return (
            coordinator_fields(group, rank, group.dp_communicator),
            coordinator_fields(group, rank, group.communicator),
        )

    def set_dp(self, size: int, rank: int) -> None:
        """DP size and rank wherever the worker reads them."""
        for config in self.parallel_configs():
            config.data_parallel_size = size
            config.data_parallel_rank = rank

    def parallel_configs(self) -> list[Any]:
        """The parallel configuration that the worker reads: one object or copies of it."""
        owners: tuple[Any, ...] = (self.config, self.worker, self.runner, getattr(self.runner, "vllm_config", None))
        return list(
            {id(o.parallel_config): o.parallel_config for o in owners if hasattr(o, "parallel_config")}.values()
        )

    def first_tables(self) -> Any:
        """The tables that vLLM started with."""
        return self.experts.layers[0].routed_experts._expert_map.cpu().clone()

    def world_tables(self, maps: Mapping[int, Sequence[int]], ranks: Sequence[int], rank: int) -> Any:
        """The tables of a world: here the row of every expert on this rank (host tensor [E], -1 elsewhere)."""
        return torch.tensor(maps[rank], dtype=torch.int32)

    def set_tables(self, tables: Any) -> None:
        """Install the row of every expert in all layers, in place.

        A rank that sleeps has no memory to write to: it does so when it wakes.
        """
        self.tables = tables
        local = int((tables >= 0).sum())
        there = tables.to(self.experts.layers[0].routed_experts._expert_map.device)
        for layer in self.experts.layers:
            experts = layer.routed_experts
            if not self.asleep():
                experts._expert_map.copy_(there)
            experts.local_num_experts = local
            layer.moe_config.num_local_experts = local
            experts.expert_map_manager._expert_map = experts._expert_map
            experts.expert_map_manager._local_num_experts = local

    def kernels(self) -> Any:
        """Dispatch and combine objects now."""
        return [(impl.prepare_finalize, impl.moe_parallel_config, impl.is_dp_ep) for impl in self._implementations()]

    def put_kernels(self, parallel: Any, kernels: Any) -> None:
        """Use dispatch and combine objects of an earlier world again."""
        for layer, kernel in zip(self.experts.layers, kernels, strict=True):
            self.set_parallel(layer, parallel)
            impl = layer._quant_method.moe_kernel.impl
            impl.prepare_finalize, impl.moe_parallel_config, impl.is_dp_ep = kernel

    def rebuild(self, size: int) -> None:
        """Dispatch and combine of a world of ``size``."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize

        with set_current_vllm_config(self.config):
            for layer in self.experts.layers:
                parallel = self.parallel_of(layer, size)
                self.set_parallel(layer, parallel)
                method, impl = layer._quant_method, layer._quant_method.moe_kernel.impl
                impl.prepare_finalize = maybe_make_prepare_finalize(
                    layer.moe_config, method.moe_quant_config, None, allow_new_interface=True
                )
                impl.moe_parallel_config = parallel
                impl.is_dp_ep = parallel.dp_size > 1 and parallel.use_ep

    def parallel_of(self, layer: Any, size: int) -> Any:
        """A layer's MoE parallel configuration in a world of ``size``."""
        from vllm.distributed import get_pcp_group, get_tp_group
        from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

        return FusedMoEParallelConfig.make(
            tp_size_=get_tp_group().world_size,
            pcp_size_=get_pcp_group().world_size,
            dp_size_=size,
            sp_size_=layer.moe_config.sp_size,
            vllm_parallel_config=self.config.parallel_config,
        )

    def set_parallel(self, layer: Any, parallel: Any) -> None:
        """One shared configuration object: runner, experts and quantisation method read it."""
        layer.moe_config.moe_parallel_config = parallel
        layer.routed_experts.expert_map_manager.moe_parallel_config = parallel
        if any(config is not layer.moe_config for config in self.sharers(layer)):
            raise ProtocolError("vLLM no longer shares one FusedMoEConfig a layer")

    def sharers(self, layer: Any) -> tuple[Any, ...]:
        """The configurations that must be the layer's own object."""
        method = layer._quant_method
        return layer.routed_experts.moe_config, method.moe, method.moe_kernel.fused_experts.moe_config

    def _implementations(self) -> list[Any]:
        return [layer._quant_method.moe_kernel.impl for layer in self.experts.layers]
