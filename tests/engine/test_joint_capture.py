"""Members of a world capture the same graphs the same way: a pass through the model is joint."""

import multiprocessing
import threading
from collections import namedtuple
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import gloo_member
import pytest
import torch
from vllm.config import CUDAGraphMode

from flexfloor.elastic.ticket import Ticket
from flexfloor.engine.coordinators import Group
from flexfloor.engine.devices import cuda_graphs, host
from flexfloor.engine.devices.cuda_graphs import GraphStore
from flexfloor.engine.devices.decode_graphs import GraphedDevice
from flexfloor.engine.world import ElasticWorld

Key = namedtuple("Key", "num_tokens")
ALL = [Key(size) for size in (1, 2, 4, 8)]


class Runner:
    """Notes each pass: batch, warm-up passes, and through how many of its layers."""

    def __init__(self):
        self.passes, self.fails = [], False
        self.vllm_config, self.device, self.kv_caches = None, None, []
        self.cudagraph_dispatcher = SimpleNamespace(
            cudagraph_keys={CUDAGraphMode.FULL: set(ALL)}, _bs_to_padded_graph_size=[0, 1, 2, 4, 4, 8, 8, 8, 8]
        )
        self.inner = torch.nn.Module()
        self.inner.layers = torch.nn.ModuleList(MoERunnerInterface() for _ in range(6))
        self.inner.start_layer, self.inner.end_layer = 0, 6
        self.wrapper = SimpleNamespace(concrete_cudagraph_entries=dict.fromkeys(ALL, "full world"))

    def get_model(self):
        return self.inner

    def _warmup_and_capture(self, key, mode, num_warmups, profiler):
        assert key not in self.wrapper.concrete_cudagraph_entries, "an entry would be replayed, not captured"
        warm = self.inner.end_layer if num_warmups else 0
        with profiler:
            self.passes.append((key.num_tokens, warm, self.inner.end_layer))
        if self.fails:
            raise RuntimeError("a kernel was loaded while a stream was captured")
        self.wrapper.concrete_cudagraph_entries[key] = "captured"


class MoERunnerInterface(torch.nn.Module):
    """What vLLM takes for experts is told by this name."""


@pytest.fixture
def runner(monkeypatch):
    @contextmanager
    def stream(**_):
        yield

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr("vllm.distributed.parallel_state.graph_capture", stream)
    monkeypatch.setattr("vllm.config.set_current_vllm_config", lambda _: nullcontext())
    monkeypatch.setattr(cuda_graphs, "addresses", lambda _: (1, 2, 3))
    return Runner()


@pytest.fixture
def store(runner):
    return GraphStore(runner, runner.wrapper)


def others_need(monkeypatch, *needs):
    """What the other members of the world need, bucket by bucket, largest first."""
    monkeypatch.setattr(host, "most", lambda values, _: [max(pair) for pair in zip(values, needs, strict=True)])


def group(*ranks):
    return Group(ranks, None, None)


def test_alone_a_new_bucket_is_warmed_by_the_first_experts_once(runner, store):
    world = group(0)
    assert store.ready(world, 4, lean=True)["captured"] == [4]
    assert store.ready(world, 4)["captured"] == [1, 2]
    assert store.ready(world, 4) | {"capture": 0} == {"captured": [], "kept": [1, 2, 4], "capture": 0}
    assert runner.passes == [(4, 1, 6), (2, 1, 6), (1, 1, 6)]


def test_after_a_capture_that_failed_warm_ups_are_whole(runner, store):
    runner.fails = True
    with pytest.raises(RuntimeError):
        store.ready(group(0), 4, lean=True)
    runner.fails = False
    assert store.ready(group(0), 4, lean=True)["captured"] == [4]
    assert runner.passes == [(4, 1, 6), (4, 6, 6)]
    assert runner.inner.end_layer == 6


def test_a_later_capture_that_fails_leaves_the_graphs_that_work(runner, store):
    world = group(0)
    store.ready(world, 8, lean=True)
    runner.fails = True
    with pytest.raises(RuntimeError):
        store.ready(world, 4, lean=True)
    there = runner.wrapper.concrete_cudagraph_entries
    dispatcher = runner.cudagraph_dispatcher
    assert set(there) == dispatcher.cudagraph_keys[CUDAGraphMode.FULL] == {Key(8)}
    assert dispatcher._bs_to_padded_graph_size[3] == 8, "a smaller batch is padded to the graph that is there"


@pytest.mark.parametrize(
    ("combine", "lean", "captured"),
    [("stock", True, [4]), ("stock", False, [1, 2, 4]), ("invariant", True, [1, 2, 4])],
)
def test_verification_captures_every_graph_that_the_full_world_would_use(store, combine, lean, captured):
    device = SimpleNamespace(_graphs=store, set_deadline=lambda *_: None)
    device.capture = lambda *args: GraphedDevice.capture(device, *args)
    device.capture_one = lambda *args: GraphedDevice.capture_one(device, *args)
    world = ElasticWorld.__new__(ElasticWorld)
    world.rank, world._runner, world._next, world._here = 0, None, group(0), None
    world._device, world._settings = device, SimpleNamespace(combine=combine)
    ticket = Ticket(serial=1, before=(0, 1), after=(0,), moves=(), load=3, lean=lean)
    assert world.capture(ticket)["captured"] == captured


def test_a_member_captures_again_what_another_one_lacks(runner, store, monkeypatch):
    world = group(0, 1)
    others_need(monkeypatch, cuda_graphs.Need.SHORT)
    store.ready(world, 4, lean=True)
    others_need(monkeypatch, cuda_graphs.Need.SHORT)
    assert store.ready(world, 4, lean=True)["captured"] == [4]
    others_need(monkeypatch, cuda_graphs.Need.NOTHING)
    assert store.ready(world, 4, lean=True)["kept"] == [4]
    assert runner.passes == [(4, 1, 6), (4, 1, 6)]


def test_a_member_warms_up_like_the_one_that_needs_most(runner, store, monkeypatch):
    others_need(monkeypatch, cuda_graphs.Need.WHOLE, cuda_graphs.Need.SHORT, cuda_graphs.Need.CAPTURE)
    store.ready(group(0, 1), 4)
    assert runner.passes == [(4, 6, 6), (2, 1, 6), (1, 1, 6)]


@pytest.mark.parametrize(("frees_for", "patience", "waits"), [(0.2, 5.0, True), (30.0, 0.1, False)])
def test_a_capture_waits_for_memory_that_is_being_freed_but_not_for_ever(
    runner, store, monkeypatch, frees_for, patience, waits
):
    monkeypatch.setattr(cuda_graphs, "FREEING_S", patience)
    began, freed = threading.Event(), threading.Event()

    def free():
        with store.alone():
            began.set()
            freed.wait(frees_for)
            freed.set()

    thread = threading.Thread(target=free)
    thread.start()
    began.wait(5)
    store.ready(group(0), 4, lean=True)
    assert freed.is_set() is waits
    freed.set()
    thread.join()


def test_two_processes_learn_the_most_that_either_needs(tmp_path):
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    needs = ([0, 2, 3], [1, 1, 3])
    members = [
        context.Process(target=gloo_member.most, args=(rank, tmp_path / "store", needs[rank], answers))
        for rank in (0, 1)
    ]
    for one in members:
        one.start()
    found = dict(answers.get(timeout=120) for _ in members)
    for one in members:
        one.join(timeout=30)
    assert found == {0: [1, 2, 3], 1: [1, 2, 3]}
