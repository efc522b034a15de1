"""CPU: gloo, eager, memory given back by emptying storages.

vLLM has no sleep on CPU. A storage is emptied in place, so that every tensor and view that
vLLM keeps stays valid and follows the storage when it is filled again.
"""

from __future__ import annotations

import ctypes
import datetime
from collections.abc import Sequence
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroup, Store

from flexfloor.engine.devices.base import Device, Group, Limits

PEER_SIGNS = ("timed out", "timeout", "connection closed", "connection reset", "broken pipe")


def gloo_group(name: str, ranks: Sequence[int], store: Store, timeout_s: float) -> ProcessGroup:
    """A gloo group over ``ranks`` alone, under an agreed name.

    ``torch.distributed.new_group`` names groups after per-process counters, which differ
    between ranks that did and did not take part in earlier groups.
    """
    me = dist.get_rank()
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(me),
        list(ranks),
        dist.Backend("gloo"),
        store,
        group_name=name,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


class CpuDevice(Device):
    """Real vLLM on the host."""

    name = "cpu"

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[Any, int]] = {}

    def limits(self) -> Limits:
        """No graphs; KV is sized once at start."""
        return Limits(graphs=False, kv_resize=False, unmap_rows=False, refused_options={})

    def patch(self, combine: str) -> None:
        """See :mod:`flexfloor.engine.devices.cpu_ops` and ``cpu_sampling``."""
        from flexfloor.engine.devices import cpu_ops, cpu_sampling

        cpu_ops.apply(combine)
        cpu_sampling.apply()

    def make_group(self, name: str, ranks: Sequence[int], store: Store, timeout_s: float) -> Group:
        """One gloo group serves host and device tensors alike."""
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

        pg = gloo_group(name, ranks, store, timeout_s)
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
        pg = gloo_group(name, ranks, store, timeout_s)
        return Group(tuple(ranks), pg, pg)

    def destroy_group(self, group: Group) -> None:
        """Close the sockets of the group."""
        dist.destroy_process_group(group.cpu)

    def set_deadline(self, group: Group, seconds: float) -> None:
        """Gloo takes the default timeout of the backend at each operation."""
        if len(group.ranks) > 1:
            c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group.cpu)

    def transfer(
        self,
        sends: dict[int, list[torch.Tensor]],
        receives: dict[int, list[torch.Tensor]],
        channel: ProcessGroup,
        deadline_s: float,
    ) -> int:
        """One packed message a pair of ranks."""
        wait = datetime.timedelta(seconds=deadline_s)
        works, staged = [], []
        for peer, tensors in sorted(sends.items()):
            packed = torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors])
            works.append((dist.isend(packed, peer, group=channel), packed))
        for peer, tensors in sorted(receives.items()):
            packed = torch.empty(sum(t.numel() * t.element_size() for t in tensors), dtype=torch.uint8)
            works.append((dist.irecv(packed, peer, group=channel), packed))
            staged.append((packed, tensors))
        for work, _ in works:
            work.wait(wait)
        for packed, tensors in staged:
            sizes = [t.numel() * t.element_size() for t in tensors]
            for tensor, part in zip(tensors, packed.split(sizes), strict=True):
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
        return sum(packed.numel() for packed, _ in staged)

    def peer_lost(self, error: Exception) -> bool:
        """Gloo and the rendezvous store say so in words only."""
        return any(sign in str(error).lower() for sign in PEER_SIGNS)

    def capture(self, runner: Any) -> dict[str, Any]:
        """Nothing to capture."""
        return {}

    def graph_replays(self) -> int:
        """None: CPU has no graphs."""
        return 0

    def release(self, tensors: Sequence[torch.Tensor]) -> int:
        """Empty the storages and hand free heap pages to the system; returns the storages' bytes."""
        freed = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if size == 0:
                continue
            self._sizes[storage._cdata] = (storage, size)
            storage.resize_(0)
            freed += size
        _trim()
        return freed

    def reclaim(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give every emptied storage its old size."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            kept = self._sizes.pop(storage._cdata, None)
            if kept is not None:
                storage.resize_(kept[1])

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
