"""Holes in vLLM's CuMem pools: parts of an allocation are unmapped and mapped again at the same address.

vLLM maps every allocation of its pools as one piece. An allocation that can get holes is cut, once, at every edge that
a hole can have; each piece then has a handle of its own and stands in the allocator's table, so that sleep and wake
treat it like any allocation. A piece that is a hole is taken out of the table: waking does not bring it back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from flexfloor.engine.devices.pages import Span, between, whole_pages
from flexfloor.errors import ProtocolError

PAGE = 2 << 20
"""Granularity of device memory mappings, bytes."""


@dataclass
class Piece:
    """A part of an allocation.

    Attributes:
        handle: device, bytes, address and address of the memory handle, as vLLM's extension takes them.
        tag: the pool.
    """

    handle: tuple[int, int, int, int]
    tag: str


@dataclass
class CuMemPages:
    """The holes of one process.

    Attributes:
        pieces: of all cut allocations, by address.
    """

    pieces: dict[int, Piece] = field(default_factory=dict)

    def outline(self, choices: Iterable[Sequence[Span]], *, keep: bool) -> None:
        """Cut allocations at the edges of all holes that may come; nothing may run on the device.

        Args:
            choices: sets of holes that :meth:`hollow` may be given.
            keep: keep the contents (needs memory for one more copy of an allocation); else they are zeroed.
        """
        ranges = {part for spans in choices for part in whole_pages(spans, PAGE)}
        for address, data in list(_allocator().pointer_to_data.items()):
            if address in self.pieces:
                continue
            end = address + int(data.handle[1])
            touching = [(start, stop) for start, stop in ranges if start < end and address < stop]
            if touching:
                cuts = {edge for part in touching for edge in part if address < edge < end}
                self._cut(address, data, [address, *sorted(cuts), end], keep=keep)
        torch.cuda.empty_cache()

    def _cut(self, address: int, data: Any, edges: list[int], *, keep: bool) -> None:
        from vllm.device_allocator.cumem import AllocationData, create_and_map, libcudart, unmap_and_release

        if data.is_asleep:
            raise ProtocolError("memory is cut while it is mapped only")
        allocator = _allocator()
        size = edges[-1] - address
        saved = None
        if keep:
            saved = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", int(data.handle[0])))
            libcudart.cudaMemcpy(saved.data_ptr(), address, size)
        torch.cuda.synchronize()
        unmap_and_release(data.handle)
        del allocator.pointer_to_data[address]
        for start, stop in pairwise(edges):
            piece = Piece((data.handle[0], stop - start, start, _cell()), data.tag)
            create_and_map(piece.handle)
            self.pieces[start] = piece
            allocator.pointer_to_data[start] = AllocationData(piece.handle, piece.tag)
        if saved is not None:
            libcudart.cudaMemcpy(address, saved.data_ptr(), size)
        else:
            libcudart.cudaMemset(address, 0, size)
        torch.cuda.synchronize()

    def hollow(self, holes: Iterable[Sequence[Span]]) -> None:
        """Exactly the pieces that lie inside of these spans have no memory from now on.

        A piece of a sleeping pool gets its memory when the pool wakes.
        """
        from vllm.device_allocator.cumem import AllocationData, create_and_map, unmap_and_release

        table = _allocator().pointer_to_data
        ranges = whole_pages([span for spans in holes for span in spans], PAGE)
        empty = {address: _inside(piece, ranges) for address, piece in self.pieces.items()}
        asleep = {data.tag for data in table.values() if data.is_asleep}
        torch.cuda.synchronize()
        for address, piece in self.pieces.items():
            if empty[address] and address in table:
                if piece.tag not in asleep:
                    unmap_and_release(piece.handle)
                del table[address]
        for address, piece in self.pieces.items():
            if not empty[address] and address not in table:
                if piece.tag not in asleep:
                    create_and_map(piece.handle)
                table[address] = AllocationData(piece.handle, piece.tag, is_asleep=piece.tag in asleep)

    def awake(self, tensor: torch.Tensor) -> bool:
        """Whether the pool of a tensor is mapped."""
        at = int(tensor.untyped_storage().data_ptr())
        return not any(
            a <= at < a + data.handle[1] and data.is_asleep for a, data in _allocator().pointer_to_data.items()
        )

    def backed(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """See :meth:`flexfloor.engine.devices.base.Device.backed`."""
        table = _allocator().pointer_to_data
        empty = sorted((a, a + piece.handle[1]) for a, piece in self.pieces.items() if a not in table)
        return between(tensor, empty)


def _inside(piece: Piece, ranges: Sequence[tuple[int, int]]) -> bool:
    start, stop = piece.handle[2], piece.handle[2] + piece.handle[1]
    return any(first <= start and stop <= last for first, last in ranges)


def _cell() -> int:
    """Room for one memory handle, from the C heap: the extension frees it with ``free``."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    return int(libc.malloc(ctypes.c_size_t(ctypes.sizeof(ctypes.c_uint64))))


def _allocator() -> Any:
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance()
