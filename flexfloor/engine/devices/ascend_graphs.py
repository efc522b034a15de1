"""ACL graphs of the worlds a rank is in: clear, reset, recapture.

A full graph bakes in the HCCL communicators, the world size, the number of local experts and every pointer. vllm-ascend
keeps events, handles and attention parameters of captured graphs in lists that only grow, one set a process, and pairs
them with the graphs by position: graphs and parameters are changed together or not at all.

A survivor set captures anew each time, into an empty table and empty parameters; a smaller graph may follow later in
the same world, whose parameters of that batch size are still empty. The world before stays aside until the transition
is confirmed, because an undo must find it. The full world's graphs are kept while the world is smaller:
vllm-ascend itself replays them after a level-2 sleep, whose addresses stay (contract: sleep-keeps-graphs)
(unproven: graphs-after-wake). Both sets must fit into the device's streams (unproven: recapture).
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist

from flexfloor.engine.coordinators import Group
from flexfloor.engine.devices.decode_graphs import DecodeGraphs
from flexfloor.errors import ProtocolError


@dataclass
class GraphSet:
    """Decode graphs of one world and what belongs to them.

    Attributes:
        group: the world's groups, None for the full world that vLLM built.
        keys: batch descriptors that have a graph.
        entries: vllm-ascend's table of captured graphs, by batch descriptor.
        params: its attention parameters (module global ``_graph_params``).
    """

    group: Group | None
    keys: set[Any] = field(default_factory=set)
    entries: dict[Any, Any] = field(default_factory=dict)
    params: Any = None


class AclGraphs(DecodeGraphs):
    """The graph sets of one runner.

    Args:
        runner: the NPUModelRunner, its graphs captured.
    """

    def __init__(self, runner: Any) -> None:
        from vllm_ascend.compilation import acl_graph

        super().__init__(runner)
        self._wrapper, self._module = runner.model, acl_graph
        self.full = GraphSet(None, self._keys, self._wrapper.concrete_aclgraph_entries, acl_graph._graph_params)
        self.used = self.full
        self._aside: GraphSet | None = None

    @classmethod
    def of(cls, runner: Any) -> AclGraphs | None:
        """The graphs of a runner; None where it runs eagerly."""
        from vllm_ascend.compilation.acl_graph import ACLGraphWrapper

        return cls(runner) if isinstance(runner.model, ACLGraphWrapper) else None

    def ready(self, group: Group, load: int, *, lean: bool = False) -> dict[str, Any]:
        """See :meth:`flexfloor.engine.devices.decode_graphs.DecodeGraphs.ready`.

        Raises:
            ProtocolError: the members would capture different buckets, or one was not captured.
        """
        began = time.perf_counter()
        there = self.used.entries if self.used.group is group else {}
        kept = sorted(int(key.num_tokens) for key in there)
        missing = self.lacking(load, there, lean=lean)
        agree(group, [int(key.num_tokens) for key in missing])
        torch.npu.synchronize()
        if self.used.group is not group:
            self.settled()
            self.use(GraphSet(group, set(), {}, _empty(self.full.params)))
            self._reset()
        if missing:
            self._capture(missing)
        return {
            "captured": sorted(int(key.num_tokens) for key in missing),
            "kept": kept,
            "capture": time.perf_counter() - began,
        }

    def use(self, graphs: GraphSet) -> None:
        """Point vllm-ascend at ``graphs``; those in use until now are set aside."""
        if graphs is self.used:
            return
        self._aside, self.used = self.used, graphs
        self._wrapper.concrete_aclgraph_entries = graphs.entries
        self._module._graph_params = graphs.params
        self._dispatch(graphs.keys)

    def settled(self) -> None:
        """Free the graphs set aside, unless they are the full world's."""
        aside, self._aside = self._aside, None
        if aside is not None and aside is not self.full and aside is not self.used:
            self._free(aside)

    def forget(self, group: Group) -> None:
        """A group is about to go: no graph may hold its communicators."""
        for graphs in (self._aside, self.used):
            if graphs is not None and graphs.group is group:
                self._free(graphs)

    def _free(self, graphs: GraphSet) -> None:
        torch.npu.synchronize()
        graphs.entries.clear()
        graphs.keys.clear()
        for part in fields(graphs.params) if graphs.params is not None else ():
            getattr(graphs.params, part.name).clear()
        torch.npu.empty_cache()

    def _reset(self) -> None:
        """vllm-ascend's own clear and reset, on what is in use now: after the swap, or the full world's would go."""
        from vllm_ascend.device_allocator.sleep_mem_optimized import AclGraphSleepWakeupManager

        AclGraphSleepWakeupManager.clear_all_attention_workspaces()
        AclGraphSleepWakeupManager.reset_all_graph_params()

    def _capture(self, missing: list[Any]) -> None:
        """Into the set in use; capture_model goes through the keys that the dispatcher knows."""
        from vllm.compilation.monitor import set_cudagraph_capturing_enabled
        from vllm.config import set_current_vllm_config
        from vllm.v1.worker.workspace import unlock_workspace

        self._dispatch(set(missing))
        try:
            with self._without_blocks(), set_current_vllm_config(self._runner.vllm_config):
                unlock_workspace()  # capture_model locks it again
                self._runner.capture_model()
        finally:
            set_cudagraph_capturing_enabled(False)  # a capture that failed leaves it on, and a miss would capture
            self.used.keys |= {key for key in missing if key in self.used.entries}
            self._dispatch(self.used.keys)
        lost = [int(key.num_tokens) for key in missing if key not in self.used.entries]
        if lost:
            raise ProtocolError(f"decode graphs of {lost} were not captured")

    @contextmanager
    def _without_blocks(self) -> Iterator[None]:
        """Clear the block tables meanwhile: a warm-up must not write into a request's blocks."""
        tables = [table.block_table for table in self._runner.input_batch.block_table.block_tables]
        saved = [(table.gpu.clone(), table.cpu.clone()) for table in tables]
        for table in tables:
            table.gpu.zero_()
            table.cpu.zero_()
        try:
            yield
        finally:
            for table, (there, here) in zip(tables, saved, strict=True):
                table.gpu.copy_(there)
                table.cpu.copy_(here)


def agree(group: Group, sizes: list[int]) -> None:
    """Every warm-up of a capture is a joint step: the members must capture the same list.

    Raises:
        ProtocolError: they would not.
    """
    if len(group.ranks) < 2:
        return
    mark = zlib.crc32(repr(sizes).encode())
    ends = torch.tensor([mark, -mark], dtype=torch.int64)
    dist.all_reduce(ends, op=dist.ReduceOp.MIN, group=group.cpu)
    if int(ends[0]) != -int(ends[1]):
        raise ProtocolError(f"the survivors would capture different decode graphs (here {sizes})")


def _empty(params: Any) -> Any:
    """Attention parameters of the same batch sizes, nothing captured."""
    if params is None:
        return None
    fresh: dict[str, Any] = {}
    for part in fields(params):
        known = getattr(params, part.name)
        fresh[part.name] = {size: ([] if isinstance(value, list) else None) for size, value in known.items()}
    return type(params)(**fresh)
