"""Engine processes end with the process that started them.

vLLM's engine cores survive a parent that is killed. A thread watches the parent's id; when
it changes, nobody is left to serve and the process ends at once.
"""

from __future__ import annotations

import os
import threading
import time

_started = False


def follow_parent(period_s: float = 0.5) -> None:
    """End this process when its parent is gone; idempotent."""
    global _started
    if _started:
        return
    _started = True
    threading.Thread(target=_watch, args=(os.getppid(), period_s), name="flexfloor-parent", daemon=True).start()


def _watch(parent: int, period_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(period_s)
    os._exit(1)
