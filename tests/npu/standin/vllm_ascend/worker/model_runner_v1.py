import types

import journal
import real
import torch
import torch.distributed as dist
from vllm.config import CUDAGraphMode
from vllm.distributed import get_dp_group
from vllm.v1.worker.workspace import lock_workspace

from vllm_ascend.ascend_config import get_ascend_config
from vllm_ascend.ascend_forward_context import MoECommType, select_moe_comm_method, use_cann_megamoe
from vllm_ascend.utils import should_skip_allreduce_across_dp_group
from vllm_ascend.vllm_ascend_C import poisoned

_released = {
    "torch": torch,
    "dist": dist,
    "CUDAGraphMode": CUDAGraphMode,
    "MoECommType": MoECommType,
    "get_dp_group": get_dp_group,
    "select_moe_comm_method": select_moe_comm_method,
    "should_skip_allreduce_across_dp_group": should_skip_allreduce_across_dp_group,
    "use_cann_megamoe": use_cann_megamoe,
}
real.take("worker/model_runner_v1.py", _released, "_post_process_cudagraph_mode")
real.take("worker/model_runner_v1.py", _released, "_sync_metadata_across_dp", owner="NPUModelRunner")


class NPUModelRunner:
    """One decode step meets on the DP host group, then exchanges over the group that the selector picks."""

    ascend_config = get_ascend_config()

    def get_model(self):
        return self.model.unwrap()

    def _sync_metadata_across_dp(self, num_tokens, is_draft_model=False, cudagraph_mode=CUDAGraphMode.NONE):
        if (self.dp_size, self.dp_rank) != (get_dp_group().world_size, get_dp_group().rank_in_group):
            journal.breaks("dp-metadata", f"the runner is rank {self.dp_rank} of {self.dp_size}")
        most, _, _ = _released["_sync_metadata_across_dp"](self, num_tokens, is_draft_model, cudagraph_mode)
        if most != num_tokens:
            journal.breaks("equal-recapture-lists", f"a joint warm-up has {num_tokens} tokens here, {most} elsewhere")
        return most

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
