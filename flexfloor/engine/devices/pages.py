"""Parts of the weights and of KV that have no memory for now: holes at addresses that stay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch


class Span(NamedTuple):
    """Bytes ``start`` to ``stop`` of a tensor's storage."""

    tensor: torch.Tensor
    start: int
    stop: int

    def address(self) -> tuple[int, int]:
        """The same as addresses."""
        base = int(self.tensor.untyped_storage().data_ptr())
        return base + self.start, base + self.stop


def whole_pages(spans: Iterable[Span], page: int) -> list[tuple[int, int]]:
    """Address ranges of the pages that lie inside of ``spans``, ascending, joined where they touch.

    Args:
        spans: ranges, each looked at by itself: a page that two of them share belongs to neither.
        page: bytes of a page.
    """
    inside = sorted((-(-start // page) * page, stop // page * page) for start, stop in (s.address() for s in spans))
    joined: list[tuple[int, int]] = []
    for start, stop in inside:
        if start >= stop:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def page_bytes(spans: Iterable[Span], page: int) -> int:
    """Bytes of `whole_pages`."""
    return sum(stop - start for start, stop in whole_pages(spans, page))


def between(tensor: torch.Tensor, holes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Flat views of what a tensor's storage holds outside of ``holes`` (address ranges, ascending, apart)."""
    storage, width = tensor.untyped_storage(), tensor.element_size()
    base, count = int(storage.data_ptr()), storage.nbytes() // width
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (count,))
    parts, at = [], 0
    for start, stop in holes:
        first, last = (start - base) // width, -(-(stop - base) // width)
        if last <= 0 or first >= count:
            continue
        parts.append(flat[at : max(at, first)])
        at = last
    parts.append(flat[min(at, count) :])
    return [part for part in parts if part.numel()]
