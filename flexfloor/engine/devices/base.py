"""The contract between core code and a device: what a device module must answer.

Core code never asks which device it is on. Everything that differs goes through here:
process groups, row transfer, graph capture and audit, giving memory back, KV size, limits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexfloor.errors import ProtocolError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from flexfloor.engine.coordinators import Group
    from flexfloor.engine.devices.pages import Span
    from flexfloor.engine.experts import ExpertRows
    from flexfloor.engine.wiring import Wiring


@dataclass(frozen=True)
class Limits:
    """What a device can and cannot do; the planner and the checks read it.

    Attributes:
        graphs: decode graphs are captured.
        kv_resize: expert rows that a step does not need can be given to KV between steps.
        refused_options: option -> why it cannot work here.
        slow_groups: making a group takes long, so the channel of the rows is made at the start.
        keep_groups: most survivor sets that may keep their groups.
    """

    graphs: bool
    kv_resize: bool
    refused_options: dict[str, str]
    slow_groups: bool = False
    keep_groups: int = 1 << 20


class Device(ABC):
    """One platform."""

    name: str

    @abstractmethod
    def limits(self) -> Limits:
        """What the device can do."""

    @abstractmethod
    def patch(self, combine: str) -> None:
        """Apply what the platform lacks (before the model is loaded, once a process)."""

    @abstractmethod
    def bind(self, worker: Any) -> None:
        """Learn the worker of this process, once it has loaded the model and captured its graphs.

        Raises:
            RefusedError: it was started with an option that cannot work here.
        """

    def stored_rows(self, layer: Any) -> list[torch.Tensor]:
        """The tensors with all expert rows of a MoE layer, spare ones too."""
        from flexfloor.engine.experts import parameters

        return parameters(layer)

    def wiring(self, worker: Any, experts: ExpertRows, asleep: Callable[[], bool]) -> Wiring:
        """What of the worker knows the world, see :class:`flexfloor.engine.wiring.Wiring`."""
        from flexfloor.engine.wiring import Wiring

        return Wiring(worker, experts, asleep)

    def settled(self) -> None:  # noqa: B027
        """The transition is confirmed: what only an undo needed may go."""

    @abstractmethod
    def make_group(self, name: str, ranks: Sequence[int], store: Store, timeout_s: float) -> Group:
        """Process groups over ``ranks`` (this rank among them); joint over ``ranks`` only.

        Args:
            name: a name that all of ``ranks`` agree on and that was never used before.
            ranks: global ranks, ascending.
            store: the rendezvous store of the default group.
            timeout_s: how long to wait for the others.
        """

    @abstractmethod
    def make_channel(self, name: str, ranks: Sequence[int], store: Store, timeout_s: float) -> Group:
        """A group for :meth:`transfer` only: no communicators of vLLM's; joint over ``ranks``."""

    @abstractmethod
    def destroy_group(self, group: Group) -> None:
        """Free a group that is no longer used; may run off the core loop."""

    @abstractmethod
    def set_deadline(self, group: Group, seconds: float) -> None:
        """How long an operation of ``group`` may wait from now on."""

    @abstractmethod
    def transfer(
        self,
        sends: dict[int, list[torch.Tensor]],
        receives: dict[int, list[torch.Tensor]],
        channel: Group,
        deadline_s: float,
    ) -> int:
        """Copy tensors between ranks: to and from each peer in list order. Returns bytes received."""

    @abstractmethod
    def peer_lost(self, error: Exception) -> bool:
        """Whether ``error`` says that another rank did not come (time-out, closed connection)."""

    @abstractmethod
    def capture(self, runner: Any, group: Group, load: int) -> dict[str, Any]:
        """Make decode graphs ready for the current world and use them; joint over ``group``.

        Args:
            runner: vLLM's model runner.
            group: the groups of the current world.
            load: most requests that any rank of it can still run at once.

        Returns:
            What was done, for the event of the transition; {} where there are no graphs.
        """

    def capture_one(self, runner: Any, group: Group, load: int) -> dict[str, Any]:
        """As `capture`, but only the graph that ``load`` needs; smaller batches are padded to it."""
        return self.capture(runner, group, load)

    def capture_wanted(self, load: int) -> int:
        """Size of the graph that the current world lacks for ``load`` requests a rank, 0 where it lacks none."""
        return 0

    @abstractmethod
    def graphs(self) -> Any:
        """The decode graphs in use, to be put back later with :meth:`put_graphs`."""

    @abstractmethod
    def put_graphs(self, graphs: Any) -> None:
        """Use graphs of an earlier world again.

        Raises:
            ProtocolError: something they were captured with has moved since.
        """

    @abstractmethod
    def graph_replays(self) -> int:
        """Steps with requests that were replayed from a full decode graph since the last call."""

    @abstractmethod
    def prefill_steps(self) -> int:
        """Steps that computed prompt tokens, which no decode graph holds, since the last call."""

    @abstractmethod
    def release(self, tensors: Sequence[torch.Tensor]) -> int:
        """Give the memory behind ``tensors`` back; returns bytes that really went."""

    @abstractmethod
    def reclaim(self, tensors: Sequence[torch.Tensor]) -> None:
        """Back the tensors given to :meth:`release` with memory again, contents undefined."""

    @abstractmethod
    def clear(self, tensors: Sequence[torch.Tensor]) -> None:
        """Zero the memory behind ``tensors`` (KV after :meth:`reclaim`)."""

    page = 1
    """Bytes of the smallest part of memory that can be a hole."""

    def outline(self, choices: Sequence[Sequence[Span]], *, keep: bool) -> None:  # noqa: B027
        """Learn which sets of holes :meth:`hollow` may be given; nothing runs.

        Args:
            choices: the sets.
            keep: the contents matter.
        """

    def hollow(self, holes: Sequence[Sequence[Span]]) -> None:
        """Whole pages inside of these spans have no memory from now on, everything else has; nothing runs.

        What comes back has undefined contents, and comes when its pool wakes where that is asleep. Addresses stay.

        Raises:
            ProtocolError: this device cannot.
        """
        raise ProtocolError(f"device {self.name} has no holes")

    def backed(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What has memory of a tensor's storage, as flat views."""
        return [tensor]

    def awake(self, tensor: torch.Tensor) -> bool:
        """Whether the pool that a tensor lies in has memory now."""
        return True

    @abstractmethod
    def memory_used(self) -> int:
        """Bytes this process holds on the device now."""
