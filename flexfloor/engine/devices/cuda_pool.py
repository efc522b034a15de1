"""vLLM's CuMem pools as a rank needs them that sleeps and wakes alone, beside others that decode.

* Memory is mapped and unmapped without the interpreter's lock. vLLM's extension holds it, and a rank that wakes while
  the survivors decode would keep them waiting at every sync point.
* The MoE workspace lies in the KV pool: graphs hold its address, so a sleeping rank could not free it, and it is a
  gibibyte of scratch memory.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from flexfloor.engine import upstream
from flexfloor.errors import UpstreamChangedError

WORKSPACE = "flexfloor workspace"


def apply() -> None:
    """Patch this process, once vLLM's worker is imported."""
    from vllm.device_allocator import cumem
    from vllm.v1.worker.workspace import WorkspaceManager

    extension = Extension(cumem.lib_name)
    cumem.create_and_map = extension.create_and_map
    cumem.unmap_and_release = extension.unmap_and_release
    grow = WorkspaceManager._ensure_workspace_size

    def _ensure_workspace_size(self: Any, required_bytes: int) -> torch.Tensor:
        if self._locked or not grows(self._current_workspaces, required_bytes):
            return grow(self, required_bytes)
        return in_kv_pool(lambda: grow(self, required_bytes))

    upstream.replace(WorkspaceManager, "_ensure_workspace_size", _ensure_workspace_size)


class Extension:
    """The functions behind vLLM's extension, called without the interpreter's lock.

    Args:
        path: the extension's file; it keeps the driver's last error in two variables.

    Raises:
        UpstreamChangedError: it has other functions.
    """

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        try:
            self._map, self._unmap = library.create_and_map, library.unmap_and_release
            self._error = ctypes.c_int.in_dll(library, "error_code")
            self._message = (ctypes.c_char * 1024).in_dll(library, "error_msg")
        except (AttributeError, ValueError) as error:
            what = f"has changed ({error}; its functions are called without the interpreter's lock)"
            raise UpstreamChangedError("vllm", path, what, ", ".join(upstream.VLLM_TESTED)) from error
        for function in (self._map, self._unmap):
            function.argtypes = (ctypes.c_ulonglong, ctypes.c_ssize_t, ctypes.c_ulonglong, ctypes.c_void_p)
            function.restype = None

    def create_and_map(self, handle: tuple[int, int, int, int]) -> None:
        """Memory for an address range.

        Args:
            handle: device, bytes, address, address of the memory handle.

        Raises:
            RuntimeError: the driver refused.
        """
        self._call(self._map, handle)

    def unmap_and_release(self, handle: tuple[int, int, int, int]) -> None:
        """The memory of an address range goes; see :meth:`create_and_map`."""
        self._call(self._unmap, handle)

    def _call(self, function: Any, handle: tuple[int, int, int, int]) -> None:
        function(*handle)
        if self._error.value:
            self._error.value = 0
            raise RuntimeError(self._message.value.decode())


def grows(spaces: list[torch.Tensor | None], required_bytes: int) -> bool:
    """Whether vLLM's only workspace is about to be allocated anew; several (micro-batches) are left where they are."""
    if len(spaces) != 1:
        return False
    (space,) = spaces
    return space is None or space.numel() * space.element_size() < required_bytes


def in_kv_pool(allocate: Any) -> Any:
    """What ``allocate`` returns; its device memory sleeps and wakes with the KV pool.

    vLLM keeps one pool a tag alive, and drops it when the tag is used again: each of ours gets a name of its own. What
    ``allocate`` lets go of an earlier one is unmapped as vLLM does it, behind the back of torch, which never uses that
    pool again.
    """
    from vllm.device_allocator import cumem

    allocator = cumem.CuMemAllocator.get_instance()
    before = [key for key in allocator.allocator_and_pools if key.startswith(WORKSPACE)]
    name = f"{WORKSPACE} {len(before)}"
    with allocator.use_memory_pool(tag=name):
        made = allocate()
    for key in before:
        for segment in allocator.allocator_and_pools[key][0].snapshot():
            if not segment["allocated_size"] and segment["address"] in allocator.pointer_to_data:
                cumem.unmap_and_release(allocator._python_free_callback(segment["address"]))
    for data in allocator.pointer_to_data.values():
        if data.tag == name:
            data.tag = "kv_cache"
    return made
