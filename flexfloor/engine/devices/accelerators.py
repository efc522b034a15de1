"""Accelerators as the operating system shows them: device files, and the variable that says which may be used."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import NamedTuple


class Accelerator(NamedTuple):
    """One kind of device.

    Attributes:
        name: for people, in the plural.
        files: pattern of its files in ``/dev``, one a device.
        variable: environment variable that lists the devices a process may use.
    """

    name: str
    files: str
    variable: str

    def usable(self, found: int, environment: Mapping[str, str]) -> int:
        """How many of the ``found`` devices a process with this environment may use.

        Drivers read a list up to the first entry that names nothing.
        """
        listed = environment.get(self.variable)
        if listed is None:
            return found
        return min(found, len(list(takewhile(lambda entry: entry.strip() not in ("", "-1"), listed.split(",")))))


ACCELERATORS = {
    "cuda": Accelerator("NVIDIA GPUs", "nvidia[0-9]*", "CUDA_VISIBLE_DEVICES"),
    "ascend": Accelerator("Ascend NPUs", "davinci[0-9]*", "ASCEND_RT_VISIBLE_DEVICES"),
}
