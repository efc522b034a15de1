"""Weights into a running vLLM-CPU worker.

vLLM prepacks expert weights after loading, on the first call only: an in-place reload of the same weights changes the
output silently. Here the layers are loaded anew layer by layer (vLLM's own ``reload_weights``), with the kernels made
to set themselves up again; greedy tokens and logprobs then equal those of a fresh load.
"""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


def receive(worker: Any, *, use_shm: bool) -> list[tuple[str, Any]]:
    """All weights that the trainer sends to this worker, copied out of the transfer's buffer."""
    found: list[tuple[str, Any]] = []
    receiver = BucketedWeightReceiver(zmq_handle=worker._get_zmq_handle(), device=worker.device, use_shm=use_shm)
    receiver.receive_weights(
        on_bucket_received=lambda weights, _last: found.extend((name, tensor.clone()) for name, tensor in weights)
    )
    return found


def reload_weights(worker: Any, weights: list[tuple[str, Any]]) -> None:
    """Load ``weights`` (checkpoint names) into the worker's model."""
    for module in worker.model_runner.model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None
    worker.model_runner.reload_weights(weights_iterator=iter(weights))


class CpuWorkerExtension(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """verl's worker extension for stock verl on CPU (no `flexfloor:` section)."""

    def update_weights_from_ipc(
        self, peft_config: dict[str, Any] | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Called by verl after each training step."""
        reload_weights(self, receive(self, use_shm=use_shm))
