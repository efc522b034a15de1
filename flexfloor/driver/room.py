"""How much KV started engines have room for, floor by floor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def kv_tokens(statuses: list[dict[str, Any]]) -> int:
    """Usable KV tokens, now, of the rank that has least."""
    return min(int(status["kv_tokens"]) for status in statuses)


def kv_room(statuses: list[dict[str, Any]], floors: Iterable[int]) -> dict[int, int]:
    """KV tokens beside the expert rows of each floor, of the rank that has least.

    Where rows and KV cannot change places between steps, all floors have what there is now.
    """
    now = kv_tokens(statuses)
    by_floor = [{int(floor): int(n) for floor, n in status["kv_tokens_by_floor"].items()} for status in statuses]
    return {floor: min((one[floor] for one in by_floor if floor in one), default=now) for floor in floors}


def changes(statuses: list[dict[str, Any]]) -> bool:
    """Whether rows and KV can change places between steps."""
    return all(status["kv_tokens_by_floor"] for status in statuses)
