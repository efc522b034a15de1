"""How the experts' tokens are exchanged at an EP size on Ascend, and which sizes its operators admit.

vllm-ascend picks one of three exchanges for every forward pass, by device generation, EP size, experts a device and
batch. MC2 fuses exchange and computation and has limits of its own; where it is not picked, an all-gather (A2) or an
all-to-all (A3) takes its place. So a step at EP 8 is not a smaller step at EP 16: it is another algorithm.

Sources: `select_moe_comm_method` of vllm-ascend 0.30.0rc2 (what is picked) and the CANN document of
`aclnnMoeDistributeDispatchV3` (what the operator takes). `tests/npu` compares the first with the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Hardware = Literal["ascend-a2", "ascend-a3"]


class Exchange(StrEnum):
    """How tokens reach their experts."""

    ALLGATHER = "all-gather"
    MC2 = "MC2"
    ALLTOALL = "all-to-all"


@dataclass(frozen=True)
class Generation:
    """One device generation.

    Attributes:
        picked_from: smallest EP size for which MC2 is picked.
        picked_experts: most experts a device for which MC2 is picked; None: any.
        otherwise: what is picked where MC2 is not.
        worlds: EP sizes that the MC2 operator takes.
        experts: most experts of a layer that it takes.
        tokens: most tokens a rank that it takes.
    """

    picked_from: int
    picked_experts: int | None
    otherwise: Exchange
    worlds: frozenset[int]
    experts: int
    tokens: int


GENERATIONS: dict[str, Generation] = {
    "ascend-a2": Generation(16, 24, Exchange.ALLGATHER, frozenset((16, 32, 64, 128, 256)), 512, 256),
    "ascend-a3": Generation(2, None, Exchange.ALLTOALL, frozenset(range(2, 769)), 1024, 512),
}
CAPACITY_LIMIT = 512
"""Most tokens a rank for which vllm-ascend picks MC2, whatever the capture sizes."""


def picked(hardware: str, ep: int, experts: int, tokens: int, capacity: int = CAPACITY_LIMIT) -> Exchange:
    """The exchange that vllm-ascend picks for a step.

    Args:
        hardware: device generation, a key of `GENERATIONS`.
        ep: EP size of the world.
        experts: experts of a layer.
        tokens: most tokens of any rank.
        capacity: largest decode batch that is captured (vllm-ascend's MC2 token capacity).
    """
    generation = GENERATIONS[hardware]
    if ep == 1:
        return Exchange.ALLGATHER
    dense = generation.picked_experts is not None and experts // ep > generation.picked_experts
    fits = tokens <= min(capacity, CAPACITY_LIMIT)
    return Exchange.MC2 if ep >= generation.picked_from and fits and not dense else generation.otherwise


def refused(hardware: str, ep: int, experts: int, tokens: int = 1) -> str | None:
    """Why an EP size cannot run with decode batches of up to ``tokens`` a rank; None where it can."""
    if experts % ep:
        return f"EP {ep} does not divide {experts} experts"
    if picked(hardware, ep, experts, tokens) is not Exchange.MC2:
        return None
    generation = GENERATIONS[hardware]
    if ep not in generation.worlds:
        return f"vllm-ascend picks MC2 at EP {ep}, and the operator takes EP {_listed(sorted(generation.worlds))} only"
    if experts > generation.experts:
        return f"the MC2 operator takes {generation.experts} experts at most, the model has {experts}"
    if tokens > generation.tokens:
        return f"the MC2 operator takes {generation.tokens} tokens a rank at most, a decode batch may have {tokens}"
    return None


def mc2_buffer_bytes(hidden: int, experts: int, top_k: int, tokens: int, shared: int = 0) -> int:
    """Least HCCL_BUFFSIZE, in bytes, for MC2 on A3: the same at every EP size, as each has experts / EP rows.

    Args:
        hidden: hidden size of the model.
        experts: experts of a layer.
        top_k: experts a token is routed to.
        tokens: largest captured decode batch.
        shared: shared experts.
    """
    row = _aligned(_aligned(2 * hidden, 32) + 64, 512)
    return 2 * (experts * tokens * row + (top_k + shared) * tokens * _aligned(2 * hidden, 512))


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


def admissible(hardware: str, world: int, experts: int, tokens: int = 1) -> tuple[int, ...]:
    """EP sizes up to ``world`` that can run, descending."""
    return tuple(ep for ep in range(world, 0, -1) if refused(hardware, ep, experts, tokens) is None)


def same(hardware: str, experts: int, sizes: Iterable[int]) -> bool:
    """Whether the decode steps of all EP sizes use one exchange."""
    return len({picked(hardware, size, experts, 1) for size in sizes}) <= 1


def notes(hardware: str, experts: int, sizes: Sequence[int]) -> tuple[str, ...]:
    """What a planner must know of EP sizes: one line for each exchange that is not that of the largest size."""
    largest = max(sizes)
    usual = picked(hardware, largest, experts, 1)
    told = []
    for exchange in Exchange:
        own = [size for size in sorted(sizes) if picked(hardware, size, experts, 1) is exchange]
        if own and exchange is not usual:
            told.append(
                f"EP {_listed(own)}: tokens are exchanged by {exchange}, at EP {largest} by {usual}; "
                "the speed may differ, use measured step times"
            )
    return tuple(told)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
