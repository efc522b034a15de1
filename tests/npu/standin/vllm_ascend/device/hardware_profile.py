import enum
import types
from unittest.mock import MagicMock


class MoECommPolicy(enum.Enum):
    CAPACITY_AND_EXPERT_DENSITY = 0
    FUSED_OR_CAPACITY = 1
    ALLGATHER = 2
    CAPACITY_AND_WORLD_SIZE = 3


HardwareCapability = MagicMock()
profile = types.SimpleNamespace(moe_comm_policy=MoECommPolicy.FUSED_OR_CAPACITY, supports=lambda capability: False)


def get_current_hardware_profile():
    return profile
