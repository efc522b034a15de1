"""Predicts the paper's table 1 with the simulator and sets both side by side.

    python tools/paper_table.py --pmf CLIENT.csv --pmf POOLED.csv [--grid] [--json docs/results/paper-table.json]

Lengths come from docs/results/paper-workload.json (fitted to length statistics before any method was run), what a
transition takes from docs/results/paper-costs.yaml, decode step times from the built-in table. The one figure that is
fitted here is the factor on decode steps: it is set so that the verl baseline has the published throughput. The other
seven rows are predictions; those on the case `spread` are the main ones. `--case` adds the workload's other named cases
beside it and the base, `--grid` repeats this over same-prompt correlation and share at the cap, once for either form of
the dependence. `--diagnose` fits the correlation too, to the LengthSort row: no prediction of that row, but it shows
whether the others follow once the steps' tails are right.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from flexfloor.config import FlexFloorConfig, load_config
from flexfloor.simulate import Machine, Workload, drawn, h200_table, load_costs, read_distribution
from flexfloor.simulate.compare import Arm, simulate_arms
from flexfloor.simulate.workload import Distribution
from flexfloor.step_times import StepTimes

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
BASELINE, MAIN = "verl_baseline", "spread"
GRID_CORRELATIONS = (0.4, 0.6, 0.8)
GRID_METHODS = (BASELINE, "lengthsort", "ls_tg", "flex_n4", "flex_p4")
GOAL_POINTS = 8.0
"""How far, in percentage points, a predicted gain may lie from the published one."""


@dataclass(frozen=True)
class Published:
    """One row of seed 001, table 1 (and table 8): Q and its SD over seeds, E's midpoint, T an epoch, preemptions."""

    throughput: float
    spread: float
    efficiency: float
    seconds: float
    preemptions: int


PUBLISHED = {
    BASELINE: Published(3711.3, 33.0, 231.95, 4152.2, 0),
    "lengthsort": Published(4952.2, 246.4, 309.55, 3112.0, 109),
    "ls_tg": Published(5221.3, 43.2, 326.35, 2942.3, 118),
    "fixed_f4": Published(5372.9, 29.5, 371.7, 2860.7, 1),
    "minskew": Published(5393.7, 35.2, 374.65, 2849.1, 0),
    "flex_n4": Published(5575.1, 44.2, 385.35, 2762.5, 0),
    "flex_n2": Published(5471.2, 52.2, 381.1, 2807.1, 0),
    "flex_p4": Published(5668.7, 42.8, 383.65, 2710.1, 0),
}


class Setting:
    """The paper's setting on the built-in step times.

    Args:
        pmf: the distributions of the workload file, in its order.
        table: decode step times, None for the built-in ones.

    Raises:
        SystemExit: a distribution is not the one that the workload was fitted with.
    """

    def __init__(self, pmf: Sequence[Path], table: Path | None) -> None:
        self.work: dict[str, Any] = json.loads((RESULTS / "paper-workload.json").read_text(encoding="utf-8"))
        for path, wanted in zip(pmf, self.work["distributions"], strict=True):
            if hashlib.sha256(path.read_bytes()).hexdigest() != wanted["sha256"]:
                raise SystemExit(f"{path}: is not the {wanted['file']} that the workload was fitted with")
        self.parts: list[Distribution] = [read_distribution(path) for path in pmf]
        self.table = StepTimes.load(table) if table else h200_table()
        self.costs = load_costs(RESULTS / "paper-costs.yaml")
        self.configs: dict[str, FlexFloorConfig] = {
            name: load_config(ROOT / "configs" / f"{name}.yaml") for name in PUBLISHED
        }

    def arms(self, case: dict[str, Any], names: Sequence[str], scale: float) -> dict[str, Arm]:
        """The named arms over the lengths of one case, decode steps times ``scale``."""
        costs = self.costs.model_copy(update={"step_scale": scale})
        machine = Machine(self.table, costs, extrapolate=True)
        works = self._workloads(case)
        found = simulate_arms({name: self.configs[name] for name in names}, lambda _: works, lambda _: machine)
        return {arm.name: arm for arm in found.arms}

    def _workloads(self, case: dict[str, Any]) -> dict[int, Workload]:
        weights = (case["weight"], 1 - case["weight"])
        return {
            seed: drawn(
                list(zip(self.parts, weights, strict=True)),
                items=self.work["items"],
                responses=self.work["responses"],
                epochs=self.work["epochs"],
                correlation=case["correlation"],
                prompt_tokens=self.work["prompt_tokens"],
                seed=seed,
                scale=case["scale"],
                runaways=case.get("runaways", 0.0),
                strays=case.get("strays", 0.0),
                growth=case.get("growth", 0.0),
            )
            for seed in self.work["seeds"]
        }

    def fitted_scale(self, case: dict[str, Any]) -> float:
        """The factor on decode steps at which the baseline has the published throughput (within 0.01 %)."""
        scale, wanted = 4.0, PUBLISHED[BASELINE].throughput
        for _ in range(8):
            reached = self.arms(case, [BASELINE], scale)[BASELINE].ledger.totals.throughput
            if abs(reached / wanted - 1) < 1e-4:
                break
            scale *= reached / wanted
        return scale

    def predicted(self, case: dict[str, Any]) -> tuple[float, dict[str, Arm]]:
        """The fitted factor and all eight arms."""
        scale = self.fitted_scale(case)
        return scale, self.arms(case, list(PUBLISHED), scale)


def row(name: str, arm: Arm) -> dict[str, Any]:
    """One arm's figures beside the published ones; gains in percent, misses in percentage points."""
    totals, own, base = arm.ledger.totals, PUBLISHED[name], PUBLISHED[BASELINE]
    gain_q = 100 * arm.gains.throughput if arm.gains else 0.0
    gain_e = 100 * arm.gains.efficiency.mid if arm.gains else 0.0
    wanted_q, wanted_e = (100 * (a / b - 1) for a, b in ((own.throughput, base.throughput), _efficiencies(own)))
    epochs = len(arm.run.plans)
    steps = [step for plan in arm.run.plans.values() for step in plan.steps]
    hits = [seed.cap_hits for seed in totals.seeds if seed.cap_hits]
    return {
        "throughput": totals.throughput,
        "throughput_sd": totals.throughput_sd,
        "efficiency": totals.efficiency.mid,
        "gain_q": gain_q,
        "gain_e": gain_e,
        "published_gain_q": wanted_q,
        "published_gain_e": wanted_e,
        "miss_q": gain_q - wanted_q,
        "miss_e": gain_e - wanted_e,
        "seconds_an_epoch": sum(seed.window_seconds for seed in totals.seeds) / epochs,
        "rank_seconds_an_epoch": sum(seed.occupied.mid for seed in totals.seeds) / epochs,
        "occupied_ranks": totals.occupied.mid / totals.window_seconds,
        "mean_length": totals.response_tokens / sum(seed.responses or 0 for seed in totals.seeds),
        "preemptions_in_six_epochs": 6 / epochs * sum(seed.preemptions for seed in totals.seeds),
        "capped_short_and_global": [sum(hit[k] for hit in hits) for k in (0, 1)],
        "floors": dict(sorted(Counter(step.floor for step in steps).items())),
        "short_caps": sum(step.cap is not None and step.cap < 16384 for step in steps),
        "steps": len(steps),
        "shrinks": sum(len(out.commits) for outs in arm.run.outcomes.values() for out in outs),
        "unsafe_steps": sum(not step.kv_safe for step in steps),
        "per_seed": [
            {"seed": s.seed, "throughput": s.throughput, "efficiency": s.efficiency.mid} for s in totals.seeds
        ],
        "problems": len(arm.ledger.problems),
    }


def _efficiencies(own: Published) -> tuple[float, float]:
    return own.efficiency, PUBLISHED[BASELINE].efficiency


def verdict(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Whether the goal is met: the misses, and the order of the methods."""
    misses = {n: max(abs(r["miss_q"]), abs(r["miss_e"])) for n, r in rows.items() if n != BASELINE}
    chain = [BASELINE, "lengthsort", "ls_tg"]
    elastic = [name for name in rows if name not in chain]
    orders = {}
    for key in ("throughput", "efficiency"):
        values = [rows[name][key] for name in chain]
        values.append(min(rows[name][key] for name in elastic))
        orders[key] = all(a < b for a, b in pairwise(values))
    return {
        "largest_miss": max(misses.values()),
        "rows_within_goal": sum(miss <= GOAL_POINTS for miss in misses.values()),
        "order_holds": orders,
    }


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    """The table for the documentation."""
    lines = [
        "| method | Q published | Q predicted | Q gain | predicted | miss | E gain | predicted | miss |",
        "|:--|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, r in rows.items():
        own = PUBLISHED[name]
        line = f"| {name} | {own.throughput:,.0f} ± {own.spread:.0f} "
        line += f"| {r['throughput']:,.0f} ± {r['throughput_sd']:.0f} |"
        if name == BASELINE:
            lines.append(f"{line} (fitted) | | | | |")
            continue
        for kind in ("q", "e"):
            wanted, found, miss = r[f"published_gain_{kind}"], r[f"gain_{kind}"], r[f"miss_{kind}"]
            line += f" {wanted:+.1f} % | {found:+.1f} % | {'' if abs(miss) <= GOAL_POINTS else '**'}{miss:+.1f}"
            line += " |" if abs(miss) <= GOAL_POINTS else "** |"
        lines.append(line)
    return "\n".join(lines)


def run_case(setting: Setting, case: dict[str, Any]) -> dict[str, Any]:
    """Fits the factor on one case and predicts all rows."""
    scale, arms = setting.predicted(case)
    rows = {name: row(name, arms[name]) for name in PUBLISHED}
    sizes = {size for arm in arms.values() for size in arm.run.sizes}
    notes = list(dict.fromkeys(note for arm in arms.values() for note in arm.run.assumed))
    notes += Machine(setting.table, setting.costs, extrapolate=True).notes(sizes)
    return {"case": case, "step_scale": scale, "rows": rows, "verdict": verdict(rows), "assumptions": notes}


def summary_markdown(cases: dict[str, dict[str, Any]]) -> str:
    """Gains of Q / E in percent, one column a case, and how many rows lie within the goal."""
    names = [f"{name} ({_correlation(one['case'])})" for name, one in cases.items()]
    lines = [f"| method | published | {' | '.join(names)} |", "|:--|" + "--:|" * (len(names) + 1)]
    for method in PUBLISHED:
        if method == BASELINE:
            continue
        own = next(iter(cases.values()))["rows"][method]
        cells = [f"{own['published_gain_q']:+.1f} / {own['published_gain_e']:+.1f}"]
        cells += [f"{r['gain_q']:+.1f} / {r['gain_e']:+.1f}" for r in (one["rows"][method] for one in cases.values())]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    found = [one["verdict"] for one in cases.values()]
    lines.append("| largest miss, points | | " + " | ".join(f"{v['largest_miss']:.1f}" for v in found) + " |")
    lines.append(f"| rows within {GOAL_POINTS:g} | | " + " | ".join(str(v["rows_within_goal"]) for v in found) + " |")
    shares = [_over_tail_guard(one["rows"]) for one in cases.values()]
    told = " | ".join(f"{q:.3f} / {e:.3f}" for q, e in shares)
    published = [PUBLISHED["flex_n4"], PUBLISHED["ls_tg"]]
    ratios = published[0].throughput / published[1].throughput, published[0].efficiency / published[1].efficiency
    lines.append(f"| flex_n4 over ls_tg | {ratios[0]:.3f} / {ratios[1]:.3f} | {told} |")
    return "\n".join(lines)


def _correlation(case: dict[str, Any]) -> str:
    """Of normal scores; of lengths where the spread grows, as that one was fitted."""
    fitted = case.get("fitting", {}).get("length_correlation", case.get("length_correlation"))
    return f"{case['correlation']:g}" if fitted is None else f"lengths {fitted:.1f}"


def _over_tail_guard(rows: dict[str, dict[str, Any]]) -> tuple[float, float]:
    flex, guard = rows["flex_n4"], rows["ls_tg"]
    return flex["throughput"] / guard["throughput"], flex["efficiency"] / guard["efficiency"]


def diagnosed(setting: Setting, case: dict[str, Any]) -> dict[str, Any]:
    """The case with the correlation, in hundredths, at which LengthSort's gain comes nearest to the published one."""
    wanted = PUBLISHED["lengthsort"].throughput / PUBLISHED[BASELINE].throughput - 1
    gains: dict[int, float] = {}

    def gain(hundredths: int) -> float:
        if hundredths not in gains:
            tried = case | {"correlation": hundredths / 100}
            arm = setting.arms(tried, [BASELINE, "lengthsort"], setting.fitted_scale(tried))["lengthsort"]
            gains[hundredths] = arm.gains.throughput if arm.gains else 0.0
        return gains[hundredths]

    low, high = 60, 97
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if gain(middle) < wanted else (low, middle)
    nearest = min((low, high), key=lambda c: abs(gain(c) - wanted))
    return {**case, "correlation": nearest / 100, "name": "diagnosis"}


def grid_cell(setting: Setting, case: dict[str, Any]) -> dict[str, Any]:
    """Gains and misses of the methods of `GRID_METHODS` for one workload, the factor fitted anew."""
    scale = setting.fitted_scale(case)
    arms = setting.arms(case, GRID_METHODS, scale)
    rows = {name: row(name, arms[name]) for name in GRID_METHODS[1:]}
    kept = ("gain_q", "gain_e", "miss_q", "miss_e")
    return {
        **{key: case[key] for key in ("form", "length_correlation", "correlation", "cap_share") if key in case},
        "scale": scale,
        "rows": {name: {key: r[key] for key in kept} for name, r in rows.items()},
        "largest_miss": max(max(abs(r["miss_q"]), abs(r["miss_e"])) for r in rows.values()),
    }


def grid(setting: Setting) -> list[dict[str, Any]]:
    """Every cell of correlation and share at the cap, of both forms."""
    cells = []
    for case in setting.work["cases"]:
        if "name" in case or case.get("length_correlation", case["correlation"]) not in GRID_CORRELATIONS:
            continue
        told = f"correlation {_correlation(case)}, at the cap {case['cap_share']:.2%}"
        print(told, file=sys.stderr, flush=True)
        cells.append(grid_cell(setting, case))
    return cells


def form_of(cell: dict[str, Any]) -> str:
    """The dependence that a cell is drawn with."""
    return str(cell.get("form", "even"))


def grid_markdown(cells: Sequence[dict[str, Any]]) -> str:
    """Predicted gains over the grid, Q / E in percent."""
    names = list(cells[0]["rows"])
    grown = form_of(cells[0]) != "even"
    heads = ["at the cap", "correlation of lengths" if grown else "correlation", *names, "largest miss"]
    lines = [f"| {' | '.join(heads)} |", "|" + "--:|" * len(heads)]
    for cell in sorted(cells, key=lambda cell: (cell["cap_share"], cell["correlation"])):
        told = " | ".join(f"{cell['rows'][n]['gain_q']:+.0f} / {cell['rows'][n]['gain_e']:+.0f}" for n in names)
        correlation = cell.get("length_correlation", cell["correlation"])
        lines.append(f"| {cell['cap_share']:.1%} | {correlation:g} | {told} | {cell['largest_miss']:.1f} |")
    return "\n".join(lines)


def told(found: dict[str, Any]) -> str:
    """What else the rows say, for a terminal."""
    lines = [f"step scale {found['step_scale']:.4f}", markdown(found["rows"]), json.dumps(found["verdict"])]
    for name, r in found["rows"].items():
        own = PUBLISHED[name]
        short, at_limit = r["capped_short_and_global"]
        lines += [
            f"{name:14s} T {r['seconds_an_epoch']:7.1f} s (published {own.seconds:7.1f}), "
            f"{r['occupied_ranks']:.2f} ranks, "
            f"preempted {r['preemptions_in_six_epochs']:.0f} (published {own.preemptions}), floors {r['floors']},",
            f"{'':14s} short caps in {r['short_caps']} of {r['steps']} steps, responses at caps {short} short, "
            f"{at_limit} global, steps over KV capacity {r['unsafe_steps']}",
        ]
    return "\n".join(lines)


def main(
    pmf: Annotated[list[Path], typer.Option(help="The two CSVs that the workload was fitted with, in that order.")],
    json_out: Annotated[Path | None, typer.Option("--json", help="Write everything as JSON.")] = None,
    table: Annotated[Path | None, typer.Option(help="Decode step times instead of the built-in ones.")] = None,
    with_grid: Annotated[bool, typer.Option("--grid", help="Also over correlation and share at the cap.")] = False,
    diagnose: Annotated[
        bool, typer.Option("--diagnose", help="Also with the correlation fitted to LengthSort.")
    ] = False,
    case: Annotated[list[str] | None, typer.Option(help="Named cases beside the main one and the base.")] = None,
) -> None:
    """Predict table 1."""
    setting = Setting(pmf, table)
    base = setting.work["base"]
    named = {c["name"]: c for c in setting.work["cases"] if "name" in c}
    first = next(c for c in setting.work["cases"] if all(c[key] == base[key] for key in base))
    if unknown := set(case or []) - named.keys():
        raise SystemExit(f"no case {', '.join(sorted(unknown))}; there are {', '.join(named)}")
    chosen = {MAIN: named[MAIN], "base": first} | {name: named[name] for name in named if name in (case or [])}
    if diagnose:
        chosen["diagnosis"] = diagnosed(setting, first)
    found: dict[str, Any] = {"step_times": table.name if table else "built in", "cases": {}}
    for name, one in chosen.items():
        found["cases"][name] = run_case(setting, one)
        print(f"\n{name}: correlation {one['correlation']}\n{told(found['cases'][name])}", flush=True)
    print(f"\n{summary_markdown(found['cases'])}")
    if with_grid:
        found["grid"] = grid(setting)
        for form in ("spread", "even"):
            print(f"\n{grid_markdown([cell for cell in found['grid'] if form_of(cell) == form])}")
    if json_out is not None:
        json_out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
