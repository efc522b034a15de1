import journal

from vllm_ascend.ascend_forward_context import MoECommType
from vllm_ascend.ops.fused_moe.token_dispatcher import (
    TokenDispatcherWithAll2AllV,
    TokenDispatcherWithAllGather,
    TokenDispatcherWithMC2,
)

_MoECommMethods = {}


class MoECommMethod:
    def __init__(self, moe_config):
        self.moe_config = moe_config
        self.token_dispatcher = self._get_token_dispatcher()

    def _get_token_dispatcher(self):
        raise NotImplementedError

    def _sizes(self):
        return {"num_experts": self.moe_config.num_experts, "num_local_experts": self.moe_config.num_local_experts}


class AllGatherCommImpl(MoECommMethod):
    def _get_token_dispatcher(self):
        return TokenDispatcherWithAllGather(**self._sizes())


class MC2CommImpl(MoECommMethod):
    def _get_token_dispatcher(self):
        return TokenDispatcherWithMC2()


class AlltoAllCommImpl(MoECommMethod):
    def _get_token_dispatcher(self):
        return TokenDispatcherWithAll2AllV(**self._sizes())


def _moe_config_key(moe_comm_type, moe_config):
    return moe_comm_type, (moe_config.num_experts, moe_config.num_local_experts)


def get_moe_comm_method(moe_comm_type, moe_config=None):
    return _MoECommMethods.get(_moe_config_key(moe_comm_type, moe_config))


def setup_moe_comm_method(moe_config):
    journal.note("setup", moe_config.ep_size)
    kinds = {MoECommType.ALLGATHER: AllGatherCommImpl}
    if moe_config.ep_size > 1:
        kinds |= {MoECommType.ALLTOALL: AlltoAllCommImpl, MoECommType.MC2: MC2CommImpl}
    for kind, method in kinds.items():
        _MoECommMethods[_moe_config_key(kind, moe_config)] = method(moe_config)
