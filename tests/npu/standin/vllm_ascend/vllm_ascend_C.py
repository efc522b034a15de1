# ruff: noqa: N999 (the name of the extension module)
"""The two ACL calls behind the sleep pool: unmapped memory loses its contents, mapped memory has undefined ones."""

import journal
import torch
import torch_npu

held = {}
unmapped = set()


def hold(allocator, tag, tensor):
    """An allocation of the pool, as the pluggable allocator would report it."""
    pointer = tensor.data_ptr()
    held[pointer] = tensor
    with allocator.use_allocation_tag(tag):
        allocator.python_malloc_callback((0, tensor.untyped_storage().nbytes(), pointer, 0))
    torch_npu.used_bytes[0] += tensor.untyped_storage().nbytes()


def poison(tensor):
    tensor.fill_(float("nan") if tensor.is_floating_point() else -(1 << 20))


def poisoned(tensor):
    return torch.isnan(tensor) if tensor.is_floating_point() else tensor == -(1 << 20)


def init_module(malloc, free):
    pass


def python_unmap_and_release(device, size, pointer, handle):
    if pointer in unmapped:
        journal.breaks("mapped-once", "an allocation is unmapped twice")
    unmapped.add(pointer)
    poison(held[pointer])
    torch_npu.used_bytes[0] -= size


def python_create_and_map(device, size, pointer, handle):
    if pointer not in unmapped:
        journal.breaks("mapped-once", "an allocation is mapped twice")
    elif not bool(poisoned(held[pointer]).all()):
        journal.breaks("nothing-written-asleep", f"{tuple(held[pointer].shape)} was written while unmapped")
    poison(held[pointer])
    unmapped.discard(pointer)
    torch_npu.used_bytes[0] += size
