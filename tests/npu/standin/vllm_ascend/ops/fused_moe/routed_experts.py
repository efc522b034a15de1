import real
import torch
import torch_npu
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.utils import replace_parameter

from vllm_ascend.ascend_config import get_ascend_config

_released = {
    "torch": torch,
    "torch_npu": torch_npu,
    "UnquantizedFusedMoEMethod": UnquantizedFusedMoEMethod,
    "replace_parameter": replace_parameter,
    "get_ascend_config": get_ascend_config,
    "maybe_trans_nz": lambda weight: weight,
}
real.take(
    "ops/fused_moe/routed_experts.py",
    _released,
    "process_weights_after_loading",
    owner="AscendUnquantizedFusedMoEMethod",
)


class AscendUnquantizedFusedMoEMethod(UnquantizedFusedMoEMethod):
    """vLLM creates the weights, vllm-ascend processes them; nothing is computed with them."""

    def __init__(self, moe=None, tid2eid=None):
        torch.nn.Module.__init__(self)
        self.moe = moe

    process_weights_after_loading = _released["process_weights_after_loading"]
