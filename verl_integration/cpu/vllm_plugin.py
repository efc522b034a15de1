"""Entry point ``vllm.general_plugins``: what vLLM's CPU build lacks for DP and EP, for stock verl on CPU.

Engines with FlexFloor settings get the same from FlexFloor's own plugin; elsewhere nothing happens.
"""

from __future__ import annotations

import os

from flexfloor.engine.settings import ENV

_registered = False


def register() -> None:
    """Patch this process; idempotent."""
    global _registered
    if _registered or os.environ.get(ENV) or os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        return
    _registered = True
    from vllm.platforms import current_platform

    from flexfloor.engine import upstream
    from flexfloor.engine.devices import module_for

    if current_platform.is_cpu():
        upstream.check_version()
        module_for("cpu").patch("stock")
