"""The expert rows of all MoE layers of one rank: find them, map them, move them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from flexfloor.elastic.placement import Move
from flexfloor.errors import RefusedError

ROW_PARAMETERS = ("w13_weight", "w2_weight")


def parameters(layer: Any) -> list[torch.Tensor]:
    """The row tensors of a layer that keeps all its rows in its parameters."""
    return [getattr(layer.routed_experts, name).data for name in ROW_PARAMETERS]


class ExpertRows:
    """Weights and maps of the MoE layers.

    Args:
        model: the loaded model.
        stored: the tensors with all rows of a layer, spare ones too.

    Attributes:
        experts: logical experts E of a layer.
        capacity: rows of a layer on this rank.
        row_bytes: bytes of one expert over all layers.
    """

    def __init__(self, model: torch.nn.Module, stored: Callable[[Any], list[torch.Tensor]] = parameters) -> None:
        from vllm.utils import is_moe_layer

        self._weights = stored
        self.layers: list[Any] = [module for module in model.modules() if is_moe_layer(module)]
        if not self.layers:
            raise RefusedError("the model has no MoE layers", remedy="elastic EP needs a mixture-of-experts model")
        config = self.layers[0].moe_config
        self.experts = int(config.num_experts)
        self.capacity = int(self._weights(self.layers[0])[0].shape[0])
        self.row_bytes = sum(t.numel() * t.element_size() for t in self.row(0))
        for layer in self.layers:
            extra = [n for n, p in layer.routed_experts.named_parameters() if n not in ROW_PARAMETERS]
            if extra:
                raise RefusedError(
                    f"expert parameters {extra} are not supported", remedy="use an unquantised MoE without biases"
                )

    def tensors(self) -> list[torch.Tensor]:
        """The tensors with all rows, layer by layer."""
        return [weight for layer in self.layers for weight in self._weights(layer)]

    def row(self, index: int) -> list[torch.Tensor]:
        """Views of one row in every layer, in a fixed order."""
        return [weight[index] for weight in self.tensors()]

    def run(self, first: int, count: int) -> list[torch.Tensor]:
        """Views of ``count`` rows from ``first`` on, in the order of :meth:`row`."""
        return [weight[first : first + count] for weight in self.tensors()]

    def traffic(self, moves: Sequence[Move], rank: int) -> tuple[dict[int, list[Any]], dict[int, list[Any]]]:
        """(sends, receives) of ``rank``: peer -> tensors, in the order both sides use.

        Rows that are neighbours on both ranks travel as one tensor a weight.
        """
        sends: dict[int, list[Any]] = {}
        receives: dict[int, list[Any]] = {}
        for source, target, source_row, target_row, count in runs(moves):
            if source == rank:
                sends.setdefault(target, []).extend(self.run(source_row, count))
            elif target == rank:
                receives.setdefault(source, []).extend(self.run(target_row, count))
        return sends, receives


def empty_rows(weights: Iterable[torch.Tensor], first: int, stop: int | None, *, poison: bool) -> None:
    """Rows ``first`` to ``stop`` of each weight hold nothing: zeros, or NaN so that a read of one shows."""
    with torch.inference_mode():
        for weight in weights:
            weight[first:stop].fill_(float("nan") if poison else 0.0)


def runs(moves: Sequence[Move]) -> list[tuple[int, int, int, int, int]]:
    """Moves joined where rows follow one another on both ranks: (source, target, source row, target row, count)."""
    found: list[tuple[int, int, int, int, int]] = []
    for source, target, row, place in sorted((m.source, m.target, m.source_row, m.target_row) for m in moves):
        if source == target:
            continue
        if found:
            *pair, first, into, count = found[-1]
            if pair == [source, target] and (first + count, into + count) == (row, place):
                found[-1] = (source, target, first, into, count + 1)
                continue
        found.append((source, target, row, place, 1))
    return found
