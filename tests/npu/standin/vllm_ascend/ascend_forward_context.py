import enum

from vllm.distributed import get_ep_group

from vllm_ascend.device.hardware_profile import MoECommPolicy, get_current_hardware_profile

_mc2_tokens_capacity = 8


class MoECommType(enum.Enum):
    ALLGATHER = 0
    MC2 = 1
    ALLTOALL = 2


def get_mc2_tokens_capacity():
    return _mc2_tokens_capacity


def select_moe_comm_method(num_tokens, vllm_config, is_draft_model=False, draft_moe_quant_type=None):
    if get_ep_group().world_size == 1:
        return MoECommType.ALLGATHER
    world = vllm_config.parallel_config.world_size_across_dp
    if get_current_hardware_profile().moe_comm_policy is MoECommPolicy.CAPACITY_AND_EXPERT_DENSITY:
        dense = vllm_config.model_config.get_num_experts() // world > 24
        fits = num_tokens <= get_mc2_tokens_capacity()
        return MoECommType.MC2 if world >= 16 and fits and not dense else MoECommType.ALLGATHER
    return MoECommType.MC2 if num_tokens <= get_mc2_tokens_capacity() else MoECommType.ALLTOALL
