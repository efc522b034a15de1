"""The door of a rollout server: first requests of a step enter in the order of the plan.

Agent loops are tasks in other processes, so their requests arrive in any order; vLLM's queues, and with them batches
and bits, follow the order of entry. A request waits until all that stand before it have entered or are lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Door:
    """Places 0 to ``count - 1`` of one step.

    Args:
        count: how many requests will come.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._next = 0
        self._passed: set[int] = set()
        self._moved = asyncio.Condition()

    @property
    def waiting_for(self) -> int | None:
        """The place whose turn it is; None when all have passed."""
        return self._next if self._next < self.count else None

    def passed(self, place: int) -> bool:
        """Whether a place has entered or is lost."""
        return place < self._next or place in self._passed

    @asynccontextmanager
    async def turn(self, place: int) -> AsyncIterator[None]:
        """Waits for the turn of ``place``; the next may enter when the block is left.

        Raises:
            ValueError: no such place.
        """
        if not 0 <= place < self.count:
            raise ValueError(f"place {place} is none of {self.count}")
        async with self._moved:
            await self._moved.wait_for(lambda: self._next >= place)
        try:
            yield
        finally:
            await self.lose(place)

    async def lose(self, place: int) -> None:
        """``place`` has passed or will never come; idempotent."""
        async with self._moved:
            self._passed.add(place)
            while self._next in self._passed:
                self._passed.discard(self._next)
                self._next += 1
            self._moved.notify_all()
