"""Holes in memory: which pages they are, what lies between them, and that host memory really goes and comes."""

import itertools
import mmap

import psutil
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexfloor.engine.devices.host_pages import HostPages
from flexfloor.engine.devices.pages import Span, between, page_bytes, whole_pages

BYTES, PAGE = 4096, 64
cuts = st.tuples(st.integers(0, BYTES), st.integers(0, BYTES)).map(sorted)


def spans_of(tensor, ranges):
    return [Span(tensor, start, stop) for start, stop in ranges]


@given(st.lists(cuts, max_size=6))
@settings(max_examples=200, deadline=None)
def test_pages_lie_inside_of_a_span_apart_and_ascending(ranges):
    tensor = torch.empty(BYTES, dtype=torch.uint8)
    base, found = tensor.data_ptr(), whole_pages(spans_of(tensor, ranges), PAGE)
    for start, stop in found:
        assert start % PAGE == stop % PAGE == 0
        for page in range(start, stop, PAGE):
            assert any(base + a <= page and page + PAGE <= base + b for a, b in ranges)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))
    inside = {p for a, b in ranges for p in range(-(-(base + a) // PAGE), (base + b) // PAGE)}
    assert page_bytes(spans_of(tensor, ranges), PAGE) == PAGE * len(inside)


@given(st.lists(cuts, max_size=5), st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]))
@settings(max_examples=200, deadline=None)
def test_what_lies_between_holes_is_everything_else(ranges, dtype):
    tensor = torch.zeros(BYTES // dtype.itemsize, dtype=dtype)
    holes = whole_pages(spans_of(tensor, ranges), PAGE)
    parts = between(tensor, holes)
    for part in parts:
        part.fill_(1)
    base = tensor.data_ptr()
    for i, value in enumerate(tensor.tolist()):
        at = base + i * dtype.itemsize
        assert value == (0 if any(a <= at < b for a, b in holes) else 1)


def test_holes_of_another_tensor_change_nothing():
    one, other = torch.zeros(BYTES, dtype=torch.uint8), torch.zeros(BYTES, dtype=torch.uint8)
    holes = whole_pages([Span(other, 0, BYTES)], PAGE)
    assert [part.numel() for part in between(one, holes)] == [BYTES]


def test_host_pages_go_to_the_system_and_come_back_empty():
    pages = HostPages()
    tensor = torch.ones(64 << 20, dtype=torch.uint8)
    before = psutil.Process().memory_info().rss
    pages.hollow([[Span(tensor, 16 << 20, 64 << 20)]])
    assert before - psutil.Process().memory_info().rss > 40 << 20
    kept = sum(part.numel() for part in pages.backed(tensor))
    assert 0 <= kept - (16 << 20) <= 2 * mmap.PAGESIZE
    assert int(tensor[: 16 << 20].sum()) == 16 << 20
    pages.hollow([[]])
    assert [part.numel() for part in pages.backed(tensor)] == [64 << 20]
    assert int(tensor[17 << 20 : 63 << 20].sum()) == 0, "memory that comes back has no old contents"
