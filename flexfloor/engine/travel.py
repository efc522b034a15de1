"""What travels between ranks in a transition: expert rows of one version, and whole weights to a rank that woke."""

from __future__ import annotations

from typing import Any

import torch

from flexfloor.elastic.ticket import Ticket
from flexfloor.engine.coordinators import Group
from flexfloor.engine.devices.base import Device
from flexfloor.engine.experts import ExpertRows
from flexfloor.engine.memory import Memory
from flexfloor.engine.row_versions import RowVersions


class Travel:
    """One rank's sends and receives.

    Args:
        rank: this rank.
        device: the device module.
        experts: its expert rows.
        versions: which weights each row holds.
        memory: its weights.
    """

    def __init__(self, rank: int, device: Device, experts: ExpertRows, versions: RowVersions, memory: Memory) -> None:
        self._rank, self._device, self._experts = rank, device, experts
        self._versions, self._memory = versions, memory

    def rows(self, ticket: Ticket, channel: Group) -> int:
        """The ticket's moves; bytes received. Joint."""
        return self._move(ticket, channel, {}, {})

    def weights(self, ticket: Ticket, channel: Group) -> int:
        """What all ranks hold alike, from a donor to each woken rank, and the ticket's moves; bytes received. Joint."""
        sends: dict[int, list[Any]] = {}
        receives: dict[int, list[Any]] = {}
        dense = self._dense()
        for place, woken in enumerate(ticket.woken):
            donor = ticket.before[place % len(ticket.before)]
            if self._rank == donor:
                sends.setdefault(woken, []).extend(dense)
            elif self._rank == woken:
                receives.setdefault(donor, []).extend(dense)
        return self._move(ticket, channel, sends, receives)

    def _move(self, ticket: Ticket, channel: Group, sends: dict[int, list[Any]], receives: dict[int, list[Any]]) -> int:
        row_sends, row_receives = self._experts.traffic(ticket.moves, self._rank)
        for peers, rows in ((sends, row_sends), (receives, row_receives)):
            for peer, tensors in rows.items():
                peers.setdefault(peer, []).extend(tensors)
        self._versions.leave(ticket.moves)
        moved = self._device.transfer(sends, receives, channel, ticket.deadline_s)
        self._versions.arrive(ticket.moves, ticket.version)
        return moved

    def _dense(self) -> list[torch.Tensor]:
        """Parameters every rank holds alike (all but the expert rows)."""
        rows = {weight.untyped_storage()._cdata for weight in self._experts.tensors()}
        return [t for t in self._memory.weights() if t.untyped_storage()._cdata not in rows]
