"""What is asked of the machine; tests answer for it. Nothing is imported, started or changed."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


class Machine:
    """The machine that this process runs on."""

    def environment(self) -> Mapping[str, str]:
        """The environment variables."""
        return os.environ

    def python(self) -> tuple[int, int]:
        """Major and minor version of the interpreter."""
        return sys.version_info[:2]

    def system(self) -> str:
        """Operating system and processor, such as ``Linux x86_64``."""
        return f"{platform.system()} {platform.machine()}"

    def build(self, distribution: str) -> str | None:
        """Version of an installed distribution with its build tag; None where it is not installed."""
        try:
            return version(distribution)
        except PackageNotFoundError:
            return None

    def version(self, distribution: str) -> str | None:
        """As `build`, without the tag."""
        build = self.build(distribution)
        return None if build is None else build.split("+")[0]

    def count(self, folder: str, pattern: str) -> int:
        """Files of a folder that match a pattern; 0 where it cannot be read."""
        try:
            return len(list(Path(folder).glob(pattern)))
        except OSError:
            return 0

    def readable(self, path: str) -> bool:
        """Whether a file or folder can be read."""
        return os.access(path, os.R_OK)

    def command(self, name: str) -> str | None:
        """Where a command lies; None where there is none."""
        return shutil.which(name)

    def memory(self) -> int | None:
        """Bytes of memory that are free for use; None where it cannot be told."""
        try:
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
        return int(kib) << 10 if kib is not None else None

    def room(self, folder: str) -> int | None:
        """Free bytes of a folder's file system; None where there is no such folder."""
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            return None

    def open_files(self) -> int:
        """Most files that a process may open."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def listeners(self, count: int) -> int:
        """How many of ``count`` free TCP ports could be listened on at once, on the loopback address."""
        with ExitStack() as stack:
            for opened in range(count):
                try:
                    stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                except OSError:
                    return opened
        return count

    def busy(self, ports: Iterable[int]) -> list[int]:
        """Those of ``ports`` that cannot be listened on."""
        found = []
        for port in ports:
            try:
                socket.create_server(("", port)).close()
            except (OSError, OverflowError):
                found.append(port)
        return found
