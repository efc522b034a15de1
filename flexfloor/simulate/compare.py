"""Several methods over the same lengths on the same machine, against one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from flexfloor.config import FlexFloorConfig, config_from_mapping, load_config
from flexfloor.errors import InputError
from flexfloor.ledger import Bounds, Gains, RunLedger, compare
from flexfloor.plan import Method
from flexfloor.simulate.run import Machine, SimulatedRun, simulate_workloads
from flexfloor.simulate.workload import Workload

BASELINE: Method = "verl"
METHODS: tuple[Method, ...] = ("verl", "lengthsort", "ls_tg", "fixed", "minskew", "flex")
HEADS = ("Arm", "Q tokens/s", "Q gain", "E tokens/rank-s", "E gain", "T s", "H rank-s", "Ranks", "Preempted", "Capped")

WorkloadsOf = Callable[[FlexFloorConfig], Mapping[int, Workload]]
"""The lengths, by seed, that a configuration is simulated with."""
MachineOf = Callable[[FlexFloorConfig], Machine]


@dataclass(frozen=True)
class Arm:
    """One simulated method.

    Attributes:
        name: its name.
        run: the run.
        ledger: its account.
        gains: against the baseline; None for the baseline itself.
    """

    name: str
    run: SimulatedRun
    ledger: RunLedger
    gains: Gains | None

    def to_json(self) -> dict[str, Any]:
        """The figures for machines; bounds are [lo, hi]."""
        totals, gains = self.ledger.totals, self.gains
        return {
            "name": self.name,
            "method": self.run.config.method,
            "throughput": totals.throughput,
            "efficiency": _pair(totals.efficiency),
            "window_seconds": totals.window_seconds,
            "occupied_rank_seconds": _pair(totals.occupied),
            "response_tokens": totals.response_tokens,
            "mean_occupied_ranks": _pair(totals.occupied.scaled(1 / totals.window_seconds)),
            "preemptions": sum(seed.preemptions for seed in totals.seeds),
            "capped": sum(seed.cap_hits[0] for seed in totals.seeds if seed.cap_hits),
            "dummy_seconds": sum(seed.dummy_seconds or 0.0 for seed in totals.seeds),
            "throughput_gain": gains.throughput if gains else None,
            "efficiency_gain": _pair(gains.efficiency) if gains else None,
            "problems": list(self.ledger.problems),
        }


@dataclass(frozen=True)
class Comparison:
    """The arms in order, the baseline first.

    Attributes:
        arms: simulated methods.
        unequal: a line where the arms did not do the same work.
    """

    arms: tuple[Arm, ...]
    unequal: tuple[str, ...]

    @property
    def notes(self) -> list[str]:
        """What is assumed, and unequal work."""
        return [*notes_of(self.arms), *self.unequal]

    def to_json(self) -> dict[str, Any]:
        """The comparison for machines."""
        return {
            "baseline": self.arms[0].name,
            "arms": [arm.to_json() for arm in self.arms],
            "assumptions": self.notes,
        }


def simulate_arms(configs: Mapping[str, FlexFloorConfig], workloads: WorkloadsOf, machine: MachineOf) -> Comparison:
    """Simulates every configuration and compares with the first of method ``verl`` (the first one without such).

    Args:
        configs: by name.
        workloads: the lengths of a configuration.
        machine: the machine of a configuration.

    Raises:
        InputError: see `simulate_workloads`.
    """
    names = sorted(configs, key=lambda name: configs[name].method != BASELINE)
    arms: list[Arm] = []
    for name in names:
        config = configs[name]
        run = simulate_workloads(config, workloads(config), machine(config), name=name)
        ledger = run.ledger()
        gains = compare(ledger.totals, arms[0].ledger.totals) if arms else None
        arms.append(Arm(name, run, ledger, gains))
    base = arms[0].ledger.totals.response_tokens
    unequal = [f"{a.name} {a.ledger.totals.response_tokens / base - 1:+.2%}" for a in arms if _tokens(a) != base]
    told = f"response tokens differ from the baseline's (caps): {', '.join(unequal)}"
    return Comparison(tuple(arms), (told,) if unequal else ())


def notes_of(arms: Sequence[Arm]) -> list[str]:
    """What is assumed and not measured in any of these runs, one line each."""
    sizes = {size for arm in arms for size in arm.run.sizes}
    told = [note for arm in arms for note in arm.run.assumed]
    told += [note for arm in arms for note in arm.run.machine.notes(sizes)]
    return list(dict.fromkeys(told))


def _tokens(arm: Arm) -> int:
    return arm.ledger.totals.response_tokens


def _pair(bounds: Bounds) -> list[float]:
    return [bounds.lo, bounds.hi]


def method_variants(config: FlexFloorConfig) -> dict[str, FlexFloorConfig]:
    """The configuration with each planning method; ``fixed`` takes `fixed_floor`, else the smallest with capacity."""
    found: dict[str, FlexFloorConfig] = {}
    for method in METHODS:
        changes: dict[str, Any] = {"method": method}
        if method == "fixed" and config.fixed_floor is None:
            usable = [size for size in config.admissible_sizes if size in config.capacity]
            changes["fixed_floor"] = min(usable, default=config.world_size)
        found[method] = changed(config, changes)
    return found


def changed(config: FlexFloorConfig, changes: Mapping[str, Any]) -> FlexFloorConfig:
    """The configuration with other settings, checked anew."""
    return config_from_mapping({**config.resolved(), **changes})


def presets_in(folder: str | Path) -> tuple[dict[str, FlexFloorConfig], list[str]]:
    """The configurations of a folder that share the most common world size, and a line for those left out.

    They come in the order of `METHODS`, then by name.

    Raises:
        InputError: no YAML file there, or one of them is wrong.
    """
    root = Path(folder)
    configs = {path.stem: load_config(path) for path in sorted(root.glob("*.yaml"))}
    if not configs:
        raise InputError("holds no *.yaml; name a folder of presets or one configuration", file=root)
    sizes = [config.world_size for config in configs.values()]
    common = max(sorted(set(sizes)), key=sizes.count)
    left = [f"{n} ({c.world_size} ranks)" for n, c in configs.items() if c.world_size != common]
    notes = [f"left out, {common} ranks are compared: {', '.join(left)}"] if left else []
    kept = [name for name, config in configs.items() if config.world_size == common]
    return {name: configs[name] for name in sorted(kept, key=lambda n: METHODS.index(configs[n].method))}, notes


def comparison_table(found: Comparison) -> Table:
    """The comparison for a terminal."""
    seeds = len(found.arms[0].ledger.totals.seeds)
    title = f"simulated, {found.arms[0].ledger.totals.ranks} ranks" + (f", mean of {seeds} seeds" if seeds > 1 else "")
    table = Table(title=title, caption=f"gains against {found.arms[0].name}")
    for head in HEADS:
        table.add_column(head, justify="left" if head == "Arm" else "right")
    for arm in found.arms:
        table.add_row(*arm_cells(arm))
    return table


def arm_cells(arm: Arm) -> list[str]:
    """One arm in words, as in ``HEADS``."""
    totals, gains = arm.ledger.totals, arm.gains
    capped = sum(seed.cap_hits[0] for seed in totals.seeds if seed.cap_hits)
    return [
        arm.name,
        f"{totals.throughput:,.1f}",
        f"{gains.throughput:+.1%}" if gains else "-",
        totals.efficiency.text(1),
        f"{gains.efficiency.mid:+.1%}" if gains else "-",
        f"{totals.window_seconds:,.1f}",
        f"{totals.occupied.mid:,.0f}",
        f"{totals.occupied.mid / totals.window_seconds:.2f}",
        str(sum(seed.preemptions for seed in totals.seeds)),
        str(capped),
    ]
