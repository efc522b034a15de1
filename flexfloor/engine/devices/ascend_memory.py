"""Memory of one rank on Ascend: CaMem sleep level 2 on this rank alone, and waking in the right order.

Level 2 unmaps every pool allocation and keeps its address. vllm-ascend saves the model's buffers to the host first and
writes them back in the first `wake_up`, whatever tags that names: the weights, where the buffers live, must be mapped
by then. Its allocator does not know what is mapped, so that a second sleep or wake would unmap or map twice; that is
kept track of here (contract: camem-no-state, wake-restores-buffers). No rank has slept alone yet (unproven:
one-rank-sleeps).
"""

from __future__ import annotations

from typing import Any

from flexfloor.errors import ProtocolError

FIRST = "weights"


class Pools:
    """The sleep pools of one worker.

    Args:
        worker: the NPUWorker.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._asleep: list[str] = []

    def tags(self) -> list[str]:
        """Tags of the allocations that sleep unmaps, weights first."""
        from vllm_ascend.device_allocator.camem import CaMemAllocator

        allocator = CaMemAllocator.get_instance()
        found = {data.tag for data in allocator.pointer_to_data.values()} - {CaMemAllocator.sleep_persistent_tag}
        return sorted(found, key=lambda tag: (tag != FIRST, tag))

    def sleep(self) -> None:
        """Unmap the pools of this rank; no collective.

        Raises:
            ProtocolError: they are unmapped already.
        """
        if self._asleep:
            raise ProtocolError("the pools sleep already")
        tags = self.tags()
        if FIRST not in tags:
            raise ProtocolError("no weights lie in the sleep pool: was enable_sleep_mode on when they were loaded?")
        self._worker.sleep(2)
        self._asleep = tags

    def wake(self) -> None:
        """Map what is unmapped, weights before all else; a wake that failed half-way can be tried again."""
        while self._asleep:
            self._worker.wake_up([self._asleep[0]])
            self._asleep.pop(0)
