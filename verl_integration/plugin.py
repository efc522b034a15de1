"""Entry point ``verl.plugins``: verl imports this module in every process that imports verl.

It registers what must be known by name before verl looks: the CPU platform, where that is asked for. Everything that
belongs to one run (replica, trainer, agent loop) is registered by the run's own process, so that without a
`flexfloor:` section verl runs exactly as before. verl swallows errors of a plugin; `main` checks `LOADED`.
"""

from __future__ import annotations

import os

LOADED = False

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    from verl_integration.cpu import support

    support.apply()

LOADED = True
