"""Ray up and down: one local Ray for one command, gone when the command is.

``close`` ends Ray and checks that nothing is left. If this process is killed instead, :mod:`flexfloor.driver.reaper`
does it; if the server actor alone is killed, vLLM's processes follow it (:mod:`flexfloor.driver.children`).
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import psutil

from flexfloor.driver import reaper
from flexfloor.driver.processes import end_processes, tree, wait_gone

OBJECT_STORE_BYTES = 128 << 20
CLOSE_S = 10.0

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_enable_metrics_collection": "0",
}


class Cluster:
    """A local Ray.

    Args:
        slots: CPUs that Ray may give away, one a rank.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._before: set[int] = set()
        self._folder: Path | None = None
        self._reaper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Starts Ray; call it from the main thread, whose end ends Ray."""
        os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
        import ray

        self._before = {process.pid for process in tree([os.getpid()])}
        self._folder = Path(tempfile.mkdtemp(prefix="ffray"))
        self._reaper = reaper.start(os.getpid())
        on_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(
                address="local",
                num_cpus=self._slots,
                num_gpus=0,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(self._folder),
            )
        except BaseException:
            self.close()
            raise
        if on_main:
            signal.signal(signal.SIGTERM, handler)  # Ray puts its own in place, which would skip our way out
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends Ray and whatever runs below this process since it began."""
        import ray

        mine = self._mine()
        ray.shutdown()
        if self._reaper is not None:
            self._reaper.terminate()
            self._reaper.wait()
        left = wait_gone(mine, CLOSE_S)
        if left:
            end_processes([process.pid for process in left])
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _mine(self) -> list[psutil.Process]:
        return [process for process in tree([os.getpid()]) if process.pid not in self._before]


class Terminated(KeyboardInterrupt):
    """SIGTERM, so that the same way out as after Ctrl-C is taken."""


@contextmanager
def orderly_end() -> Iterator[None]:
    """SIGTERM ends the block like Ctrl-C does. Outside of the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the block is over: what ends processes must not be ended half-way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before: list[Any] = [signal.signal(number, lambda got, _frame: came.append(got)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt
