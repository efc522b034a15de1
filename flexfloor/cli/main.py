"""The `flexfloor` command: one file a subcommand, loaded when it is called.

So `flexfloor plan` imports no torch, and a bad input ends with one line and exit code 2, never with a traceback.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

import flexfloor
from flexfloor.errors import FlexFloorError, InputError, RefusedError

COMMANDS = {
    "plan": "Plan an epoch from a length history.",
    "rollout": "Run a planned rollout on real engines.",
    "report": "Say what a run occupied and what it saved.",
    "simulate": "Simulate rollouts from a length file.",
    "calibrate": "Measure capacity and step times of a running engine.",
    "doctor": "Check what this machine can run.",
}
"""Subcommands by name. Each lives in flexfloor/cli/NAME.py as a typer application called `app` with one command; a
command whose module does not exist is not offered."""

_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def offered() -> list[str]:
    """Names of the commands whose module exists."""
    return [name for name in COMMANDS if importlib.util.find_spec(f"flexfloor.cli.{name}") is not None]


def usage() -> str:
    """What `flexfloor --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {COMMANDS[name]}" for name in offered()]
    return "\n".join(
        [
            str(flexfloor.__doc__),
            "",
            "Usage: flexfloor COMMAND [OPTIONS]     (flexfloor COMMAND --help says more)",
            "       flexfloor --version",
            "",
            "Commands:",
            *lines,
        ]
    )


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code.

    Returns:
        0, 2 for bad input or a refused run, 1 for another error, 130 after Ctrl-C.
    """
    if not arguments or arguments[0] in ("--help", "-h"):
        print(usage())
        return 0
    if arguments[0] == "--version":
        print(f"flexfloor {flexfloor.__version__}")
        return 0
    name = arguments[0]
    if name not in offered():
        return _complain(f"no command {name!r}; there are {', '.join(offered())}", 2)
    try:
        code = _run_command(name, arguments[1:])
        sys.stdout.flush()
    except (InputError, RefusedError) as error:
        return _complain(str(error), 2)
    except _UsageError as error:
        message = str(error.format_message()) if hasattr(error, "format_message") else str(error)
        return _complain(f"{message.rstrip('.')}; see `flexfloor {name} --help`", 2)
    except (KeyboardInterrupt, typer.Abort):
        return _complain("stopped", 130)
    except FlexFloorError as error:
        return _complain(str(error), 1)
    except BrokenPipeError:
        return _silent(1)  # whoever read our output has gone
    except OSError as error:
        where = error.filename or "the output"
        return _silent(_complain(f"{where}: {error.strerror or error}; free space there, or name another place", 1))
    return code


def _silent(code: int) -> int:
    """What is still buffered cannot be written either: the interpreter's end must not try."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _run_command(name: str, arguments: Sequence[str]) -> int:
    module = importlib.import_module(f"flexfloor.cli.{name}")
    command = typer.main.get_command(module.app)
    try:
        code = command.main(args=list(arguments), prog_name=f"flexfloor {name}", standalone_mode=False)
    except typer.Exit as stop:
        return stop.exit_code
    return code if isinstance(code, int) else 0


def _complain(message: str, code: int) -> int:
    print("flexfloor: " + " ".join(message.split()), file=sys.stderr)
    return code


def main() -> NoReturn:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
