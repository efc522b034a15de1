"""What vLLM's worker does differently where expert rows have holes; each patch names its symbol in `upstream`."""

from __future__ import annotations

from typing import Any

from flexfloor.engine import upstream
from flexfloor.engine.devices.base import Device
from flexfloor.engine.experts import ExpertRows
from flexfloor.engine.room import RowHoles
from flexfloor.engine.settings import EngineSettings


def open_for_reload(worker_class: type) -> None:
    """Patch ``reload_weights``: it writes whole parameters, rows without memory too, and says nothing of versions.

    KV loses its contents; requests that are kept through a reload are not supported.
    """
    reload = worker_class.reload_weights  # type: ignore[attr-defined]

    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        world = self.__dict__.get("_flexfloor_world")
        if world is None:
            reload(self, *args, **kwargs)
            return
        with world.all_rows():
            reload(self, *args, **kwargs)
        world.renewed()

    upstream.replace(worker_class, "reload_weights", reload_weights)


def widen(worker_class: type, device: Device) -> None:
    """Patch ``determine_available_memory``: KV may also take what the spare rows of the full world leave.

    The rows get their holes right there, before KV is allocated. A KV size that the user has stated stays.
    """
    determine = worker_class.determine_available_memory  # type: ignore[attr-defined]

    def determine_available_memory(self: Any) -> int:
        found = int(determine(self))
        settings = EngineSettings.from_env()
        if settings is None or self.vllm_config.parallel_config.worker_extension_cls != settings.extension:
            return found
        if self.vllm_config.cache_config.kv_cache_memory_bytes is not None:
            return found
        holes = RowHoles(device, ExpertRows(self.model_runner.get_model(), device.stored_rows), settings)
        device.outline([holes.spans(floor) for floor in holes.sizes], keep=True)
        device.hollow([holes.spans(settings.world_size)])
        return found + holes.spared(settings.world_size)

    upstream.replace(worker_class, "determine_available_memory", determine_available_memory)
