"""The worker extension of elastic engines that verl started: FlexFloor's calls and verl's in one class."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from flexfloor.engine.worker import ElasticWorkerExtension, world_of

EXTENSION = "verl_integration.extension.ElasticColocateExtension"


class ElasticColocateExtension(ElasticWorkerExtension, vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Mixed into vLLM's worker."""

    def update_weights_from_ipc(
        self, peft_config: dict[str, Any] | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """New weights into the expert rows of the full world; no other row keeps any.

        Which version they are is told afterwards (`ElasticHttpServer.set_global_steps`); spare rows that planned
        residency keeps are then filled from the new ones.

        Raises:
            ProtocolError: the rank's memory is given away; weights are accepted in the full world only.
        """
        world = world_of(self)
        world.check_awake()
        if self.device.type == "cpu":
            from verl_integration.cpu.reload import receive
            from verl_integration.cpu.weights import reload_weights

            with world.all_rows():
                reload_weights(self, receive(self, use_shm=use_shm))
        else:
            super().update_weights_from_ipc(peft_config, base_sync_done, use_shm)
        world.renewed()
