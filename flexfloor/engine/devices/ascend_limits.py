"""Which exchange runs at an EP size on the device at hand; it must follow the survivors' world.

The rules are in :mod:`flexfloor.exchange`. vllm-ascend picks anew for every forward pass, from its configuration's
world size (contract: selection-reads-config), which a switch changes; that it then picks what the rules say is asked
after every switch, because a wrong guess would leave some survivors in another collective.
"""

from __future__ import annotations

from typing import Any

from flexfloor.errors import ProtocolError, RefusedError
from flexfloor.exchange import CAPACITY_LIMIT, Exchange, picked, refused

POLICIES = {"CAPACITY_AND_EXPERT_DENSITY": "ascend-a2", "FUSED_OR_CAPACITY": "ascend-a3"}
"""vllm-ascend's MoE communication policy -> device generation."""

NAMES = {"ALLGATHER": Exchange.ALLGATHER, "MC2": Exchange.MC2, "ALLTOALL": Exchange.ALLTOALL}


def hardware() -> str:
    """The device generation of this machine.

    Raises:
        RefusedError: one whose operator limits are not known here.
    """
    from vllm_ascend.device.hardware_profile import get_current_hardware_profile

    policy = get_current_hardware_profile().moe_comm_policy.name
    if policy not in POLICIES:
        raise RefusedError(
            f"Ascend devices with MoE policy {policy} were not read", remedy="use Atlas A2 or A3 devices"
        )
    return POLICIES[policy]


def capacity() -> int:
    """Most tokens a rank for which MC2 is picked."""
    from vllm_ascend.ascend_forward_context import get_mc2_tokens_capacity

    found = get_mc2_tokens_capacity()
    return CAPACITY_LIMIT if found is None else int(found)


def check_world(size: int, experts: int) -> None:
    """Refuse a world whose exchange the operators do not take.

    Raises:
        RefusedError: says which limit.
    """
    reason = refused(hardware(), size, experts, min(capacity(), CAPACITY_LIMIT))
    if reason is not None:
        raise RefusedError(reason, remedy="choose other floors or smaller cudagraph_capture_sizes")


def check_selection(config: Any, size: int, experts: int) -> None:
    """Ask vllm-ascend what it picks now.

    Raises:
        ProtocolError: not what the rules say for a world of ``size``.
    """
    from vllm_ascend.ascend_forward_context import select_moe_comm_method

    found = select_moe_comm_method(1, config)
    wanted = picked(hardware(), size, experts, 1, capacity())
    if NAMES.get(found.name) is not wanted:
        raise ProtocolError(f"vllm-ascend picks {found.name} at EP {size}, {wanted} was expected")
