"""Ends processes by pid, and tells whether any is left. Never by name."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil

GRACE_S = 5.0
_POLL_S = 0.02


def alive(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def tree(pids: Iterable[int]) -> list[psutil.Process]:
    """The processes ``pids`` with all their descendants, each once."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            for one in (process, *process.children(recursive=True)):
                found.setdefault(one.pid, one)
        except psutil.NoSuchProcess:
            continue
    return list(found.values())


def wait_gone(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Waits until processes are gone (or zombies); returns those that are not.

    Nothing is reaped here: exit codes of child processes stay with whoever started them.
    """
    end = time.monotonic() + timeout_s
    left = [process for process in processes if alive(process)]
    while left and time.monotonic() < end:
        time.sleep(_POLL_S)
        left = [process for process in left if alive(process)]
    return left


def end_processes(pids: Iterable[int], grace_s: float = GRACE_S) -> list[int]:
    """Ends processes and their descendants: SIGTERM, SIGKILL after ``grace_s``. Returns pids that are still there."""
    left = tree(pids)
    for act in ("terminate", "kill"):
        for process in left:
            try:
                getattr(process, act)()
                process.resume()
            except psutil.NoSuchProcess:
                continue
        left = wait_gone(left, grace_s)
    return sorted(process.pid for process in left)
