"""CPU: gloo, eager, memory given back by emptying storages.

vLLM has no sleep on CPU. A storage is emptied in place, so that every tensor and view that
vLLM keeps stays valid and follows the storage when it is filled again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import Store

from flexfloor.engine.coordinators import Group
from flexfloor.engine.devices import host, host_pages
from flexfloor.engine.devices.base import Device, Limits
from flexfloor.engine.devices.pages import Span


class CpuDevice(Device):
    """Real vLLM on the host."""

    name = "cpu"
    page = host_pages.PAGE
    _pages = host_pages.HostPages()

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[Any, int]] = {}

    def bind(self, worker: Any) -> None:
        """Nothing to keep: storages are emptied where they are."""

    def limits(self) -> Limits:
        """No graphs; memory of rows and KV that a step does not need goes back to the system."""
        return Limits(graphs=False, kv_resize=True, refused_options={})

    def patch(self, combine: str) -> None:
        """See :mod:`flexfloor.engine.devices.cpu_ops` and ``cpu_sampling``."""
        from flexfloor.engine.devices import cpu_ops, cpu_sampling

        cpu_ops.apply(combine)
        cpu_sampling.apply()

    def make_group(self, name: str, ranks: Sequence[int], store: Store, timeout_s: float) -> Group:
        """One gloo group serves host and device tensors alike."""
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

        pg = host.gloo_group(name, ranks, store, timeout_s)
        group = Group(tuple(ranks), pg, pg)
        if len(ranks) > 1:
            device = torch.device("cpu")
            group.dp_communicator = CpuCommunicator(pg, device, pg, f"dp:{name}")
            group.communicator = CpuCommunicator(pg, device, pg, "ep:0", use_all2all=True)
            manager = group.communicator.all2all_manager
            manager.dp_rank = list(ranks).index(dist.get_rank())
            manager.dp_world_size = len(ranks)
        return group

    def make_channel(self, name: str, ranks: Sequence[int], store: Store, timeout_s: float) -> Group:
        """A gloo group."""
        pg = host.gloo_group(name, ranks, store, timeout_s)
        return Group(tuple(ranks), pg, pg)

    def destroy_group(self, group: Group) -> None:
        """Close the sockets of the group."""
        dist.destroy_process_group(group.cpu)

    def set_deadline(self, group: Group, seconds: float) -> None:
        """See :func:`flexfloor.engine.devices.host.set_deadline`."""
        if len(group.ranks) > 1:
            host.set_deadline(group.cpu, seconds)

    def transfer(
        self,
        sends: dict[int, list[torch.Tensor]],
        receives: dict[int, list[torch.Tensor]],
        channel: Group,
        deadline_s: float,
    ) -> int:
        """One packed message a pair of ranks."""
        return host.transfer(sends, receives, channel.cpu, deadline_s)

    def peer_lost(self, error: Exception) -> bool:
        """See :func:`flexfloor.engine.devices.host.peer_lost`."""
        return host.peer_lost(error)

    def capture(self, runner: Any, group: Group, load: int) -> dict[str, Any]:
        """Nothing to capture."""
        return {}

    def graphs(self) -> Any:
        """None: there are no graphs."""
        return None

    def put_graphs(self, graphs: Any) -> None:
        """Nothing to put."""

    def graph_replays(self) -> int:
        """None: CPU has no graphs."""
        return 0

    def prefill_steps(self) -> int:
        """Not told apart: every step is eager."""
        return 0

    def release(self, tensors: Sequence[torch.Tensor]) -> int:
        """Empty the storages and hand free heap pages to the system; returns the bytes that they had memory for."""
        freed = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if size == 0:
                continue
            freed += sum(part.numel() * part.element_size() for part in self.backed(tensor))
            self._sizes[storage._cdata] = (storage, size)
            storage.resize_(0)
        _trim()
        return freed

    def reclaim(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give every emptied storage its old size."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            kept = self._sizes.pop(storage._cdata, None)
            if kept is not None:
                storage.resize_(kept[1])

    def clear(self, tensors: Sequence[torch.Tensor]) -> None:
        """The whole storage, also where a tensor is a view of a part of it."""
        for tensor in tensors:
            for part in self.backed(tensor):
                part.zero_()

    def hollow(self, holes: Sequence[Sequence[Span]]) -> None:
        """See :meth:`flexfloor.engine.devices.host_pages.HostPages.hollow`."""
        self._pages.hollow(holes)

    def backed(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Without the holes."""
        return self._pages.backed(tensor)

    def memory_used(self) -> int:
        """Resident pages that no file backs."""
        info = psutil.Process().memory_info()
        return int(info.rss - info.shared)


def _trim() -> None:
    """Return free heap pages to the system (glibc; elsewhere nothing happens)."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return
