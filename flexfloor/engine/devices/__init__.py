"""Device modules. ``module_for`` is the only place that maps a platform to its module."""

from __future__ import annotations

from flexfloor.engine.devices.base import Device
from flexfloor.errors import RefusedError


def module_for(platform: str) -> Device:
    """The device module of a vLLM platform name (``cpu``, ``cuda``, ``npu``).

    Raises:
        RefusedError: no module for this platform.
    """
    if platform == "cpu":
        from flexfloor.engine.devices.cpu import CpuDevice

        return CpuDevice()
    if platform == "cuda":
        from flexfloor.engine.devices.cuda import CudaDevice

        return CudaDevice()
    if platform == "npu":
        from flexfloor.engine.devices.ascend import AscendDevice

        return AscendDevice()
    raise RefusedError(f"no FlexFloor device module for platform '{platform}'", remedy="run on cpu, cuda or npu")
