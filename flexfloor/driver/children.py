"""How vLLM's processes are started below a server: guarded, and on CPU from a fork server.

Guarded: every child watches the server process and ends itself when that is gone, from its first moment on, so that a
server killed by SIGKILL leaves nothing (vLLM's own children outlive it). Fork server: vLLM always spawns on CPU and
each child imports torch and vLLM anew, some 15 s of CPU a process; forked from a process that has imported them once
(and started no thread) the children are there at once and share its memory.

vLLM takes its process classes from ``get_mp_context``; the two modules that start processes below AsyncLLM get ours.
"""

from __future__ import annotations

import importlib
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.popen_forkserver
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import psutil

from flexfloor.driver.processes import alive
from flexfloor.engine import upstream

STARTERS = tuple(symbol.module for symbol in upstream.DRIVER)
"""Modules of vLLM 0.30 that start processes by ``get_mp_context().Process``."""

PRELOADED = ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen3_moe")
"""What the fork server imports."""

PERIOD_S = 0.5


class _Popen(multiprocessing.popen_forkserver.Popen):
    """Asks for the exit code once: it comes through a pipe, and vLLM's monitor asks from a thread of its own."""

    def __init__(self, process: Any) -> None:
        self._asking = threading.Lock()
        super().__init__(process)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code, None while the process runs."""
        with self._asking:
            code: int | None = super().poll(flag)
            return code


class _Guarded:
    """Mixed into a process class: the environment of its start, and an end when the server ends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)
        self._server = (os.getpid(), psutil.Process().create_time())

    def run(self) -> None:
        """In the child."""
        os.environ.update(self._environment)
        threading.Thread(target=follow, args=self._server, name="flexfloor-guard", daemon=True).start()
        super().run()  # type: ignore[misc]


class ForkServerProcess(_Guarded, multiprocessing.context.ForkServerProcess):
    """A guarded child of the fork server."""

    @staticmethod
    def _Popen(process: Any) -> _Popen:  # noqa: N802 - multiprocessing's name
        return _Popen(process)


class SpawnProcess(_Guarded, multiprocessing.context.SpawnProcess):
    """A guarded child that starts from nothing."""


class ForkServer(multiprocessing.context.ForkServerContext):
    """Guarded children of a fork server."""

    Process: ClassVar[Any] = ForkServerProcess


class Spawn(multiprocessing.context.SpawnContext):
    """Guarded children that start from nothing: for devices that do not bear a fork."""

    Process: ClassVar[Any] = SpawnProcess


def follow(pid: int, created: float) -> None:
    """Ends this process when process ``pid`` that began at ``created`` is gone."""
    while True:
        try:
            server = psutil.Process(pid)
            if server.create_time() != created or not alive(server):
                break
        except psutil.NoSuchProcess:
            break
        time.sleep(PERIOD_S)
    os._exit(1)


def warm_up(*more: str) -> None:
    """Starts the fork server, which imports vLLM while this process does the same; idempotent.

    Args:
        more: further modules that it imports.
    """
    multiprocessing.forkserver.set_forkserver_preload([*PRELOADED, *more])
    multiprocessing.forkserver.ensure_running()


@contextmanager
def children_of(context: multiprocessing.context.BaseContext) -> Iterator[None]:
    """Within the block vLLM starts its processes from ``context``."""
    upstream.check(upstream.DRIVER)
    modules = [importlib.import_module(name) for name in STARTERS]
    before = [vars(module)["get_mp_context"] for module in modules]
    for module in modules:
        module.get_mp_context = lambda: context  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, original in zip(modules, before, strict=True):
            module.get_mp_context = original  # type: ignore[attr-defined]
