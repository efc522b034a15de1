"""A stand-in for torch_npu on CPU: the calls that the module makes, over gloo. It computes nothing.

``install`` puts it in place of `torch.npu` and registers an "hccl" backend.
"""

import contextlib
import types
from unittest.mock import MagicMock

import journal
import torch
import torch.distributed as dist

ND = 2
_backends = []
_names = set()
used_bytes = [0]


def get_npu_format(self):
    return ND


class _Options:
    def __init__(self):
        self.hccl_config = {}


_C = types.SimpleNamespace(
    _NPUTaskGroupHandle=object,
    _distributed_c10d=types.SimpleNamespace(ProcessGroupHCCL=types.SimpleNamespace(Options=_Options)),
)


class HcclOverGloo(dist.ProcessGroupGloo):
    """Carries what HCCL would; its communicator is made by the first call that needs it."""

    def get_hccl_comm_name(self, rankid, init_comm=True):
        if not self.opened and init_comm:
            self.opened = True
            journal.note("open", self.hccl_name)
            if journal.phase[0] not in ("start", "stage"):
                journal.breaks("opened-in-staging", f"{self.hccl_name} is made in the phase {journal.phase[0]}")
        return self.hccl_name


def _make(opts, pg_options):
    backend = HcclOverGloo(opts.store, opts.group_rank, opts.group_size, opts.timeout)
    config = dict(pg_options.hccl_config) if pg_options is not None else {"group_name": "world"}
    backend.hccl_name, backend.opened = config["group_name"], False
    if backend.hccl_name in _names:
        journal.breaks("unique-names", f"HCCL name {backend.hccl_name} is used twice")
    _names.add(backend.hccl_name)
    if ("mc2" in backend.hccl_name) == ("hccl_buffer_size" in config) and pg_options is not None:
        journal.breaks("buffer-sizes", f"{backend.hccl_name} has {config}")
    journal.note("group", backend.hccl_name, tuple(opts.global_ranks_in_group), config.get("hccl_buffer_size"))
    _backends.append(backend)
    return backend


class Stream:
    def wait_stream(self, stream):
        journal.note("wait_stream")


class Event:
    def record(self, stream=None):
        pass

    def query(self):
        return True


def _total():
    return 1 << 30


def install():
    npu = types.SimpleNamespace(
        ExternalEvent=object,
        memory=MagicMock(),  # named in annotations only
        Stream=Stream,
        Event=Event,
        stream=lambda stream: contextlib.nullcontext(),
        current_stream=lambda: Stream(),
        current_device=lambda: torch.device("cpu"),
        set_device=lambda device: None,
        synchronize=lambda: journal.note("synchronize"),
        empty_cache=lambda: None,
        mem_get_info=lambda: (_total() - used_bytes[0], _total()),
    )
    torch.utils.rename_privateuse1_backend("npu")
    torch.npu = npu
    dist.Backend.register_backend("hccl", _make, extended_api=True, devices=["npu", "cpu"])
