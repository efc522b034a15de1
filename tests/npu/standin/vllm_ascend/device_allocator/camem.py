import dataclasses

import journal
import torch
import torch_npu


@dataclasses.dataclass
class AllocationData:
    handle: tuple
    tag: str
    tensor: torch.Tensor = None
    mapped: bool = True


def poison(tensor):
    tensor.fill_(float("nan") if tensor.is_floating_point() else -(1 << 20))


def is_poisoned(tensor):
    bad = torch.isnan(tensor) if tensor.is_floating_point() else tensor == -(1 << 20)
    return bool(bad.any())


class CaMemAllocator:
    instance = None
    sleep_persistent_tag: str = "sleep_persistent"

    @staticmethod
    def get_instance():
        if CaMemAllocator.instance is None:
            CaMemAllocator.instance = CaMemAllocator()
        return CaMemAllocator.instance

    def __init__(self):
        self.pointer_to_data = {}

    def standin_hold(self, tag, tensor):
        self.pointer_to_data[tensor.data_ptr()] = AllocationData((), tag, tensor)
        torch_npu.used_bytes[0] += tensor.untyped_storage().nbytes()

    def sleep(self, offload_tags=None):
        for data in self.pointer_to_data.values():
            if data.tag == self.sleep_persistent_tag:
                continue
            if not data.mapped:
                journal.breaks("mapped-once", "an allocation is unmapped twice")
            data.mapped = False
            poison(data.tensor)
            torch_npu.used_bytes[0] -= data.tensor.untyped_storage().nbytes()

    def wake_up(self, tags=None):
        for data in self.pointer_to_data.values():
            if data.tag == self.sleep_persistent_tag or (tags is not None and data.tag not in tags):
                continue
            if data.mapped:
                journal.breaks("mapped-once", "an allocation is mapped twice")
            whole = torch.isnan(data.tensor) if data.tensor.is_floating_point() else data.tensor == -(1 << 20)
            if not bool(whole.all()):
                journal.breaks("nothing-written-asleep", f"{tuple(data.tensor.shape)} was written while unmapped")
                poison(data.tensor)
            data.mapped = True
            torch_npu.used_bytes[0] += data.tensor.untyped_storage().nbytes()
