"""The one patch on verl's path: ``torch.distributed.init_process_group``.

verl builds the backend ``cpu:gloo,<device>:<backend>`` (utils/distributed.py); on CPU that names cpu twice, which
torch refuses.
"""

from __future__ import annotations

import functools
from typing import Any

DOUBLED, PLAIN = "cpu:gloo,cpu:gloo", "cpu:gloo"


def patch() -> None:
    """Accept verl's backend name; every other call passes unchanged."""
    import torch.distributed as dist

    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return original(PLAIN if backend == DOUBLED else backend, *args, **kwargs)

    dist.init_process_group = init_process_group
