"""The worker extension of elastic engines that verl started: FlexFloor's calls and verl's in one class."""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from flexfloor.engine.settings import EngineSettings
from flexfloor.engine.worker import ElasticWorkerExtension, world_of
from flexfloor.errors import ProtocolError

EXTENSION = "verl_integration.extension.ElasticColocateExtension"


class ElasticColocateExtension(ElasticWorkerExtension, vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Mixed into vLLM's worker."""

    def update_weights_from_ipc(
        self, peft_config: dict[str, Any] | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """New weights into the expert rows of the full world; the other rows are emptied, none stays stale.

        Raises:
            ProtocolError: the rank's memory is given away; weights are accepted in the full world only.
        """
        world = world_of(self)
        if world.memory.released:
            raise ProtocolError("weights came for a rank that has given its memory away; restore the full world first")
        if self.device.type == "cpu":
            from verl_integration.cpu.reload import receive, reload_weights

            reload_weights(self, receive(self, use_shm=use_shm))
        else:
            super().update_weights_from_ipc(peft_config, base_sync_done, use_shm)
        _empty_spare_rows(world)


def _empty_spare_rows(world: Any) -> None:
    settings = EngineSettings.from_env()
    if settings is None:
        raise ProtocolError("the engine lost its FlexFloor settings")
    rows = world.experts
    filling = float("nan") if settings.poison else 0.0
    with torch.inference_mode():
        for index in range(rows.experts // settings.world_size, rows.capacity):
            for tensor in rows.row(index):
                tensor.fill_(filling)
