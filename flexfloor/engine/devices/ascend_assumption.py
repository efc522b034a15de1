"""One thing that the Ascend module relies on, and the releases that were read."""

from __future__ import annotations

from dataclasses import dataclass

from flexfloor.engine.devices.source_tree import Rule, SourceTree

RC, STABLE = "0.30.0rc2", "0.23.0.post1"
TESTED = (RC,)
"""Releases of vllm-ascend that the module is written for."""
READ = (RC, STABLE)
"""Releases that were read. 0.23.0.post1 stands on vLLM 0.23, which FlexFloor's engine core is not written for."""
TORCH_NPU = "2.10.0.post4"


@dataclass(frozen=True)
class Assumption:
    """One thing that is relied on.

    Attributes:
        name: its name in comments, tests and docs.
        file: file within the package.
        rules: what must hold there.
        why: what in the module stands on it.
        releases: releases of vllm-ascend where it holds; in the others that were read it does not.
        package: ``vllm_ascend`` or ``torch_npu``.
    """

    name: str
    file: str
    rules: tuple[Rule, ...]
    why: str
    releases: tuple[str, ...] = READ
    package: str = "vllm_ascend"

    def broken(self, tree: SourceTree) -> str | None:
        """What does not hold, or None."""
        return next((what for rule in self.rules if (what := rule(tree, self.file)) is not None), None)
