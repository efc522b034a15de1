"""The audit: which steps were replayed from a full graph, and which computed prompt tokens."""

from __future__ import annotations

import sys
from typing import Any

from flexfloor.engine.upstream import replace


class StepCounter:
    """Counts the steps with requests that vLLM replays from a full graph, and those with prompt tokens.

    The ranks of a world run a step in the lowest graph mode that one of them can: a step that another rank made eager
    counts with the prompt tokens, not as a decode step that lacks its graph. The other rank counts its own.
    """

    def __init__(self) -> None:
        self._full, self._prefill, self._dummy = 0, 0, False
        self._lowered = False
        self._applied = False

    def read_full(self) -> int:
        """Replayed since the last call."""
        full, self._full = self._full, 0
        return full

    def read_prefill(self) -> int:
        """With prompt tokens since the last call."""
        prefill, self._prefill = self._prefill, 0
        return prefill

    def read(self) -> None:
        """Forget what was counted."""
        self._full = self._prefill = 0

    def apply(self, wrapper: type, runner: type) -> None:
        """Patch a graph wrapper's call and a model runner's dummy run, which counts as no step; once."""
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import get_forward_context, is_forward_context_available

        if self._applied:
            return
        self._applied = True
        call, dummy_run = wrapper.__call__, runner._dummy_run  # type: ignore[attr-defined]
        self._watch_agreement(sys.modules[runner.__module__])

        def _call(self_: Any, *args: Any, **kwargs: Any) -> Any:
            lowered, self._lowered = self._lowered, False
            if self_.runtime_mode is CUDAGraphMode.FULL and not self._dummy and is_forward_context_available():
                context = get_forward_context()
                if context.cudagraph_runtime_mode is CUDAGraphMode.FULL:
                    self._full += 1
                elif lowered or longest_query(context.attn_metadata) > 1:
                    self._prefill += 1
            return call(self_, *args, **kwargs)

        def _dummy_run(self_: Any, *args: Any, **kwargs: Any) -> Any:
            self._dummy = True
            try:
                return dummy_run(self_, *args, **kwargs)
            finally:
                self._dummy = False

        replace(wrapper, "__call__", _call)
        replace(runner, "_dummy_run", _dummy_run)

    def _watch_agreement(self, module: Any) -> None:
        """Patch vLLM's agreement on a step's graph mode where ``module`` has it (another runner agrees its own way)."""
        agree = getattr(module, "coordinate_batch_across_dp", None)
        if agree is None:
            return

        def _agree(*args: Any, **kwargs: Any) -> Any:
            agreed = agree(*args, **kwargs)
            self._lowered = agreed[2] != kwargs.get("cudagraph_mode", 0)
            return agreed

        replace(module, "coordinate_batch_across_dp", _agree)


def longest_query(metadata: Any) -> int:
    """Most tokens that a request computes in a step; 0 where the step has no attention."""
    if isinstance(metadata, list):
        return max((longest_query(part) for part in metadata), default=0)
    first = next(iter(metadata.values()), None) if metadata else None
    return int(getattr(first, "max_query_len", 0) or 0)
