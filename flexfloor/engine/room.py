"""How the memory of one rank is split between expert rows and KV, floor by floor.

Rows and KV are laid out once, at their largest: E / smallest floor rows, and the KV that there would be room for with
the rows of the full world alone. For a floor, the first E / floor rows of every weight and as many of the first KV
blocks as the rest of memory holds have memory; what lies behind are holes. Addresses never change, so views, expert
maps, block tables and captured graphs stay valid.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from math import ceil
from typing import Any

import torch

from flexfloor.engine.devices.base import Device
from flexfloor.engine.devices.pages import Span, page_bytes
from flexfloor.engine.experts import ExpertRows, empty_rows
from flexfloor.engine.memory import flat
from flexfloor.engine.settings import EngineSettings
from flexfloor.errors import RefusedError


def least_blocks(longest: int, block: int) -> int:
    """KV blocks without which one sequence of ``longest`` tokens does not fit; vLLM keeps one for itself."""
    return ceil(longest / block) + 1


class RowHoles:
    """Which parts of the expert weights a floor leaves without memory.

    Args:
        device: the device module.
        experts: the rows.
        settings: the engine settings.

    Attributes:
        sizes: the floors that the rows suffice for, the full world first.
    """

    def __init__(self, device: Device, experts: ExpertRows, settings: EngineSettings) -> None:
        self._experts, self._page = experts, device.page
        sizes = range(settings.world_size, settings.smallest_floor - 1, -1)
        self.sizes = tuple(size for size in sizes if experts.experts % size == 0)

    def rows(self, floor: int) -> int:
        """Rows with memory: E / floor."""
        return self._experts.experts // floor

    def spans(self, floor: int) -> list[Span]:
        """The rows of a smaller floor alone, in every weight."""
        return [_behind(weight, self.rows(floor)) for weight in self._experts.tensors()]

    def spared(self, floor: int) -> int:
        """Bytes that the holes of ``floor`` leave to others."""
        return page_bytes(self.spans(floor), self._page)


def _behind(weight: torch.Tensor, rows: int) -> Span:
    """Row ``rows`` of a weight and all after it."""
    if weight.stride(0) < max(weight.stride()):
        raise RefusedError("expert rows do not lie one behind the other", remedy="use another MoE backend")
    item, row = weight.element_size(), weight.stride(0) * weight.element_size()
    first = weight.storage_offset() * item
    return Span(weight, first + rows * row, first + weight.shape[0] * row)


class Room:
    """Makes room for a floor on one rank.

    Args:
        device: the device module.
        experts: the rows.
        runner: vLLM's model runner, its KV allocated.
        settings: the engine settings.
        charged: rows and KV share one budget (KV was sized by what memory is left).

    Raises:
        RefusedError: with the rows of the smallest floor no request of full length fits.
    """

    def __init__(
        self, device: Device, experts: ExpertRows, runner: Any, settings: EngineSettings, *, charged: bool
    ) -> None:
        self._device, self._experts, self._poison = device, experts, settings.poison
        self._views = [_KvView(tensor, runner.kv_cache_config.num_blocks) for tensor in flat(runner.kv_caches)]
        self._holes = RowHoles(device, experts, settings)
        self._blocks = int(runner.kv_cache_config.num_blocks)
        self.blocks = {floor: self._blocks_for(floor) if charged else self._blocks for floor in self._holes.sizes}
        least = least_blocks(runner.max_model_len, runner.cache_config.block_size)
        smallest = self._holes.sizes[-1]
        if self.blocks[smallest] < least:
            raise RefusedError(
                f"beside the expert rows of floor {smallest} there are {self.blocks[smallest]} KV blocks, one sequence "
                f"may need {least}",
                remedy="plan a larger smallest floor or lower engine.max_model_len",
            )
        device.outline([self._holes.spans(floor) for floor in self._holes.sizes], keep=True)
        device.outline([self._kv_spans(blocks) for blocks in self.blocks.values()], keep=False)
        self._now = (experts.capacity, self._blocks)
        self.make(settings.world_size, None)

    def _blocks_for(self, floor: int) -> int:
        """The most KV blocks whose holes pay for the rows of ``floor``."""
        owed = self._holes.spared(self._holes.sizes[0]) - self._holes.spared(floor)
        low, high = 0, self._blocks
        while low < high:
            middle = (low + high + 1) // 2
            pays = page_bytes(self._kv_spans(middle), self._device.page) >= owed
            low, high = (middle, high) if pays else (low, middle - 1)
        return low

    def _kv_spans(self, blocks: int) -> list[Span]:
        return [span for view in self._views for span in view.behind(blocks)]

    @property
    def rows(self) -> int:
        """Expert rows that have memory."""
        return self._now[0]

    def make(self, floor: int, blocks: int | None) -> tuple[int, int]:
        """Give the rows of ``floor`` and KV their memory; the engine is idle.

        Args:
            floor: smallest EP size of the step.
            blocks: KV blocks that are wanted; None: all that there is room for.

        Returns:
            Rows and KV blocks that have memory; never more blocks than there is room for.

        Raises:
            RuntimeError: memory that was to come is not there. The rows of the full world stand as before, all others
                hold nothing, KV is empty; the sizes are those of before where even that was possible.
        """
        rows = self._holes.rows(floor)
        blocks = min(self.blocks[floor], blocks or self._blocks)
        before = self._now
        if (rows, blocks) != before:
            try:
                self._lay_out(rows, blocks)
            except Exception:
                self._now = (0, 0)
                self._lay_out(*before)
                raise
        return self._now

    def _lay_out(self, rows: int, blocks: int) -> None:
        floor = self._experts.experts // rows
        self._device.hollow([self._holes.spans(floor), self._kv_spans(blocks)])
        before, self._now = self._now, (rows, blocks)
        self._fill(before[0] or self._holes.rows(self._holes.sizes[0]), rows)
        self._clear(before[1], blocks)

    @contextmanager
    def all_rows(self) -> Iterator[None]:
        """For a while all rows have memory, at the cost of KV; the engine is idle and its KV means nothing."""
        rows, blocks = self._now
        try:
            self.make(self._holes.sizes[-1], None)
            yield
        finally:
            self._now = (0, 0)  # what wrote whole parameters gave pages of the host memory again
            self._lay_out(rows, blocks)

    def _fill(self, first: int, rows: int) -> None:
        """Rows that have just got memory hold nothing yet."""
        empty_rows(filter(self._device.awake, self._experts.tensors()), first, rows, poison=self._poison)

    def _clear(self, first: int, blocks: int) -> None:
        """A masked position still multiplies what is there: KV must be finite."""
        with torch.inference_mode():
            for view in self._views:
                if self._device.awake(view.tensor):
                    view.part(first, blocks).zero_()


class _KvView:
    """One layer's view of the KV memory.

    Args:
        tensor: the view; one of its dimensions counts blocks, or equal parts of them.
        blocks: KV blocks of the cache.
    """

    def __init__(self, tensor: torch.Tensor, blocks: int) -> None:
        found = [d for d, size in enumerate(tensor.shape) if size >= blocks and size % blocks == 0]
        if not found:
            raise RefusedError(
                f"no dimension of a KV cache {tuple(tensor.shape)} counts its {blocks} blocks",
                remedy="use another attention backend",
            )
        self.tensor, self._at = tensor, found[0]
        self._split = tensor.shape[self._at] // blocks

    def part(self, first: int, stop: int) -> torch.Tensor:
        """Blocks ``first`` to ``stop``."""
        return self.tensor.narrow(self._at, first * self._split, max(0, stop - first) * self._split)

    def behind(self, blocks: int) -> list[Span]:
        """Block ``blocks`` and all after it: one span for each index of the dimensions that lie outside of blocks."""
        tensor, at, item = self.tensor, self._at, self.tensor.element_size()
        outside = [d for d in range(tensor.dim()) if d != at and tensor.stride(d) > tensor.stride(at)]
        inside = sum((tensor.shape[d] - 1) * tensor.stride(d) for d in range(tensor.dim()) if d not in (*outside, at))
        spans = []
        for index in product(*(range(tensor.shape[d]) for d in outside)):
            base = tensor.storage_offset() + sum(i * tensor.stride(d) for i, d in zip(index, outside, strict=True))
            last = base + (tensor.shape[at] - 1) * tensor.stride(at) + inside + 1
            spans.append(Span(tensor, (base + blocks * self._split * tensor.stride(at)) * item, last * item))
        return spans
