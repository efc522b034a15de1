"""Which pieces of vLLM's CuMem allocations have memory: the real bookkeeping over an allocator that only records."""

import mmap
import random
from types import SimpleNamespace

import pytest
import torch
from vllm.device_allocator import cumem

from flexfloor.engine.devices import cuda_pages
from flexfloor.engine.devices.pages import Span

PAGE = 4096
PAGES = 64


class Memory:
    """Pages of one allocation a tag, and vLLM's table of them."""

    def __init__(self):
        self.buffers = {
            tag: torch.frombuffer(mmap.mmap(-1, PAGES * PAGE), dtype=torch.uint8) for tag in ("weights", "kv_cache")
        }
        self.mapped, self.pointer_to_data = set(), {}
        for tag in self.buffers:
            handle = (0, PAGES * PAGE, self.base(tag), 0)
            self.pointer_to_data[self.base(tag)] = cumem.AllocationData(handle, tag)
            self.map(handle)

    def base(self, tag):
        return self.buffers[tag].data_ptr()

    def pages(self, handle):
        return set(range(handle[2], handle[2] + handle[1], PAGE))

    def map(self, handle):
        assert not self.pages(handle) & self.mapped, "mapped twice"
        self.mapped |= self.pages(handle)

    def unmap(self, handle):
        assert self.pages(handle) <= self.mapped, "unmapped twice"
        self.mapped -= self.pages(handle)

    def hole(self, tag, first):
        """From page ``first`` to the end, not on a page's edge."""
        return Span(self.buffers[tag], first * PAGE - 100, PAGES * PAGE)

    def held(self, tag):
        return {(page - self.base(tag)) // PAGE for page in self.mapped & self.pages((0, PAGES * PAGE, self.base(tag)))}

    def sleep(self, tags):
        for data in self.pointer_to_data.values():
            if data.tag in tags:
                self.unmap(data.handle)
                data.is_asleep = True

    def wake(self, tags):
        for data in self.pointer_to_data.values():
            if data.tag in tags and data.is_asleep:
                self.map(data.handle)
                data.is_asleep = False


@pytest.fixture
def memory(monkeypatch):
    made = Memory()
    copies = SimpleNamespace(cudaMemcpy=lambda *_: None, cudaMemset=lambda *_: None)
    monkeypatch.setattr(cumem, "libcudart", copies)
    monkeypatch.setattr(cumem, "create_and_map", made.map)
    monkeypatch.setattr(cumem, "unmap_and_release", made.unmap)
    monkeypatch.setattr(cumem.CuMemAllocator, "get_instance", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(cuda_pages, "PAGE", PAGE)
    return made


EDGES = (7, 16, 32, 48)


@pytest.fixture
def pages(memory):
    made = cuda_pages.CuMemPages()
    for tag in memory.buffers:
        made.outline([[memory.hole(tag, edge)] for edge in EDGES], keep=False)
    return made


def test_cutting_leaves_everything_mapped(memory, pages):
    assert memory.held("weights") == memory.held("kv_cache") == set(range(PAGES))
    assert sum(data.handle[1] for data in memory.pointer_to_data.values()) == 2 * PAGES * PAGE


def test_holes_come_and_go_and_nothing_else_moves(memory, pages):
    drawn = random.Random(1)
    for _ in range(40):
        edge = {tag: drawn.choice([*EDGES, None]) for tag in memory.buffers}
        pages.hollow([[memory.hole(tag, at)] for tag, at in edge.items() if at is not None])
        for tag, at in edge.items():
            assert memory.held(tag) == set(range(PAGES if at is None else at))
            kept = sum(part.numel() for part in pages.backed(memory.buffers[tag]))
            assert kept == memory.buffers[tag].numel() - PAGE * (0 if at is None else PAGES - at)


def test_a_hole_that_ends_between_cuts_takes_whole_pieces_only(memory, pages):
    pages.hollow([[memory.hole("weights", 20)]])
    assert memory.held("weights") == set(range(32))


def test_a_sleeping_pool_changes_its_holes_and_wakes_with_the_new_ones(memory, pages):
    pages.hollow([[memory.hole("kv_cache", 16)]])
    memory.sleep(("weights", "kv_cache"))
    memory.wake(("weights",))
    assert pages.awake(memory.buffers["weights"])
    assert not pages.awake(memory.buffers["kv_cache"])
    pages.hollow([[memory.hole("weights", 32)], [memory.hole("kv_cache", 48)]])
    assert memory.held("weights") == set(range(32))
    assert memory.held("kv_cache") == set()
    memory.wake(("kv_cache",))
    assert memory.held("kv_cache") == set(range(48))


def test_outlining_again_changes_nothing(memory, pages):
    before = dict(memory.pointer_to_data)
    pages.outline([[memory.hole("weights", edge)] for edge in EDGES], keep=False)
    assert memory.pointer_to_data == before
