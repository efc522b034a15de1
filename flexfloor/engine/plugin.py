"""Entry point ``vllm.general_plugins``: vLLM calls ``register`` in every process it starts.

Without the environment variable of :mod:`flexfloor.engine.settings` nothing happens.
"""

from __future__ import annotations

_registered = False


def register() -> None:
    """Patch this process for elastic EP; idempotent.

    Raises:
        UpstreamChangedError: this vLLM is not the tested one.
    """
    global _registered
    from flexfloor.engine.settings import EngineSettings

    settings = EngineSettings.from_env()
    if settings is None or _registered:
        return
    _registered = True
    from vllm.platforms import current_platform

    from flexfloor.engine import hooks, rows, upstream
    from flexfloor.engine.devices import module_for

    upstream.check_version()
    upstream.check(upstream.COMMON)
    module_for(current_platform.device_type).patch(settings.combine)
    rows.patch(settings)
    hooks.patch()
