"""A real local Ray head (and further nodes) for a test, in processes of its own that end with it."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from flexfloor.driver.processes import end_processes

RAY = str(Path(sys.executable).with_name("ray"))


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def ray_head(gpus, *, nodes=1, cpus=16, env=None):
    """Yields (job server's address, cluster's address, variables)."""
    folder = tempfile.mkdtemp(prefix="ffray")
    port, dashboard = free_port(), free_port()
    variables = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", **(env or {})}
    variables["RAY_AUTH_MODE"] = "disabled"  # it listens on this machine alone
    address = f"127.0.0.1:{port}"
    common = [f"--num-gpus={gpus}", f"--num-cpus={cpus}", "--object-store-memory=268435456", "--block"]
    head = ["--head", "--node-ip-address=127.0.0.1", f"--port={port}", f"--dashboard-port={dashboard}"]
    head += ["--include-dashboard=true", f"--temp-dir={folder}"]
    started = []

    def start(arguments):
        log = (Path(folder) / f"start-{len(started)}.log").open("w")
        command = [RAY, "start", *arguments, *common]
        started.append(
            subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True)
        )

    try:
        start(head)
        jobs = f"http://127.0.0.1:{dashboard}"
        _wait(f"{jobs}/api/version")
        for _ in range(nodes - 1):
            start([f"--address={address}", "--node-ip-address=127.0.0.1"])
        yield jobs, address, variables
    finally:
        below = [p for one in started for p in _tree(one.pid)]
        end_processes([p.pid for p in below], 3.0)
        for one in started:
            one.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


def _tree(pid):
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _wait(url, seconds=120):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.HTTPError:
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise TimeoutError(f"{url} does not answer")
