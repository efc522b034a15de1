"""Spare expert rows, allocated with the weights.

Patches ``UnquantizedFusedMoEMethod.create_weights``: vLLM allocates exactly the local experts
and has no option for more (EPLB's redundant experts imply EPLB). The kernels and the CPU
prepack accept more rows than local experts; the loader fills the first ones.
"""

from __future__ import annotations

from typing import Any

from flexfloor.engine import upstream
from flexfloor.engine.experts import empty_rows
from flexfloor.engine.settings import EngineSettings
from flexfloor.errors import RefusedError


def patch(settings: EngineSettings) -> None:
    """Allocate E / smallest_floor rows a rank from now on."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    create = UnquantizedFusedMoEMethod.create_weights

    def create_weights(self: Any, layer: Any, num_experts: int, *args: Any, **kwargs: Any) -> None:
        capacity = capacity_of(self.moe.num_experts, settings)
        create(self, layer, max(capacity, num_experts), *args, **kwargs)
        weights = (layer.w13_weight.data, layer.w2_weight.data)
        empty_rows(weights, num_experts, None, poison=settings.poison)

    upstream.replace(UnquantizedFusedMoEMethod, "create_weights", create_weights)


def capacity_of(experts: int, settings: EngineSettings) -> int:
    """Expert rows a rank: E / smallest floor.

    Raises:
        RefusedError: the floor does not divide the expert count.
    """
    if experts % settings.smallest_floor or experts % settings.world_size:
        raise RefusedError(
            f"{experts} experts do not divide over floor {settings.smallest_floor} and world {settings.world_size}",
            remedy="choose sizes that divide the expert count",
        )
    return experts // settings.smallest_floor
