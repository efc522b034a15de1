import journal
import real
import torch
from vllm.logger import logger
from vllm.utils.mem_constants import GiB_bytes

from vllm_ascend.ascend_config import get_ascend_config
from vllm_ascend.device_allocator.camem import CaMemAllocator
from vllm_ascend.vllm_ascend_C import unmapped

_released = {
    "torch": torch,
    "logger": logger,
    "GiB_bytes": GiB_bytes,
    "get_ascend_config": get_ascend_config,
    "CaMemAllocator": CaMemAllocator,
}
real.take("worker/worker.py", _released, "sleep", "wake_up", "execute_dummy_batch", owner="NPUWorker")


class NPUWorker:
    """Sleep, wake and dummy batch are vllm-ascend's own; around them the journal is kept."""

    sleep_wakeup_manager = None

    def sleep(self, level=1):
        journal.note("sleep", level)
        _released["sleep"](self, level)

    def wake_up(self, tags=None):
        journal.note("wake", tuple(tags) if tags is not None else None)
        if self._sleep_saved_buffers and tags is not None and "weights" not in tags:
            pool = CaMemAllocator.get_instance().pointer_to_data
            if any(pool[pointer].tag == "weights" for pointer in unmapped):
                journal.breaks("weights-before-buffers", "buffers are written while the weights are unmapped")
        _released["wake_up"](self, tags)

    def log_memory_stats(self):
        pass

    def execute_dummy_batch(self):
        _released["execute_dummy_batch"](self)
