"""Runs the commands of a documentation page and writes what they print under them, or checks that it stands there.

    python tools/docs_commands.py docs/choosing_floors.md [--check]

In a ```console block a line that begins with "$ " is a command (a trailing backslash continues it), the lines up to the
next one are what it prints. All commands of a page run one after another in one empty folder, beside links to the
repository's configs, tools and docs, in a terminal of 120 columns.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parent.parent
FENCE = "```"


def rendered(text: str) -> str:
    """The page with every command's output as it is now.

    Raises:
        SystemExit: a command fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in ("configs", "tools", "docs"):
            (Path(folder) / name).symlink_to(ROOT / name)
        return "\n".join(_lines(text.splitlines(), folder)) + "\n"


def _lines(lines: list[str], folder: str) -> Iterator[str]:
    command: list[str] = []
    inside = False
    for line in lines:
        if line.startswith(FENCE):
            inside = line == f"{FENCE}console"
            yield line
        elif not inside:
            yield line
        elif line.startswith("$ ") or command:
            yield line
            command.append(line.removeprefix("$ "))
            if not line.endswith("\\"):
                yield from _run("\n".join(command), folder)
                command = []


def _run(command: str, folder: str) -> list[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "120", "NO_COLOR": "1"}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{command}\nexit {done.returncode}: {done.stderr[-2000:]}")
    return [line.rstrip() for line in done.stdout.splitlines()]


def main(
    page: Annotated[Path, typer.Argument(help="The page.")],
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 where the page is not up to date.")
    ] = False,
) -> None:
    """Bring a page's output up to date."""
    before = page.read_text(encoding="utf-8")
    after = rendered(before)
    if not check:
        page.write_text(after, encoding="utf-8")
    elif before != after:
        raise SystemExit(f"{page}: output is not what its commands print; run this without --check")


if __name__ == "__main__":
    typer.run(main)
