"""CUDA: NCCL, full decode graphs, memory given back by vLLM's sleep level 2 on one rank alone.

A survivor set has one NCCL communicator; vLLM's DP and EP coordinators share it, because the AgRs
dispatch and combine run over the DP coordinator only. Rows travel over a communicator of their own.
Sleep unmaps the weights and KV pools of this process and keeps their addresses, so captured graphs,
views and the expert maps stay valid when the pools are mapped again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import Store

from flexfloor.engine import upstream
from flexfloor.engine.coordinators import Group
from flexfloor.engine.devices import cuda_pages, host
from flexfloor.engine.devices.base import Limits
from flexfloor.engine.devices.cuda_graphs import GraphStore
from flexfloor.engine.devices.decode_graphs import GraphedDevice
from flexfloor.engine.devices.pages import Span
from flexfloor.engine.devices.step_counter import StepCounter
from flexfloor.errors import ProtocolError, RefusedError

if TYPE_CHECKING:
    from flexfloor.engine.experts import ExpertRows
    from flexfloor.engine.wiring import Wiring

POLL_S = 0.0002


class CudaDevice(GraphedDevice):
    """NVIDIA GPUs, one a rank."""

    name = "cuda"
    page = cuda_pages.PAGE
    _steps = StepCounter()
    _pages = cuda_pages.CuMemPages()

    def __init__(self) -> None:
        self._worker: Any = None
        self._at = torch.device("cuda")
        self._stream: torch.cuda.Stream | None = None
        self._graphs: GraphStore | None = None

    def limits(self) -> Limits:
        """Graphs are captured; expert rows and KV share the memory and change places between steps."""
        return Limits(graphs=True, kv_resize=True, refused_options={}, slow_groups=True)

    def patch(self, combine: str) -> None:
        """Counts model steps; in verification mode see :mod:`flexfloor.engine.devices.cuda_combine`."""
        upstream.check(upstream.CUDA)
        from vllm.compilation.cuda_graph import CUDAGraphWrapper
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner
        from vllm.v1.worker.gpu_worker import Worker

        from flexfloor.engine import room_patches
        from flexfloor.engine.devices import cuda_pool

        self._steps.apply(CUDAGraphWrapper, GPUModelRunner)
        cuda_pool.apply()
        room_patches.widen(Worker, self)
        room_patches.open_for_reload(Worker)
        if combine == "invariant":
            from flexfloor.engine.devices import cuda_combine

            cuda_combine.apply()

    def wiring(self, worker: Any, experts: ExpertRows, asleep: Callable[[], bool]) -> Wiring:
        """See :class:`flexfloor.engine.devices.cuda_wiring.CudaWiring`."""
        from flexfloor.engine.devices.cuda_wiring import CudaWiring

        return CudaWiring(worker, experts, asleep)

    def bind(self, worker: Any) -> None:
        """Refuses what cannot shrink; takes over the graphs that vLLM captured."""
        config = worker.vllm_config
        refuse(config)
        refuse_backends(worker.model_runner.get_model())
        self._worker, self._at = worker, worker.device
        self._stream = torch.cuda.Stream(self._at)
        self._graphs = GraphStore.of(worker.model_runner)
        self._steps.read()

    # -- groups ------------------------------------------------------------------------------

    def make_group(self, name: str, ranks: Sequence[int], store: Store, timeout_s: float) -> Group:
        """A gloo group, and one NCCL communicator for both coordinators."""
        from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

        pg = host.gloo_group(name, ranks, store, timeout_s)
        group = Group(tuple(ranks), pg, pg)
        if len(ranks) > 1:
            communicator = CudaCommunicator(pg, self._at, pg, "ep:0", use_all2all=True)
            manager = communicator.all2all_manager
            manager.dp_rank = list(ranks).index(dist.get_rank())
            manager.dp_world_size = len(ranks)
            group.communicator = group.dp_communicator = communicator
        return group

    def make_channel(self, name: str, ranks: Sequence[int], store: Store, timeout_s: float) -> Group:
        """A gloo group and a communicator whose connections between all pairs are already made."""
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        pg = host.gloo_group(name, ranks, store, timeout_s)
        channel = Group(tuple(ranks), pg, pg, communicator=PyNcclCommunicator(pg, self._at))
        me = dist.get_rank()
        peers = [rank for rank in ranks if rank != me]
        self.transfer(
            {peer: [torch.zeros(1, device=self._at)] for peer in peers},
            {peer: [torch.zeros(1, device=self._at)] for peer in peers},
            channel,
            timeout_s,
        )
        return channel

    def destroy_group(self, group: Group) -> None:
        """Graphs first: a communicator is not freed while a graph holds it."""
        with torch.cuda.device(self._at), nullcontext() if self._graphs is None else self._graphs.alone():
            if self._graphs is not None:
                self._graphs.forget(group)
            if group.communicator is not None:
                group.communicator.destroy()
            dist.destroy_process_group(group.cpu)

    def set_deadline(self, group: Group, seconds: float) -> None:
        """Every step meets on the host first, so the host group's deadline holds for it."""
        if len(group.ranks) > 1:
            host.set_deadline(group.cpu, seconds)

    def transfer(
        self,
        sends: dict[int, list[torch.Tensor]],
        receives: dict[int, list[torch.Tensor]],
        channel: Group,
        deadline_s: float,
    ) -> int:
        """Device tensors in one NCCL group call, after each pair has met on the host; host tensors over gloo."""
        tensors = [t for parts in (*sends.values(), *receives.values()) for t in parts]
        if not tensors:
            return 0
        if tensors[0].device.type == "cpu":
            return host.transfer(sends, receives, channel.cpu, deadline_s)
        if any(not t.is_contiguous() for t in tensors):
            raise ProtocolError("rows and parameters that travel must be contiguous")
        peers = sorted({*sends, *receives})
        here = {peer: [torch.zeros(1)] for peer in peers}
        host.transfer(here, {peer: [torch.zeros(1)] for peer in peers}, channel.cpu, deadline_s)
        stream = self._stream
        if stream is None:
            raise ProtocolError("no worker is bound")
        stream.wait_stream(torch.cuda.current_stream(self._at))
        nccl, place = channel.communicator, channel.ranks.index
        nccl.group_start()
        for peer, parts in sorted(sends.items()):
            for tensor in parts:
                nccl.send(tensor, place(peer), stream)
        for peer, parts in sorted(receives.items()):
            for tensor in parts:
                nccl.recv(tensor, place(peer), stream)
        nccl.group_end()
        self._wait(stream, deadline_s)
        return sum(t.numel() * t.element_size() for parts in receives.values() for t in parts)

    @staticmethod
    def _wait(stream: torch.cuda.Stream, deadline_s: float) -> None:
        done = torch.cuda.Event()
        done.record(stream)
        end = time.monotonic() + deadline_s
        while not done.query():
            if time.monotonic() > end:
                raise RuntimeError(f"the transfer timed out after {deadline_s} s")
            time.sleep(POLL_S)

    def peer_lost(self, error: Exception) -> bool:
        """See :func:`flexfloor.engine.devices.host.peer_lost`."""
        return host.peer_lost(error)

    # -- memory ------------------------------------------------------------------------------

    def release(self, tensors: Sequence[torch.Tensor]) -> int:
        """Sleep level 2 of this worker alone; the driver's free memory says what went. ``tensors`` are in its pools."""
        with torch.cuda.device(self._at):
            torch.cuda.synchronize()
            before = self.memory_used()
            self._worker.sleep(2)
            return max(0, before - self.memory_used())

    def reclaim(self, tensors: Sequence[torch.Tensor]) -> None:
        """Maps both pools again at their old addresses and rewrites the buffers that sleep saved."""
        with torch.cuda.device(self._at):
            self._worker.wake_up(None)

    def clear(self, tensors: Sequence[torch.Tensor]) -> None:
        """On the device, the whole storage of each; done on return, because other threads have streams of their own."""
        for tensor in tensors:
            for part in self.backed(tensor):
                part.zero_()
        torch.cuda.current_stream(self._at).synchronize()

    def outline(self, choices: Sequence[Sequence[Span]], *, keep: bool) -> None:
        """See :meth:`flexfloor.engine.devices.cuda_pages.CuMemPages.outline`."""
        self._pages.outline(choices, keep=keep)

    def hollow(self, holes: Sequence[Sequence[Span]]) -> None:
        """See :meth:`flexfloor.engine.devices.cuda_pages.CuMemPages.hollow`."""
        self._pages.hollow(holes)

    def awake(self, tensor: torch.Tensor) -> bool:
        """See :meth:`flexfloor.engine.devices.cuda_pages.CuMemPages.awake`."""
        return self._pages.awake(tensor)

    def backed(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Without the holes."""
        return self._pages.backed(tensor)

    def memory_used(self) -> int:
        """Bytes in use on the device, by the driver (this rank is alone on it)."""
        free, total = torch.cuda.mem_get_info(self._at)
        return int(total - free)


def refuse(config: Any) -> None:
    """Refuses engine options under which a CUDA rank cannot leave and come back.

    Raises:
        RefusedError: names the option and what to set.
    """
    model, parallel = config.model_config, config.parallel_config
    if config.use_v2_model_runner:
        raise RefusedError("vLLM's V2 model runner cannot shrink", remedy="set VLLM_USE_V2_MODEL_RUNNER=0")
    if not model.enable_sleep_mode:
        raise RefusedError("a leaving rank gives memory back by sleeping", remedy="set enable_sleep_mode: true")
    if parallel.all2all_backend != "allgather_reducescatter":
        raise RefusedError(
            f"all2all backend {parallel.all2all_backend} was not tested",
            remedy="set all2all_backend: allgather_reducescatter",
        )
    if config.weight_transfer_config is not None:
        raise RefusedError(
            "vLLM's weight transfer writes whole parameters, rows without memory too",
            remedy="leave weight_transfer_config out and load weights with reload_weights or update_weights_from_ipc",
        )
    mode = config.compilation_config.cudagraph_mode
    if mode is not None and mode.name not in ("NONE", "FULL_DECODE_ONLY"):
        raise RefusedError(f"graph mode {mode.name} was not tested", remedy="set cudagraph_mode: FULL_DECODE_ONLY")


def refuse_backends(model: torch.nn.Module) -> None:
    """Refuses expert kernels that read or rewrite whole parameters, rows without memory too.

    Raises:
        RefusedError: names the backend and what to set.
    """
    for module in model.modules():
        backend = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
        name = getattr(backend, "name", None)
        if name is not None and name not in ("TRITON", "BATCHED_TRITON"):
            raise RefusedError(f"MoE backend {name} was not tested", remedy="set moe_backend: triton")
