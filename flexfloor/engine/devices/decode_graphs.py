"""What devices with captured decode graphs have in common: buckets, vLLM's dispatcher, the contract's graph methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable
from typing import Any

from flexfloor.engine.coordinators import Group
from flexfloor.engine.devices.base import Device
from flexfloor.engine.devices.step_counter import StepCounter


class DecodeGraphs(ABC):
    """The graph sets of one runner; ``used`` is the one that vLLM uses, its ``entries`` are by batch descriptor.

    Args:
        runner: vLLM's model runner, its graphs captured.
    """

    used: Any

    def __init__(self, runner: Any) -> None:
        from vllm.config import CUDAGraphMode

        self._runner, self._mode = runner, CUDAGraphMode.FULL
        self._keys: set[Any] = set(runner.cudagraph_dispatcher.cudagraph_keys[self._mode])
        self._padded: list[int] = list(runner.cudagraph_dispatcher._bs_to_padded_graph_size)

    def buckets(self, load: int) -> list[Any]:
        """Descriptors of the batches that at most ``load`` requests can make, largest first."""
        sizes = sorted(key.num_tokens for key in self._keys)
        top = next((size for size in sizes if size >= load), sizes[-1] if sizes else 0)
        return sorted((key for key in self._keys if key.num_tokens <= top), key=lambda key: -int(key.num_tokens))

    def wanted(self, load: int) -> int:
        """Size of the bucket of ``load`` requests where the graphs in use lack it, else 0."""
        return next((int(key.num_tokens) for key in self.lacking(load, self.used.entries, lean=True)), 0)

    def lacking(self, load: int, there: Container[Any], *, lean: bool) -> list[Any]:
        """Buckets up to ``load`` requests that are not ``there``, largest first; ``lean``: that of ``load`` alone."""
        return [key for key in self.buckets(load)[: 1 if lean else None] if key not in there]

    @abstractmethod
    def ready(self, group: Group, load: int, *, lean: bool = False) -> dict[str, Any]:
        """Use the graphs of ``group`` up to ``load`` requests: kept ones, and captured what is missing. Joint.

        Args:
            group: the groups of the world.
            load: most requests that a rank has.
            lean: capture the bucket of ``load`` alone; smaller batches are padded to the next one that is there.

        Returns:
            ``captured``: buckets captured now; ``kept``: buckets found; ``capture``: seconds.
        """

    @abstractmethod
    def use(self, graphs: Any) -> None:
        """Point vLLM at a graph set."""

    def _dispatch(self, keys: Iterable[Any]) -> None:
        """Let vLLM's dispatcher know these graphs alone (contract: padding-by-the-dispatcher-s-list).

        A batch above all of them runs eagerly and is counted so.
        """
        known = set(keys)
        dispatcher = self._runner.cudagraph_dispatcher
        dispatcher.cudagraph_keys[self._mode] = known
        dispatcher._bs_to_padded_graph_size = padded(self._padded, sorted(int(key.num_tokens) for key in known))


def padded(stock: list[int], sizes: list[int]) -> list[int]:
    """Batch size -> size of the graph that it is padded to, where only graphs of ``sizes`` (ascending) are there.

    A batch above all of them keeps vLLM's own size, for which no graph is found.
    """
    return [
        0 if batch == 0 else next((size for size in sizes if size >= batch), own) for batch, own in enumerate(stock)
    ]


class GraphedDevice(Device):
    """The graph part of the contract over a :class:`DecodeGraphs`; None where the runner is eager."""

    _graphs: DecodeGraphs | None = None
    _steps: StepCounter

    def capture(self, runner: Any, group: Group, load: int) -> dict[str, Any]:
        """See :meth:`DecodeGraphs.ready`."""
        return {} if self._graphs is None else self._graphs.ready(group, load)

    def capture_one(self, runner: Any, group: Group, load: int) -> dict[str, Any]:
        """See :meth:`DecodeGraphs.ready`."""
        return {} if self._graphs is None else self._graphs.ready(group, load, lean=True)

    def capture_wanted(self, load: int) -> int:
        """See :meth:`DecodeGraphs.wanted`."""
        return 0 if self._graphs is None else self._graphs.wanted(load)

    def graphs(self) -> Any:
        """The set in use."""
        return None if self._graphs is None else self._graphs.used

    def put_graphs(self, graphs: Any) -> None:
        """See :meth:`DecodeGraphs.use`."""
        if self._graphs is not None and graphs is not None:
            self._graphs.use(graphs)

    def graph_replays(self) -> int:
        """Counted where vLLM replays."""
        return self._steps.read_full()

    def prefill_steps(self) -> int:
        """Counted where vLLM runs the model."""
        return self._steps.read_prefill()
