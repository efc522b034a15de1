"""Ascend: HCCL, ACL graphs, memory given back by CaMem sleep level 2 on one rank alone.

Nothing in this module has run on an NPU. It is written against vllm-ascend 0.30.0rc2, and every assumption about it is
a named entry of :mod:`flexfloor.engine.devices.ascend_contract`, tested against the package's source. What only a
device can show is a named entry of :mod:`flexfloor.engine.devices.ascend_unproven`; docs/ascend.md says how to check
each. Comments name them as ``contract: NAME`` and ``unproven: NAME``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store

from flexfloor.engine.coordinators import Group
from flexfloor.engine.devices import ascend_contract, ascend_experts, ascend_groups, ascend_limits, ascend_options, host
from flexfloor.engine.devices.ascend_graphs import AclGraphs
from flexfloor.engine.devices.ascend_memory import Pools
from flexfloor.engine.devices.base import Limits
from flexfloor.engine.devices.decode_graphs import GraphedDevice
from flexfloor.engine.devices.step_counter import StepCounter
from flexfloor.engine.experts import ExpertRows
from flexfloor.engine.memory import flat
from flexfloor.engine.wiring import Wiring
from flexfloor.errors import ProtocolError, RefusedError

POLL_S = 0.0005
KEPT_SETS = 4
"""Survivor sets that keep their HCCL groups: each holds about a gigabyte of device buffers."""


class AscendDevice(GraphedDevice):
    """Ascend NPUs, one a rank."""

    name = "ascend"
    _steps = StepCounter()

    def __init__(self) -> None:
        self._worker: Any = None
        self._at: Any = None
        self._stream: Any = None
        self._graphs: AclGraphs | None = None
        self._pools: Pools | None = None

    def limits(self) -> Limits:
        """Graphs are captured; KV is sized once at start."""
        refused = {f"additional_config.{option.name}": option.why for option in ascend_options.OPTIONS}
        return Limits(
            graphs=True,
            kv_resize=False,
            refused_options=refused,
            slow_groups=True,
            keep_groups=KEPT_SETS,
        )

    def patch(self, combine: str) -> None:
        """Refuses an untested release, reading its source; spare rows and tables come with the weights."""
        if combine != "stock":
            raise RefusedError("there is no EP-invariant combine on Ascend", remedy="set engine.combine: stock")
        ascend_contract.check_installed()
        ascend_experts.patch()

    def bind(self, worker: Any) -> None:
        """Refuses what cannot shrink; takes over the graphs that vllm-ascend captured.

        Steps are counted where the graph wrapper is called (contract: graph-table, dummy-run, attention-metadata).
        """
        from vllm_ascend.compilation.acl_graph import ACLGraphWrapper
        from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

        refuse(worker)
        self._worker, self._at = worker, worker.device
        self._stream = torch.npu.Stream()
        self._graphs = AclGraphs.of(worker.model_runner)
        self._pools = Pools(worker)
        self._steps.apply(ACLGraphWrapper, NPUModelRunner)
        self._steps.read()

    def stored_rows(self, layer: Any) -> list[torch.Tensor]:
        """The whole tensors that were kept beside the parameters."""
        return list(layer.routed_experts.__dict__[ascend_experts.STORED])

    def wiring(self, worker: Any, experts: ExpertRows, asleep: Callable[[], bool]) -> Wiring:
        """See :class:`flexfloor.engine.devices.ascend_experts.AscendWiring`."""
        return ascend_experts.AscendWiring(worker, experts, asleep)

    # -- groups ------------------------------------------------------------------------------

    def make_group(self, name: str, ranks: Sequence[int], store: Store, timeout_s: float) -> Group:
        """See :func:`flexfloor.engine.devices.ascend_groups.survivors`."""
        with self._configured():
            return ascend_groups.survivors(name, ranks, store, timeout_s)

    def make_channel(self, name: str, ranks: Sequence[int], store: Store, timeout_s: float) -> Group:
        """See :func:`flexfloor.engine.devices.ascend_groups.channel`."""
        with self._configured():
            return ascend_groups.channel(name, ranks, store, timeout_s)

    def _configured(self) -> AbstractContextManager[None]:
        """HCCL options of every name but MC2's look at the current configuration (contract: hccl-buffer-by-name)."""
        from vllm.config import set_current_vllm_config

        context: AbstractContextManager[None] = set_current_vllm_config(self._worker.vllm_config)
        return context

    def destroy_group(self, group: Group) -> None:
        """Graphs first: no graph may hold a communicator that goes."""
        torch.npu.set_device(self._at)
        if self._graphs is not None:
            self._graphs.forget(group)
        ascend_groups.destroy(group)

    def set_deadline(self, group: Group, seconds: float) -> None:
        """Every step meets on the host first (contract: dp-metadata-on-host)."""
        if len(group.ranks) > 1:
            host.set_deadline(group.cpu, seconds)

    def transfer(
        self,
        sends: dict[int, list[torch.Tensor]],
        receives: dict[int, list[torch.Tensor]],
        channel: Group,
        deadline_s: float,
    ) -> int:
        """Device tensors in one batch of P2P operations, once each pair has met on the host; host tensors over gloo."""
        tensors = [t for parts in (*sends.values(), *receives.values()) for t in parts]
        if not tensors:
            return 0
        if self._at is None or tensors[0].device != self._at:
            return host.transfer(sends, receives, channel.cpu, deadline_s)
        if any(not t.is_contiguous() for t in tensors):
            raise ProtocolError("rows and parameters that travel must be contiguous")
        peers = sorted({*sends, *receives})
        here = {peer: [torch.zeros(1)] for peer in peers}
        host.transfer(here, {peer: [torch.zeros(1)] for peer in peers}, channel.cpu, deadline_s)
        operations = [
            dist.P2POp(dist.isend, tensor, peer, group=channel.device)
            for peer, parts in sorted(sends.items())
            for tensor in parts
        ] + [
            dist.P2POp(dist.irecv, tensor, peer, group=channel.device)
            for peer, parts in sorted(receives.items())
            for tensor in parts
        ]
        self._stream.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(self._stream):
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            done = torch.npu.Event()
            done.record(self._stream)
        end = time.monotonic() + deadline_s
        while not done.query():
            if time.monotonic() > end:
                raise RuntimeError(f"the transfer timed out after {deadline_s} s")
            time.sleep(POLL_S)
        return sum(t.numel() * t.element_size() for parts in receives.values() for t in parts)

    def peer_lost(self, error: Exception) -> bool:
        """See :func:`flexfloor.engine.devices.host.peer_lost`."""
        return host.peer_lost(error)

    # -- graphs ------------------------------------------------------------------------------

    def settled(self) -> None:
        """The graphs of the world before may go."""
        if self._graphs is not None:
            self._graphs.settled()

    # -- memory ------------------------------------------------------------------------------

    def release(self, tensors: Sequence[torch.Tensor]) -> int:
        """Sleep level 2 of this worker alone; ``tensors`` are in its pools."""
        torch.npu.set_device(self._at)
        torch.npu.synchronize()
        before = self.memory_used()
        self._bound().sleep()
        return max(0, before - self.memory_used())

    def reclaim(self, tensors: Sequence[torch.Tensor]) -> None:
        """Maps the pools again at their old addresses; contents and unsaved tables are undefined."""
        torch.npu.set_device(self._at)
        self._bound().wake()

    def clear(self, tensors: Sequence[torch.Tensor]) -> None:
        """All KV of the runner: keys and values of a layer may share a storage, of which ``tensors`` name one."""
        if tensors and self._worker is not None:
            for tensor in flat(self._worker.model_runner.kv_caches):
                tensor.zero_()
            torch.npu.synchronize()

    def memory_used(self) -> int:
        """Bytes in use on the device (this rank is alone on it)."""
        free, total = torch.npu.mem_get_info()
        return int(total - free)

    def _bound(self) -> Pools:
        if self._pools is None:
            raise ProtocolError("no worker is bound")
        return self._pools


def refuse(worker: Any) -> None:
    """Refuses engine options under which a rank cannot leave and come back, with the line to change.

    Raises:
        RefusedError: names the option and what to set.
    """
    from vllm_ascend.ascend_config import get_ascend_config

    config, runner = worker.vllm_config, worker.model_runner
    model, parallel, graphs = config.model_config, config.parallel_config, config.compilation_config
    problems = [
        *ascend_options.live_problems(get_ascend_config()),
        *ascend_options.variable_problems(os.environ),
    ]
    if problems:
        raise RefusedError(problems[0].what, remedy=problems[0].line)
    if config.use_v2_model_runner:
        raise RefusedError("vLLM's V2 model runner cannot shrink", remedy="export VLLM_USE_V2_MODEL_RUNNER=0")
    if not model.enable_sleep_mode:
        raise RefusedError("a leaving rank gives memory back by sleeping", remedy="enable_sleep_mode: true")
    if config.quant_config is not None:
        raise RefusedError("quantised experts lie in FRACTAL_NZ layout", remedy="use the BF16 checkpoint")
    if model.enable_return_routed_experts:
        raise RefusedError("routed experts are returned by the first world's rank", remedy="remove the option")
    if parallel.world_size != 1:
        raise RefusedError(
            f"a rank has a world of {parallel.world_size} devices (TP, PP or an external launcher)",
            remedy="use one engine a rank with tensor_parallel_size: 1",
        )
    if graphs.cudagraph_mode is not None and graphs.cudagraph_mode.name not in ascend_options.GRAPH_MODES:
        raise RefusedError(
            f"graph mode {graphs.cudagraph_mode.name} was not read", remedy="set cudagraph_mode: FULL_DECODE_ONLY"
        )
    if getattr(runner, "drafter", None) is not None:
        raise RefusedError("a draft model has graphs of its own", remedy="remove speculative_config")
    ascend_limits.check_world(parallel.data_parallel_size, int(model.get_num_experts()))
