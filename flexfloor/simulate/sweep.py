"""What happens to Q and E when one setting changes: floors, mu, responses a prompt, ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from flexfloor.config import ADMISSION_METHODS, FlexFloorConfig
from flexfloor.errors import InputError
from flexfloor.simulate.compare import Comparison, MachineOf, WorkloadsOf, changed, simulate_arms

VARIABLES: Mapping[str, str] = {
    "floors": "smallest floor that is offered",
    "mu": "safety factor on historical lengths",
    "n": "responses a prompt",
    "ranks": "ranks of the world, prompts a rank unchanged",
}
MU_DEFAULTS = ("1.0", "1.08", "1.16", "1.3", "1.5")


@dataclass(frozen=True)
class Sweep:
    """One setting and the values it takes, in order."""

    variable: str
    values: tuple[Decimal, ...]


@dataclass(frozen=True)
class SweepResult:
    """A sweep's comparisons, one a value, and what is assumed beyond their own notes."""

    sweep: Sweep
    points: tuple[Comparison, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The sweep for machines."""
        points = zip(self.sweep.values, self.points, strict=True)
        return {
            "variable": self.sweep.variable,
            "points": [{"value": float(value), **found.to_json()} for value, found in points],
            "notes": list(self.notes),
        }


def parse_sweep(text: str, config: FlexFloorConfig) -> Sweep:
    """``mu=1,1.16`` or ``mu`` alone, which takes default values.

    Raises:
        InputError: unknown setting, or a value that it cannot take.
    """
    name, _, given = text.partition("=")
    if name not in VARIABLES:
        raise InputError(f"{name!r} is none of {', '.join(VARIABLES)}", field="--sweep")
    values: list[Decimal] = []
    for cell in given.split(",") if given else _defaults(name, config):
        try:
            value = Decimal(cell.strip())
        except InvalidOperation:
            value = Decimal("NaN")
        whole = name == "mu" or (value.is_finite() and value == value.to_integral_value())
        if not value.is_finite() or value < 1 or not whole:
            wanted = "numbers of at least 1" if name == "mu" else "whole numbers of at least 1"
            raise InputError(f"{name} takes {wanted}, got {cell.strip()!r}", field="--sweep")
        values.append(value)
    return Sweep(name, tuple(sorted(set(values))))


def _defaults(name: str, config: FlexFloorConfig) -> Sequence[str]:
    if name == "mu":
        return MU_DEFAULTS
    if name == "floors":
        return [str(size) for size in config.admissible_sizes if size in config.capacity or size == config.world_size]
    base = config.responses_per_prompt if name == "n" else config.world_size
    return [str(max(1, base * part // 4)) for part in (1, 2, 4, 8)]


def run_sweep(sweep: Sweep, config: FlexFloorConfig, workloads: WorkloadsOf, machine: MachineOf) -> SweepResult:
    """Simulates ``verl``, ``ls_tg`` and the configuration's own method at every value.

    Raises:
        InputError: a value contradicts the configuration, or see `simulate_arms`.
    """
    points: list[Comparison] = []
    notes: list[str] = []
    for value in sweep.values:
        varied, told = vary(config, sweep.variable, value)
        notes += told
        arms: dict[str, FlexFloorConfig] = {method: changed(varied, {"method": method}) for method in ("verl", "ls_tg")}
        own = varied.method if varied.method in ADMISSION_METHODS else "flex"
        arms[own] = changed(varied, {"method": own})
        points.append(simulate_arms(arms, workloads, machine))
    return SweepResult(sweep, tuple(points), tuple(dict.fromkeys(notes)))


def vary(config: FlexFloorConfig, variable: str, value: Decimal) -> tuple[FlexFloorConfig, list[str]]:
    """The configuration with one setting changed, and what had to be assumed for it.

    Raises:
        InputError: the value contradicts the configuration.
    """
    if variable == "mu":
        return changed(config, {"mu": str(value)}), []
    number = int(value)
    if variable == "n":
        return changed(config, {"responses_per_prompt": number}), []
    floors = config.resolved()["floors"]
    if variable == "floors":
        if number not in config.admissible_sizes:
            sizes = ", ".join(map(str, config.admissible_sizes))
            raise InputError(f"floor {number} is not admissible ({sizes})", field="--sweep")
        kept = {name: [size for size in own if size >= number] for name, own in floors.items()}
        fixed = None if config.fixed_floor is not None and config.fixed_floor < number else config.fixed_floor
        method = config.method if config.method != "fixed" or fixed is not None else "flex"
        return changed(config, {"floors": kept, "fixed_floor": fixed, "method": method}), []
    return _other_world(config, number)


def _other_world(config: FlexFloorConfig, ranks: int) -> tuple[FlexFloorConfig, list[str]]:
    """N ranks with as many prompts a rank; budgets of sizes that are not in the table are the nearest smaller one's."""
    data = config.resolved()
    notes: list[str] = []
    floors: dict[str, list[int]] = {}
    capacity: dict[str, dict[str, int | None]] = {}
    for name, own in data["floors"].items():
        sizes = {size for size in own if size < ranks and ranks % size == 0}
        doubled = config.world_size
        while own and doubled < ranks:
            if ranks % doubled == 0:
                sizes.add(doubled)
            doubled *= 2
        floors[name] = sorted({*sizes, ranks} if own else sizes)
        known = {int(size): tokens for size, tokens in data["kv"]["capacity"][name].items() if tokens is not None}
        capacity[name] = {str(size): tokens for size, tokens in known.items()}
        for size in [*floors[name], ranks]:
            below = [other for other in known if other <= size]
            if known and size not in known and below:
                capacity[name][str(size)] = known[max(below)]
                notes.append(f"{name} EP {size}: KV budget assumed to be that of EP {max(below)}")
    prompts = max(1, config.step_prompts * ranks // config.world_size)
    changes: dict[str, Any] = {
        "world_size": ranks,
        "step_prompts": prompts,
        "floors": floors,
        "kv": {**data["kv"], "capacity": capacity},
        "rank_order": None,
    }
    if config.fixed_floor is not None and config.fixed_floor not in {*floors[config.residency], ranks}:
        changes |= {"fixed_floor": ranks}
    return changed(config, changes), notes
