"""The warm-up of a capture, through the first layers of a model instead of all.

A capture must not be the first to run a kernel. What another world changes is the work of the experts, which is alike
in all layers, and the exchange around it: one layer with experts has run every kernel that is new. A pass is the host's
work layer by layer, so this one costs a fraction of a whole one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class WarmPath:
    """The layers of a model as vLLM's models go through them: ``layers[start_layer:end_layer]``.

    Args:
        model: the loaded model. One that is built otherwise is always gone through as a whole.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._inner, self._first = _first_experts(model)
        self._end = None if self._inner is None else self._inner.end_layer

    @contextmanager
    def short(self) -> Iterator[None]:
        """Steps end with the first layer that has experts."""
        if self._inner is None:
            yield
            return
        self._inner.end_layer = self._first
        try:
            yield
        finally:
            self._inner.end_layer = self._end

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within :meth:`short`: steps go through all layers from here on."""
        if self._inner is not None:
            self._inner.end_layer = self._end
        yield


def _first_experts(model: torch.nn.Module) -> tuple[Any, int]:
    """The module that goes through the layers, and where its first layer with experts ends; (None, 0) without."""
    from vllm.utils import is_moe_layer

    for module in model.modules():
        layers = getattr(module, "layers", None)
        if not isinstance(layers, torch.nn.ModuleList) or not hasattr(module, "end_layer"):
            continue
        for index, layer in enumerate(layers):
            if any(is_moe_layer(part) for part in layer.modules()):
                return module, index + 1
    return None, 0
