"""Peak memory of a process and everything below it."""

from __future__ import annotations

import threading

import psutil


class Footprint:
    """Samples the memory of this process tree in a thread.

    Pages that several processes share are counted once over all of them (proportional set size), so the sum is what
    the machine really gives.

    Args:
        period_s: time between two samples, seconds.
    """

    def __init__(self, period_s: float = 2.0) -> None:
        self.peak_bytes = 0
        self._period_s = period_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="footprint", daemon=True)

    def __enter__(self) -> Footprint:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            self.peak_bytes = max(self.peak_bytes, now_bytes())


def now_bytes() -> int:
    """Memory of this process and its descendants now, bytes."""
    total = 0
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total
