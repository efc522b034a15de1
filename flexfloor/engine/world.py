"""The worker side of a transition on a live vLLM worker.

What a switch changes is in :mod:`flexfloor.engine.wiring`. Scheduler, KV cache, block tables
and sampler are never touched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flexfloor.elastic.ticket import Ticket
from flexfloor.engine.coordinators import Group
from flexfloor.engine.devices.base import Device
from flexfloor.engine.experts import ExpertRows, empty_rows
from flexfloor.engine.groups import Groups
from flexfloor.engine.memory import Memory
from flexfloor.engine.room import Room
from flexfloor.engine.row_versions import RowVersions
from flexfloor.engine.settings import EngineSettings
from flexfloor.engine.travel import Travel
from flexfloor.engine.wiring import Wired
from flexfloor.errors import PeerLostError, ProtocolError


@dataclass
class Topology:
    """Everything a switch changes, as it stood at one moment."""

    wired: Wired
    graphs: Any


class ElasticWorld:
    """Carries tickets out on one worker (see :class:`flexfloor.elastic.ticket.Worker`).

    Args:
        worker: the vLLM worker (with the extension mixed in).
        device: the device module.
        settings: the engine settings.
    """

    def __init__(self, worker: Any, device: Device, settings: EngineSettings) -> None:
        from vllm.distributed import get_dp_group

        self._worker, self._device, self._settings = worker, device, settings
        self._runner = worker.model_runner
        self._config = worker.vllm_config
        self.rank = int(get_dp_group().rank_in_group)
        device.bind(worker)
        self.experts = ExpertRows(self._runner.get_model(), device.stored_rows)
        self._primary = self.experts.experts // settings.world_size
        self._versions = RowVersions(self.rank, self._primary, self.experts.capacity)
        self.memory = Memory(device, self._runner.get_model(), self._runner, poison=settings.poison)
        self._travel = Travel(self.rank, device, self.experts, self._versions, self.memory)
        self._wiring = device.wiring(worker, self.experts, lambda: self.memory.released)
        self._room: Room | None = None
        if device.limits().kv_resize:
            charged = self._config.cache_config.kv_cache_memory_bytes is None
            self._room = Room(device, self.experts, self._runner, settings, charged=charged)
        keep = min(settings.keep_groups, device.limits().keep_groups)
        self._groups = Groups(device, dist.get_rank(), settings.world_size, keep, f"flexfloor{settings.replica}")
        self._full = self._topology()
        self._before: Topology | None = None
        self._next: Group | None = None
        self._here: Group | None = None
        if device.limits().slow_groups:
            self._groups.channel(0, settings.deadline_s, rebuild=False)

    def facts(self) -> dict[str, Any]:
        """What the engine core needs to know about its worker."""
        return {
            "rank": self.rank,
            "experts": self.experts.experts,
            "capacity": self.experts.capacity,
            "row_bytes": self.experts.row_bytes,
            "kv_blocks": {} if self._room is None else self._room.blocks,
            "graphs": self._device.graphs() is not None,
            "weight_bytes": self._held(self.memory.weights()),
            "kv_bytes": self._held(self.memory.kv()),
            "memory_used": self._device.memory_used(),
        }

    def _held(self, tensors: list[torch.Tensor]) -> int:
        """Bytes that have memory."""
        parts = (part for tensor in tensors for part in self._device.backed(tensor))
        return sum(part.numel() * part.element_size() for part in parts)

    @property
    def rows(self) -> int:
        """Expert rows of this rank that have memory."""
        return self.experts.capacity if self._room is None else self._room.rows

    def all_rows(self) -> AbstractContextManager[None]:
        """See :meth:`flexfloor.engine.room.Room.all_rows`."""
        return nullcontext() if self._room is None else self._room.all_rows()

    def make_room(self, floor: int, blocks: int | None) -> tuple[int, int]:
        """See :meth:`flexfloor.engine.room.Room.make`; the engine is idle.

        Raises:
            ProtocolError: the device cannot, or the rank's memory is given away.
        """
        if self._room is None:
            raise ProtocolError("this device has no holes")
        if self.memory.released:
            raise ProtocolError("rows and KV change places while they have memory only: wake the rank first")
        try:
            made = self._room.make(floor, blocks)
        except Exception:
            self._versions.lost_from(self._primary)
            raise
        self._versions.lost_from(made[0])
        return made

    def graph_replays(self) -> int:
        """See :meth:`flexfloor.engine.devices.base.Device.graph_replays`."""
        return self._device.graph_replays()

    def prefill_steps(self) -> int:
        """See :meth:`flexfloor.engine.devices.base.Device.prefill_steps`."""
        return self._device.prefill_steps()

    # -- phases of a shrink ----------------------------------------------------------------

    def prepare(self, ticket: Ticket) -> None:
        """Check that the rows to fill are free and within capacity."""
        if self.memory.released and self.rank in ticket.before:
            raise ProtocolError(f"rank {self.rank} is a member without memory")
        for move in ticket.moves:
            if move.target == self.rank and move.target_row >= self.rows:
                raise ProtocolError(f"row {move.target_row} of rank {self.rank} has no memory")
        self._versions.check_sources(ticket.moves, ticket.version)

    def stage(self, ticket: Ticket) -> dict[str, float]:
        """Rows into inactive rows of survivors, then the survivors' groups."""
        with self._joint():
            return self._stage(ticket)

    def _stage(self, ticket: Ticket) -> dict[str, float]:
        from vllm.config import set_current_vllm_config

        began = time.perf_counter()
        channel = self._groups.channel(ticket.serial, ticket.deadline_s, rebuild=bool(ticket.rebuild))
        opened = time.perf_counter()
        moved = self._travel.rows(ticket, channel)
        arrived = time.perf_counter()
        if self.rank in ticket.after:
            with set_current_vllm_config(self._config):
                self._next = self._groups.obtain(ticket.after, ticket.serial, channel, ticket.deadline_s)
        return {
            "channel": opened - began,
            "move": arrived - opened,
            "groups": time.perf_counter() - arrived,
            "received_bytes": moved,
            "moved_bytes": len(ticket.moves) * self.experts.row_bytes,
        }

    def switch(self, ticket: Ticket) -> None:
        """Point this survivor at the next world."""
        if self.rank not in ticket.after:
            return
        if self._next is None or self._next.ranks != ticket.after:
            raise ProtocolError("the groups of the next world were not staged")
        self._versions.check((row for row in ticket.maps[self.rank] if row >= 0), ticket.version)
        self._before = self._topology()
        self._wiring.point(self._next, ticket.maps, self.rank)

    def capture(self, ticket: Ticket) -> dict[str, Any]:
        """Decode graphs of the next world."""
        if self.rank not in ticket.after:
            return {}
        group = self._next or self._here
        if group is None or group.ranks != ticket.after:
            raise ProtocolError("no world to capture for")
        # Dense kernels are chosen by the padded batch, so verification pads each batch as the full world does.
        lean = ticket.lean and self._settings.combine != "invariant"
        made = self._device.capture_one if lean else self._device.capture
        with self._in_time(group, ticket.deadline_s):
            return made(self._runner, group, ticket.load)

    def capture_wanted(self, load: int) -> int:
        """See :meth:`flexfloor.engine.devices.base.Device.capture_wanted`."""
        return 0 if self._here is None else self._device.capture_wanted(load)

    def trial(self, ticket: Ticket) -> None:
        """One dummy step among the survivors under the ticket's deadline."""
        if self.rank not in ticket.after or not self._settings.trial_step:
            return
        if self._next is None:
            raise ProtocolError("no next world to try")
        with self._in_time(self._next, ticket.deadline_s):
            self._worker.execute_dummy_batch()

    def undo(self, ticket: Ticket) -> None:
        """Back to the topology before; groups of the failed world are not reused.

        Memory that a failed restore woke stays: the next attempt fills it.
        """
        if self._before is not None:
            self._apply(self._before)
        if self._next is not None:
            self._groups.drop(self._next.ranks)
        self._before = self._next = None

    def confirm(self, ticket: Ticket) -> None:
        """The next world stands."""
        self._here = self._next or self._here
        self._before = self._next = None
        self._groups.drop(ticket.broken)
        self._device.settled()

    def park(self) -> None:
        """Start giving memory back."""
        self._versions.lost()
        self.memory.start_release()

    def park_report(self) -> dict[str, Any] | None:
        """See :meth:`flexfloor.engine.memory.Memory.report`."""
        return self.memory.report()

    # -- phases of a restore -----------------------------------------------------------------

    def start_wake(self) -> None:
        """See :meth:`flexfloor.engine.memory.Memory.start_reclaim`."""
        self.memory.start_reclaim()

    def wake_seconds(self) -> float:
        """See :class:`flexfloor.engine.memory.Memory`."""
        return self.memory.reclaim_s

    def wake(self, ticket: Ticket) -> None:
        """Memory back on the ranks that gave it away."""
        self._versions.check_sources(ticket.moves, ticket.version)
        if self.rank in ticket.woken:
            self.memory.reclaim()
            self._wiring.woken()

    def refill(self, ticket: Ticket) -> dict[str, float]:
        """Whole weights from a donor to each woken rank, then the expert rows of the full world."""
        with self._joint():
            return self._refill(ticket)

    def _refill(self, ticket: Ticket) -> dict[str, float]:
        began = time.perf_counter()
        channel = self._groups.channel(ticket.serial, ticket.deadline_s, rebuild=bool(ticket.rebuild))
        moved = self._travel.weights(ticket, channel)
        if self.rank in ticket.woken:
            self._wiring.refilled()
        return {"move": time.perf_counter() - began, "received_bytes": moved}

    def switch_back(self, ticket: Ticket) -> None:
        """Point this rank at the full world."""
        if self.rank in ticket.before or self.rank in ticket.woken:
            self._versions.check_world(ticket.version)
        self._before = self._topology()
        self._here = None
        self._apply(self._full)

    # -- weights -------------------------------------------------------------------------------

    def renewed(self) -> None:
        """Somebody wrote new weights into the rows of the full world.

        The others are emptied, so that none is stale; no row can be used until `loaded` has said what was written.

        Raises:
            ProtocolError: this rank's memory is given away.
        """
        self.check_awake()
        self._versions.lost()
        empty_rows(self.experts.tensors(), self._primary, self.rows, poison=self._settings.poison)

    def loaded(self, version: int) -> None:
        """The rows of the full world hold ``version``, the other rows nothing.

        Raises:
            ProtocolError: this rank's memory is given away.
        """
        self.check_awake()
        self._versions.loaded(version)

    def row_versions(self) -> list[int]:
        """See :meth:`flexfloor.engine.row_versions.RowVersions.held`."""
        return self._versions.held()

    def check_awake(self) -> None:
        """Raise ProtocolError when this rank has no memory for weights."""
        if self.memory.released:
            raise ProtocolError("weights came for a rank that has given its memory away; restore the full world first")

    @contextmanager
    def _in_time(self, group: Group, seconds: float) -> Iterator[None]:
        """Something joint over ``group``, whose members wait that long for one another."""
        self._device.set_deadline(group, seconds)
        try:
            with self._joint():
                yield
        finally:
            self._device.set_deadline(group, STEP_DEADLINE_S)

    @contextmanager
    def _joint(self) -> Iterator[None]:
        """Tell a failure of another rank from one of this rank's own."""
        try:
            yield
        except RuntimeError as error:
            if self._device.peer_lost(error):
                raise PeerLostError(f"another rank did not take part: {str(error).splitlines()[0]}") from error
            raise

    # -- topology ------------------------------------------------------------------------------

    def _topology(self) -> Topology:
        return Topology(self._wiring.state(), self._device.graphs())

    def _apply(self, topology: Topology) -> None:
        self._wiring.put(topology.wired)
        self._device.put_graphs(topology.graphs)


STEP_DEADLINE_S = 1800.0
