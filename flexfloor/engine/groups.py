"""Process groups of the worlds a rank has been in.

Groups are kept by survivor set; a set is reused only when the whole set still has it (agreed in the staging step),
because a rank that lost it would wait for the others for ever.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from flexfloor.engine.coordinators import Group
from flexfloor.engine.devices.base import Device


class Groups:
    """Groups of survivor sets, most recently used last; and the row-transfer channel.

    Args:
        device: the device module.
        rank: this rank in the full world.
        size: N.
        keep: survivor sets to keep; the least recently used beyond that is destroyed in the background.
        prefix: namespace of group names.
    """

    def __init__(self, device: Device, rank: int, size: int, keep: int, prefix: str) -> None:
        self._device, self.rank, self.size, self._keep, self._prefix = device, rank, size, keep, prefix
        self._sets: OrderedDict[tuple[int, ...], Group] = OrderedDict()
        self._channel: Group | None = None

    def channel(self, serial: int, timeout_s: float, *, rebuild: bool) -> Group:
        """The full-world group that rows travel on; apart from DP and EP, so that a failed transfer harms neither."""
        if rebuild and self._channel is not None:
            self._discard(self._channel)
            self._channel = None
        if self._channel is None:
            name = f"{self._prefix}_rows_{serial}"
            self._channel = self._device.make_channel(name, range(self.size), self._store(), timeout_s)
        return self._channel

    def has(self, ranks: tuple[int, ...]) -> bool:
        """Whether this rank kept the groups of ``ranks``."""
        return ranks in self._sets

    def obtain(self, ranks: tuple[int, ...], serial: int, channel: Group, timeout_s: float) -> Group:
        """The groups of ``ranks``: kept ones if every one of them kept them, else new. Joint over ``ranks``."""
        kept = torch.tensor([int(self.has(ranks))])
        if len(ranks) > 1:
            kept = self._least(kept, ranks, channel, timeout_s)
        if int(kept):
            self._sets.move_to_end(ranks)
            return self._sets[ranks]
        self.drop(ranks)
        name = f"{self._prefix}_world_{serial}_" + "_".join(map(str, ranks))
        group = self._device.make_group(name, ranks, self._store(), timeout_s)
        self._sets[ranks] = group
        while len(self._sets) > self._keep:
            _, oldest = self._sets.popitem(last=False)
            self._discard(oldest)
        return group

    def _least(self, mine: torch.Tensor, ranks: tuple[int, ...], channel: Group, timeout_s: float) -> torch.Tensor:
        """Minimum of a flag over ``ranks``, by messages to and from the first of them."""
        first = ranks[0]
        others = ranks[1:]
        if self.rank == first:
            theirs = {peer: [torch.zeros_like(mine)] for peer in others}
            self._device.transfer({}, theirs, channel, timeout_s)
            least = torch.stack([mine, *[parts[0] for parts in theirs.values()]]).min(dim=0).values
            self._device.transfer({peer: [least] for peer in others}, {}, channel, timeout_s)
            return least
        self._device.transfer({first: [mine]}, {}, channel, timeout_s)
        self._device.transfer({}, {first: [mine]}, channel, timeout_s)
        return mine

    def drop(self, ranks: tuple[int, ...]) -> None:
        """Forget the groups of ``ranks`` (they may be broken)."""
        group = self._sets.pop(ranks, None)
        if group is not None:
            self._discard(group)

    def _discard(self, group: Group) -> None:
        threading.Thread(target=self._device.destroy_group, args=(group,), daemon=True).start()

    def _store(self) -> dist.Store:
        return c10d._get_default_store()
