"""The worker extension (``worker_extension_cls``): one method, callable through collective_rpc."""

from __future__ import annotations

from typing import Any

from flexfloor.engine.devices import module_for
from flexfloor.engine.settings import EngineSettings
from flexfloor.engine.world import ElasticWorld
from flexfloor.errors import InputError


class ElasticWorkerExtension:
    """Mixed into vLLM's worker; the elastic state is built at the first call, after the model is loaded."""

    def flexfloor_call(self, method: str, *args: Any) -> Any:
        """Call a public method of :class:`ElasticWorld`."""
        return getattr(world_of(self), method)(*args)


def world_of(worker: Any) -> ElasticWorld:
    """The elastic state of a worker.

    Raises:
        InputError: its engine was started without FlexFloor settings.
    """
    world: ElasticWorld | None = worker.__dict__.get("_flexfloor_world")
    if world is None:
        settings = EngineSettings.from_env()
        if settings is None:
            raise InputError("the engine was started without FlexFloor settings", field="worker_extension_cls")
        from vllm.platforms import current_platform

        world = ElasticWorld(worker, module_for(current_platform.device_type), settings)
        worker.__dict__["_flexfloor_world"] = world
    return world
