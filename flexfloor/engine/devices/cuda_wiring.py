"""What a switch changes on CUDA beyond vLLM's common wiring: how the ranks agree on the padding of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flexfloor.engine.experts import ExpertRows
from flexfloor.engine.wiring import Wiring


class CudaWiring(Wiring):
    """The wiring of one CUDA worker.

    The full world agrees as vLLM chose to, over NCCL or on the host; a smaller world has a host group only.
    """

    def __init__(self, worker: Any, experts: ExpertRows, asleep: Callable[[], bool]) -> None:
        super().__init__(worker, experts, asleep)
        parallel = self.config.parallel_config
        self._full = int(parallel.data_parallel_size)
        self._on_host = parallel.disable_nccl_for_dp_synchronization

    def set_dp(self, size: int, rank: int) -> None:
        """See the base class."""
        super().set_dp(size, rank)
        for config in self.parallel_configs():
            config.disable_nccl_for_dp_synchronization = self._on_host if size == self._full else True
