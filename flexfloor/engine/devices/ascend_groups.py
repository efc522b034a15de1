"""HCCL groups of a survivor set on Ascend, made by the survivors alone and only when the set is first needed.

vllm-ascend has three communicators over the EP ranks: of DP (all-gather, reduce-scatter), of EP (all-to-all) and of
MC2, whose operators tolerate no other traffic. Each survivor set gets its own three, under names that were never used
before, and the full world's are never destroyed, because graphs and dispatchers hold them.

`torch.distributed.new_group` needs every rank of the default group; the helper behind it does not. torch_npu replaces
that helper with one of the same parameters (contract: c10d-helper-patched). That some ranks may make a group while
the others do something else is read, not seen (unproven: subgroup-without-others).
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroup, Store

from flexfloor.engine.coordinators import Group
from flexfloor.engine.devices import host

KINDS = ("dp", "ep", "mc2")
ROWS_BUFFER_MB = 100
"""Device buffer of the row channel; vllm-ascend's own expert transfers use as much."""


class Part(NamedTuple):
    """One coordinator's share of a survivor set: its device group and its communicator (None for one rank)."""

    device: ProcessGroup
    communicator: Any


def survivors(name: str, ranks: Sequence[int], store: Store, timeout_s: float) -> Group:
    """The groups of a survivor set; joint over ``ranks``."""
    cpu = host.gloo_group(name, ranks, store, timeout_s)
    if len(ranks) == 1:
        return Group(tuple(ranks), cpu, cpu, parts={kind: Part(cpu, None) for kind in KINDS})
    parts = {}
    for kind in KINDS:
        device = hccl_group(kind, name, ranks, store, timeout_s)
        open_communicator(device, cpu)
        parts[kind] = Part(device, _communicator(kind, cpu, device))
    ep, dp = parts["ep"], parts["dp"]
    return Group(tuple(ranks), cpu, ep.device, ep.communicator, dp.communicator, parts)


def channel(name: str, ranks: Sequence[int], store: Store, timeout_s: float) -> Group:
    """A group that rows travel on, apart from all others; joint over ``ranks`` (unproven: p2p-beside-mc2)."""
    cpu = host.gloo_group(name, ranks, store, timeout_s)
    device = hccl_group("rows", name, ranks, store, timeout_s)
    open_communicator(device, cpu)
    return Group(tuple(ranks), cpu, device)


def hccl_group(kind: str, name: str, ranks: Sequence[int], store: Store, timeout_s: float) -> ProcessGroup:
    """An HCCL group over ``ranks`` alone; no communicator yet."""
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(dist.get_rank()),
        list(ranks),
        dist.Backend("hccl"),
        store,
        group_name=f"{name}_{kind}",
        backend_options=options(kind, name),
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def hccl_name(kind: str, name: str) -> str:
    """A short HCCL name, as unique as ``name``; it holds "mc2" for that kind only (contract: hccl-buffer-by-name)."""
    return f"{kind}_ff_{hashlib.blake2s(name.encode(), digest_size=8).hexdigest()}"


def options(kind: str, name: str) -> Any:
    """HCCL options: a unique name, and vllm-ascend's buffer size of that kind.

    MC2 gets no size of its own: its operators partition what HCCL_BUFFSIZE says.
    """
    from vllm_ascend.utils import calculate_dp_buffer_size, create_hccl_pg_options

    found = create_hccl_pg_options(hccl_name(kind, name))
    sizes = {"dp": calculate_dp_buffer_size, "rows": lambda: ROWS_BUFFER_MB}
    if kind in sizes:
        found.hccl_config = {**found.hccl_config, "hccl_buffer_size": sizes[kind]()}
    return found


def open_communicator(device: ProcessGroup, cpu: ProcessGroup) -> None:
    """Make a group's HCCL communicator now; joint.

    Asking for its name makes it (unproven: hccl-name-opens-communicator). The ranks meet on the host first, because
    HCCL's own time limit is the environment's and not the transition's.
    """
    dist.all_reduce(torch.zeros(1), group=cpu)
    device._get_backend(torch.device("npu")).get_hccl_comm_name(dist.get_rank(group=device))


def _communicator(kind: str, cpu: ProcessGroup, device: ProcessGroup) -> Any:
    from vllm_ascend.distributed.device_communicators.npu_communicator import NPUCommunicator

    return NPUCommunicator(
        cpu_group=cpu, device=torch.npu.current_device(), device_group=device, unique_name=f"{kind}:0"
    )


def destroy(group: Group) -> None:
    """Free a survivor set's groups (unproven: hccl-destroy-is-local); never the full world's."""
    seen: set[int] = set()
    for part in [*group.parts.values(), Part(group.device, None)]:
        if part.device is not group.cpu and id(part.device) not in seen:
            seen.add(id(part.device))
            dist.destroy_process_group(part.device)
    dist.destroy_process_group(group.cpu)
