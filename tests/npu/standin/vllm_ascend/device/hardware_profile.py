import enum
import types


class MoECommPolicy(enum.Enum):
    CAPACITY_AND_EXPERT_DENSITY = 0
    FUSED_OR_CAPACITY = 1
    ALLGATHER = 2


profile = types.SimpleNamespace(moe_comm_policy=MoECommPolicy.FUSED_OR_CAPACITY)


def get_current_hardware_profile():
    return profile
