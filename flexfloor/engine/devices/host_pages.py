"""Holes in host memory: the pages go back to the system and come again, zeroed, when they are touched."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence

import torch

from flexfloor.engine.devices.pages import Span, between, whole_pages

PAGE = mmap.PAGESIZE


class HostPages:
    """The holes of one process."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._spans: list[Span] = []

    def hollow(self, holes: Iterable[Sequence[Span]]) -> None:
        """Exactly these pages have no memory from now on.

        Raises:
            OSError: the system refused.
        """
        self._spans = [span for spans in holes for span in spans]
        for start, stop in self._ranges():
            code = self._libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)
            if code:
                error = ctypes.get_errno()
                raise OSError(error, f"madvise: {os.strerror(error)}")

    def _ranges(self) -> list[tuple[int, int]]:
        return whole_pages((span for span in self._spans if span.tensor.untyped_storage().nbytes()), PAGE)

    def backed(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """See :meth:`flexfloor.engine.devices.base.Device.backed`."""
        return between(tensor, self._ranges())
