"""Full decode graphs of the worlds a rank has been in.

A captured graph holds addresses: the communicator, expert maps, weights, KV, the MoE workspace. A
set of graphs belongs to one survivor set and is used again only while all of these are where they
were; sleep and wake keep them there, so a restore is a swap of vLLM's table of captured graphs.
What is not captured for a world is taken out of vLLM's dispatcher, which then runs such a batch
eagerly, where the audit counts it, instead of failing.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from flexfloor.engine.coordinators import Group
from flexfloor.engine.devices import host
from flexfloor.engine.devices.decode_graphs import DecodeGraphs
from flexfloor.engine.devices.warm_path import WarmPath
from flexfloor.errors import ProtocolError


class Need(IntEnum):
    """What a bucket needs in a world; its members go by the most that one of them needs, because a pass is joint."""

    NOTHING = 0
    CAPTURE = 1
    SHORT = 2
    """A warm-up through the first layer with experts, then the capture."""
    WHOLE = 3
    """A warm-up through all layers, then the capture."""


FREEING_S = 2.0
"""Longest wait of a capture for a group that is being destroyed, which takes half a second."""


@dataclass
class GraphSet:
    """Decode graphs of one world.

    Attributes:
        group: the world's groups, None for the full world that vLLM built.
        addresses: where everything lay that the graphs read and write.
        entries: vLLM's table of captured graphs, by batch descriptor.
        warmed: buckets whose kernels have run in this world, so that a capture compiles nothing.
    """

    group: Group | None
    addresses: tuple[int, ...]
    entries: dict[Any, Any] = field(default_factory=dict)
    warmed: set[int] = field(default_factory=set)


class GraphStore(DecodeGraphs):
    """The graph sets of one runner, and which of them vLLM uses.

    Args:
        runner: vLLM's model runner, its graphs captured.
        wrapper: the runner's CUDAGraphWrapper.
    """

    def __init__(self, runner: Any, wrapper: Any) -> None:
        super().__init__(runner)
        self._wrapper = wrapper
        self._sets: dict[tuple[int, ...], GraphSet] = {}
        self._lock, self._freeing = threading.Lock(), threading.Lock()
        self._path = WarmPath(runner.get_model())
        self._short = True
        self.used = GraphSet(None, addresses(runner), wrapper.concrete_cudagraph_entries)

    @classmethod
    def of(cls, runner: Any) -> GraphStore | None:
        """The store of a runner; None where it runs eagerly."""
        from vllm.compilation.cuda_graph import CUDAGraphWrapper

        return cls(runner, runner.model) if isinstance(runner.model, CUDAGraphWrapper) else None

    def ready(self, group: Group, load: int, *, lean: bool = False) -> dict[str, Any]:
        """See :meth:`flexfloor.engine.devices.decode_graphs.DecodeGraphs.ready`."""
        now = addresses(self._runner)
        found = self._sets.get(group.ranks)
        if found is None or found.group is not group or found.addresses != now:
            self._drop(group.ranks)
            found = GraphSet(group, now)
        wanted = self.lacking(load, (), lean=lean)
        needs = host.most([self._need(found, key) for key in wanted], group)
        missing = {key: Need(need) for key, need in zip(wanted, needs, strict=True) if need}
        self.use(found, extra=list(missing))
        began = time.perf_counter()
        self._capture(found, missing)
        with self._lock:
            self._sets[group.ranks] = found
        return {
            "captured": sorted(key.num_tokens for key in missing),
            "kept": sorted(key.num_tokens for key in found.entries if key not in missing),
            "capture": time.perf_counter() - began,
        }

    @contextmanager
    def alone(self, patience_s: float = -1) -> Iterator[None]:
        """No capture while memory of the device is being freed, and the reverse: it would end the capture.

        Args:
            patience_s: longest wait, seconds, after which it goes on all the same; -1: without an end.
        """
        held = self._freeing.acquire(timeout=patience_s)
        try:
            yield
        finally:
            if held:
                self._freeing.release()

    def _need(self, graphs: GraphSet, key: Any) -> Need:
        if key in graphs.entries:
            return Need.NOTHING
        if key.num_tokens in graphs.warmed:
            return Need.CAPTURE
        return Need.SHORT if self._short else Need.WHOLE

    def use(self, graphs: GraphSet, extra: list[Any] | None = None) -> None:
        """Point vLLM at ``graphs``; the buckets of ``extra`` are about to be captured into it.

        Raises:
            ProtocolError: something has moved since they were captured.
        """
        if graphs.entries and graphs.addresses != addresses(self._runner):
            raise ProtocolError("decode graphs were captured with other addresses and cannot be used again")
        self._wrapper.concrete_cudagraph_entries = graphs.entries
        self._dispatch({*graphs.entries, *(extra or ())})
        self.used = graphs

    def forget(self, group: Group) -> None:
        """Free the graphs of a group that is about to go."""
        found = self._sets.get(group.ranks)
        if found is not None and found.group is group:
            self._drop(group.ranks)

    def _drop(self, ranks: tuple[int, ...]) -> None:
        with self._lock:
            found = self._sets.pop(ranks, None)
        if found is not None:
            torch.cuda.synchronize()
            found.entries.clear()
            torch.cuda.empty_cache()

    def _capture(self, graphs: GraphSet, missing: dict[Any, Need]) -> None:
        from vllm.compilation.monitor import set_cudagraph_capturing_enabled
        from vllm.config import set_current_vllm_config
        from vllm.distributed.parallel_state import graph_capture

        if not missing:
            return
        runner = self._runner
        set_cudagraph_capturing_enabled(True)
        try:
            with (
                self.alone(FREEING_S),
                set_current_vllm_config(runner.vllm_config),
                _no_collection(),
                graph_capture(device=runner.device),
            ):
                torch.cuda.synchronize()
                for key, need in missing.items():
                    graphs.entries.pop(key, None)
                    # What is called a profiler is entered between the warm-up and the capture.
                    with self._path.short() if need is Need.SHORT else nullcontext():
                        runner._warmup_and_capture(
                            key, self._mode, num_warmups=int(need > Need.CAPTURE), profiler=self._path.whole()
                        )
                    graphs.warmed.add(key.num_tokens)
                torch.cuda.synchronize()
        except BaseException:
            self._short = False  # should the short warm-up have left something out, the next one does not
            for key in missing:
                graphs.entries.pop(key, None)
            self.use(graphs)
            raise
        finally:
            set_cudagraph_capturing_enabled(False)


def addresses(runner: Any) -> tuple[int, ...]:
    """Device addresses that a decode graph of ``runner`` holds: weights and maps, KV, MoE workspaces."""
    from vllm.v1.worker.workspace import current_workspace_manager

    model = runner.get_model()
    tensors = [*model.parameters(), *model.buffers(), *runner.kv_caches]
    tensors += [space for space in current_workspace_manager()._current_workspaces if space is not None]
    return tuple(tensor.data_ptr() for tensor in tensors)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection while a stream is captured: it costs half a second and may unload a kernel."""
    collect, enabled = gc.collect, gc.isenabled()
    gc.disable()
    gc.collect = lambda *args, **kwargs: 0
    try:
        yield
    finally:
        gc.collect = collect
        if enabled:
            gc.enable()
