"""Weights into a running vLLM-CPU worker.

vLLM prepacks expert weights after loading, on the first call only: an in-place reload of the same weights changes the
output silently. Here the layers are loaded anew layer by layer (vLLM's own ``reload_weights``), with the kernels made
to set themselves up again; greedy tokens and logprobs then equal those of a fresh load.
"""

from __future__ import annotations

from typing import Any


def reload_weights(worker: Any, weights: list[tuple[str, Any]]) -> None:
    """Load ``weights`` (checkpoint names) into the worker's model."""
    for module in worker.model_runner.model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None
    worker.model_runner.reload_weights(weights_iterator=iter(weights))
