"""Outlives the driver and ends what it leaves behind: ``python -m flexfloor.driver.reaper PID``.

A driver killed by SIGKILL can end nobody. Ray's servers die with it, but Ray's agents linger for a minute, and what
they were told to start may linger longer. This process remembers the driver's descendants (pid and start time, so
that a reused pid is never hit) and ends them when the driver is gone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable

import psutil

from flexfloor.driver.processes import alive, end_processes

PERIOD_S = 0.5
GRACE_S = 3.0


def start(pid: int) -> subprocess.Popen[bytes]:
    """Starts the reaper of process ``pid`` in a session of its own, out of reach of a Ctrl-C."""
    return subprocess.Popen(
        [sys.executable, "-m", "flexfloor.driver.reaper", str(pid)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def watch(pid: int) -> None:
    """Remembers the descendants of ``pid`` until it is gone, then ends those that are left."""
    try:
        root = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return
    known: set[psutil.Process] = set()
    while alive(root):
        try:
            found = root.children(recursive=True)
        except psutil.NoSuchProcess:
            break
        known = {process for process in known if process.is_running()} | set(found)
        time.sleep(PERIOD_S)
    end(known)


def end(processes: Iterable[psutil.Process]) -> None:
    """Ends processes and their descendants, but not this one."""
    end_processes([process.pid for process in processes if alive(process) and process.pid != os.getpid()], GRACE_S)


if __name__ == "__main__":
    watch(int(sys.argv[1]))
