import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_ep_group

from vllm_ascend.distributed.parallel_state import get_mc2_group


def _comm_name(group):
    return group._get_backend(torch.device("npu")).get_hccl_comm_name(dist.get_rank(group=group))


class TokenDispatcherWithMC2:
    def __init__(self, **kwargs):
        self.ep_rank_id = get_mc2_group().rank_in_group
        self.ep_world_size = get_mc2_group().world_size
        self.refresh_hccl_group()

    def refresh_hccl_group(self):
        self.moe_all_to_all_group_name = _comm_name(get_mc2_group().device_group)


class TokenDispatcherWithAllGather:
    def __init__(self, **kwargs):
        self.num_experts_local = int(kwargs["num_local_experts"])


class TokenDispatcherWithAll2AllV:
    def __init__(self, **kwargs):
        self.num_experts, self.num_local_experts = kwargs["num_experts"], kwargs["num_local_experts"]
        if self.num_local_experts > 1:
            self.expert_ids_per_ep_rank = torch.tensor(
                [i % self.num_local_experts for i in range(self.num_experts)], dtype=torch.int32
            )
        first = get_ep_group().rank_in_group * self.num_local_experts
        self.local_expert_indices = [first + i for i in range(self.num_local_experts)]
        self.moe_all_to_all_group_name = _comm_name(get_ep_group().device_group)
