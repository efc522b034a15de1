"""What every device does on the host: gloo groups under an agreed name, and packed messages between ranks."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroup, Store

from flexfloor.engine.coordinators import Group

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


def set_deadline(group: ProcessGroup, seconds: float) -> None:
    """How long an operation of a gloo group may wait: gloo takes the backend's default at each operation."""
    c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)


def most(values: Sequence[int], group: Group) -> list[int]:
    """Of each value the largest that a rank of ``group`` has; joint over it."""
    if len(group.ranks) < 2:
        return list(values)
    shared = torch.tensor(list(values), dtype=torch.int64)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group.cpu)
    return [int(value) for value in shared]


def transfer(
    sends: dict[int, list[torch.Tensor]],
    receives: dict[int, list[torch.Tensor]],
    group: ProcessGroup,
    deadline_s: float,
) -> int:
    """Host tensors to and from each peer, one packed message a pair of ranks. Returns bytes received."""
    wait = datetime.timedelta(seconds=deadline_s)
    works, staged = [], []
    for peer, tensors in sorted(sends.items()):
        packed = torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors])
        works.append((dist.isend(packed, peer, group=group), packed))
    for peer, tensors in sorted(receives.items()):
        packed = torch.empty(sum(t.numel() * t.element_size() for t in tensors), dtype=torch.uint8)
        works.append((dist.irecv(packed, peer, group=group), packed))
        staged.append((packed, tensors))
    for work, _ in works:
        work.wait(wait)
    for packed, tensors in staged:
        sizes = [t.numel() * t.element_size() for t in tensors]
        for tensor, part in zip(tensors, packed.split(sizes), strict=True):
            tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
    return sum(packed.numel() for packed, _ in staged)


def peer_lost(error: Exception) -> bool:
    """Gloo and the rendezvous store say in words only that another rank did not come."""
    return any(sign in str(error).lower() for sign in PEER_SIGNS)
