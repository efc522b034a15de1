"""The process groups of one world on one rank, and vLLM's live coordinators that point at them.

vLLM and vllm-ascend cache the DP and EP coordinators in many objects, so the live objects stay and their fields change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class Group:
    """The process groups of one survivor set on this rank.

    Attributes:
        ranks: global ranks, ascending.
        cpu: group for small tensors on the host.
        device: group for tensors on the device.
        communicator: vLLM's device communicator of the EP coordinator (None for one rank); in a
            channel, what the device sends rows with.
        dp_communicator: the DP coordinator's (None for one rank).
        parts: groups of coordinators that only this device has or keeps apart, by name.
    """

    ranks: tuple[int, ...]
    cpu: ProcessGroup
    device: ProcessGroup
    communicator: Any = None
    dp_communicator: Any = None
    parts: dict[str, Any] = field(default_factory=dict)


FIELDS = ("ranks", "world_size", "rank_in_group", "group_ranks", "cpu_group", "device_group", "device_communicator")


def fields_of(coordinator: Any) -> dict[str, Any]:
    """The fields that make a coordinator's world."""
    return {name: getattr(coordinator, name) for name in FIELDS}


def put(coordinator: Any, fields: dict[str, Any]) -> None:
    """Point a live coordinator at another world."""
    for name, value in fields.items():
        setattr(coordinator, name, value)


def coordinator_fields(group: Group, rank: int, communicator: Any) -> dict[str, Any]:
    """Coordinator fields for ``group`` as seen by ``rank``."""
    ranks = list(group.ranks)
    return {
        "ranks": ranks,
        "world_size": len(ranks),
        "rank_in_group": ranks.index(rank),
        "group_ranks": [ranks],
        "cpu_group": group.cpu,
        "device_group": group.device,
        "device_communicator": communicator,
    }
