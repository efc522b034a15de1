import types

import journal
import torch
import torch.distributed as dist
from vllm.config import CUDAGraphMode
from vllm.distributed import get_dp_group
from vllm.v1.worker.workspace import lock_workspace

from vllm_ascend.vllm_ascend_C import poisoned


class NPUModelRunner:
    """One decode step meets on the DP host group, then exchanges over the group that the selector picks."""

    def get_model(self):
        return self.model.unwrap()

    def _sync_metadata_across_dp(self, num_tokens, is_draft_model=False, cudagraph_mode=CUDAGraphMode.NONE):
        if self.dp_size == 1:
            return num_tokens
        if (self.dp_size, self.dp_rank) != (get_dp_group().world_size, get_dp_group().rank_in_group):
            journal.breaks("dp-metadata", f"the runner is rank {self.dp_rank} of {self.dp_size}")
        packed = torch.zeros(2, self.dp_size, dtype=torch.int32)
        packed[0][self.dp_rank] = num_tokens
        dist.all_reduce(packed, group=get_dp_group().cpu_group)
        if int((packed[0] > 0).sum()) != self.dp_size:
            journal.breaks("dp-metadata", f"{packed[0].tolist()} at DP size {self.dp_size}")
        if len(set(packed[0].tolist())) != 1:
            journal.breaks("equal-recapture-lists", f"a joint warm-up has the sizes {packed[0].tolist()}")
        return int(packed[0].max())

    def _dummy_run(self, num_tokens, with_prefill=False, cudagraph_runtime_mode=None, uniform_decode=False, **options):
        keys = self.cudagraph_dispatcher.cudagraph_keys[CUDAGraphMode.FULL]
        key = next((k for k in sorted(keys, key=lambda k: k.num_tokens) if k.num_tokens >= num_tokens), None)
        mode = cudagraph_runtime_mode
        eager = types.SimpleNamespace(num_tokens=num_tokens)
        if mode is None:
            mode = CUDAGraphMode.NONE if key is None else CUDAGraphMode.FULL
        self._sync_metadata_across_dp(num_tokens)
        for table in self.input_batch.block_table.block_tables:
            if options.get("standin_warm_up") and bool(table.block_table.gpu.any()):
                journal.breaks("block-tables", "a warm-up sees the blocks of requests")
        return self.model(key or eager, mode, options.get("is_graph_capturing", False))

    def capture_model(self):
        sizes = []
        keys = self.cudagraph_dispatcher.cudagraph_keys[CUDAGraphMode.FULL]
        for key in sorted(keys, key=lambda k: -k.num_tokens):
            self._dummy_run(key.num_tokens, cudagraph_runtime_mode=CUDAGraphMode.NONE, standin_warm_up=True)
            self._dummy_run(key.num_tokens, cudagraph_runtime_mode=CUDAGraphMode.FULL, is_graph_capturing=True)
            sizes.append(key.num_tokens)
        journal.note("capture", tuple(sizes))
        lock_workspace()
        return 0

    def standin_read(self, name, tensor):
        """A step reads a table or a weight."""
        if bool(poisoned(tensor).any()):
            journal.breaks("no-lost-reads", f"{name} is read before it is rewritten")
