"""The engine core's side of a step's room: which floor and how much KV, and a block pool of that size."""

from __future__ import annotations

from math import ceil
from typing import Any

from flexfloor.engine.room import least_blocks
from flexfloor.engine.rpc import RpcWorker
from flexfloor.errors import ProtocolError


class Budget:
    """KV tokens and expert rows of one rank, step by step.

    Args:
        engine: the engine core.
        worker: its worker.
        facts: what the worker told of itself at the start.
    """

    def __init__(self, engine: Any, worker: RpcWorker, facts: dict[str, Any]) -> None:
        config = engine.vllm_config
        self._engine, self._worker = engine, worker
        self._block = int(config.cache_config.block_size)
        self._least = least_blocks(config.model_config.max_model_len, self._block)
        self._experts = int(facts["experts"])
        self.rows = int(facts["capacity"])
        self._blocks = int(config.cache_config.num_gpu_blocks or 0)
        self._at_most = {int(floor): int(blocks) for floor, blocks in facts["kv_blocks"].items()}
        if self._at_most:
            floor = max(self._at_most)
            self.rows, self._blocks = self._experts // floor, self._at_most[floor]
            self._resize_pool()

    def tokens(self) -> int:
        """KV tokens that requests can use now; vLLM keeps one block for itself."""
        return max(0, self._blocks - 1) * self._block

    def tokens_by_floor(self) -> dict[int, int]:
        """KV tokens that there is room for beside the rows of each floor; empty where rows and KV cannot change."""
        return {floor: (blocks - 1) * self._block for floor, blocks in self._at_most.items()}

    def make(self, floor: int, tokens: int | None) -> None:
        """Rows for ``floor`` and KV for ``tokens``, at least for one request of full length, before a step.

        Args:
            floor: the last size of the ladder.
            tokens: what the plan counts on; None, or more than there is room for: all that there is room for.

        Raises:
            ProtocolError: requests are running, and rows or KV would change.
        """
        if not self._at_most:
            return
        room = self._at_most[floor]
        wanted = room if tokens is None else min(room, max(self._least, ceil(tokens / self._block) + 1))
        if (self._experts // floor, wanted) == (self.rows, self._blocks):
            return
        if self._engine.scheduler.get_num_unfinished_requests():
            raise ProtocolError("rows and KV cannot change while requests run: wait for them or abort them")
        self._worker.drain()  # batches of requests that were aborted
        if not self._engine.scheduler.reset_prefix_cache():
            raise ProtocolError("rows and KV cannot change while blocks are in use")
        self.rows = 0  # unknown until the worker has answered
        self.rows, self._blocks = self._worker.call("make_room", floor, wanted)
        self._resize_pool()

    def _resize_pool(self) -> None:
        """Only the first blocks are given out; block 0 is vLLM's own.

        The pool stays the same object, because managers of every KV group hold it.
        """
        from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

        pool = self._engine.scheduler.kv_cache_manager.block_pool
        pool.free_block_queue = FreeKVCacheBlockQueue(pool.blocks[1 : self._blocks])
        pool.num_gpu_blocks = self._blocks
