"""Stock vLLM against FlexFloor on CUDA devices, in one run: Q, E, transitions, memory, and what the simulator foretold.

Two servers stand side by side on the same devices: vLLM untouched, and FlexFloor's, whose expert rows are for the floor
except in ``combine``.

    transitions   the first shrink after start, and one to another survivor: rows, groups and one captured graph
    no-plan       both run the same requests in turn; ratios of throughput and of the time of a step, pair by pair
    arms          calibration on prompts of its own; T, H, Q and E of every arm foretold and written to --out before any
                  is measured; then per set (skewed; drawn from --pmf and planned) stock, static, flex natural and flex
                  planned in turn. Every run's folder is kept for `flexfloor report --html`
    combine       FlexFloor's server with the invariant combine and no spare rows, beside vLLM as in no-plan

Before these, each in a process of its own with its figures in --out:

    identity      gpu_elastic.py, small shape: bit-identity, 50 cycles, memory
    agreement     gpu_agreement.py: the stock combine beside vLLM's own between EP sizes
    parts         gpu_elastic.py, a3b shape: every part of a transition, topology restore

Usage: python tools/bench_cuda.py --shape a3b --pmf lengths_pmf.csv --out DIR [--parts arms] [--ranks 4 --floors 2 1]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu.bench import versions
from gpu.figures import figures, foretold, measured, transitions
from gpu.servers import SAMPLING, Ours, Stock
from gpu.serving import section
from gpu.sets import Set, from_distribution, skewed
from gpu.shapes import SHAPES, write_config, write_weights
from gpu.tables import show
from unplanned import Served, interval

from flexfloor.config import FlexFloorConfig, config_from_mapping
from flexfloor.driver.calibrate import Calibrated, Campaign, Watcher, save
from flexfloor.driver.calibration import Grid
from flexfloor.driver.orders import Request
from flexfloor.errors import FlexFloorError
from flexfloor.plan import EpochPlan

PARTS = ("transitions", "no-plan", "arms", "combine")
"""Parts of this measurement, in their order."""
PROGRAMS = {
    "identity": ("gpu_elastic.py", "--shape", "small", "--use", "0.5", "--cycles", "50", "--limit", "600"),
    "agreement": ("gpu_agreement.py",),
    "parts": ("gpu_elastic.py", "--shape", "a3b", "--combine", "stock", "--cycles", "6"),
}
"""Other measurements, each a program beside this one."""
PLAIN_TOKENS = 320
"""Tokens of a request where no plan is installed."""
LEAN_TOKENS = 160
"""Longest response of the rollouts that show a first shrink."""
ARMS = ("stock", "static", "natural", "planned")


def variants(chosen: Set) -> dict[str, EpochPlan]:
    """The plans of FlexFloor's arms."""
    still = [step.model_copy(update={"ladder": step.ladder[:1]}) for step in chosen.ours.steps]
    planned = [step.model_copy(update={"residency": "planned"}) for step in chosen.ours.steps]
    natural = [step.model_copy(update={"residency": "natural"}) for step in chosen.ours.steps]
    return {
        name: chosen.ours.model_copy(update={"steps": tuple(steps)})
        for name, steps in (("static", still), ("natural", natural), ("planned", planned))
    }


class Run:
    """A measurement: its sets, its servers, and what is known so far (``result``, kept in DIR/result.json)."""

    def __init__(self, options: argparse.Namespace, sets: Sequence[Set], model: Path) -> None:
        self._options, self._sets, self._model = options, sets, model
        self._out = options.out.absolute()
        self.result: dict[str, Any] = {"shape": options.shape, "versions": versions(), "ranks": options.ranks}
        self._stock: Stock | None = None
        self._ours: Ours | None = None

    def start(self) -> None:
        """Both servers, where a part needs both: they stand side by side from the first measurement on."""
        if {"transitions", "no-plan", "arms"} & set(self._options.parts):
            began = time.perf_counter()
            self._beside()
            self._server()
            self.result["start_s"] = round(time.perf_counter() - began, 1)

    def close(self) -> None:
        """End all servers."""
        self.keep()
        self._end_ours()
        if self._stock is not None:
            self._stock.close()

    def keep(self) -> None:
        """Write what is known so far."""
        (self._out / "result.json").write_text(json.dumps(self.result, indent=1), encoding="utf-8")

    def transitions(self) -> None:
        """First shrinks: to the last rank, then to the first one."""
        ours, last = self._server(), self._options.ranks - 1
        found = self.result["first_shrinks"] = []
        for survivor, name in ((last, "first after start"), (0, "another survivor")):
            chosen = skewed(self._sets[0].config, LEAN_TOKENS, survivor=survivor, name=name)
            seen = transitions(ours.arm(chosen, variants(chosen)["natural"], "natural"), ours.responses)
            found.append({"set": name, **seen})
            print("FIRST", name, json.dumps(seen["commits"]), flush=True)
        self.keep()

    def no_plan(self) -> None:
        """FlexFloor's server without a plan beside vLLM."""
        self._pairs("no_plan", self._server())

    def combine(self) -> None:
        """The invariant combine, on a server without spare rows that takes the place of the other."""
        self._end_ours()
        self._beside()
        config = self._config(self._options.use_ours, combine="invariant")
        own = Ours(config, self._model, self._out / "invariant", smallest_floor=self._options.ranks)
        try:
            self._pairs("combine", own)
        finally:
            own.server.close()

    def arms(self) -> None:
        """Calibration, predictions, and all arms in turn."""
        ours = self._server()
        found = self._calibrated(ours)
        plans = {chosen.name: {"stock": chosen.stock, **variants(chosen)} for chosen in self._sets}
        self.result["foretold"] = {
            chosen.name: {arm: foretold(chosen, plan, found) for arm, plan in plans[chosen.name].items()}
            for chosen in self._sets
        }
        self.keep()
        print("FORETOLD", json.dumps(self.result["foretold"]), flush=True)
        answers = self.result["arms"] = {chosen.name: {arm: [] for arm in ARMS} for chosen in self._sets}
        seen = self.result["transitions"] = {chosen.name: {arm: [] for arm in ARMS[1:]} for chosen in self._sets}
        for turn in range(self._options.rounds):
            for chosen in self._sets:
                for arm in ARMS if turn % 2 else reversed(ARMS):
                    plan = plans[chosen.name][arm]
                    if arm == "stock":
                        answers[chosen.name][arm].append(self._stock_arm(chosen, plan))
                    else:
                        folder = ours.arm(chosen, plan, arm)
                        answers[chosen.name][arm].append(measured(folder))
                        seen[chosen.name][arm].append(transitions(folder, ours.responses))
                    print("ARM", chosen.name, arm, json.dumps(answers[chosen.name][arm][-1]), flush=True)
                    self.keep()

    def _server(self) -> Ours:
        if self._ours is None:
            self._ours = Ours(self._config(self._options.use_ours), self._model, self._out)
        return self._ours

    def _beside(self) -> Stock:
        if self._stock is None:
            self._stock = Stock(self._config(self._options.use_stock), self._model, self._out / "stock")
        return self._stock

    def _end_ours(self) -> None:
        if self._ours is not None:
            self._ours.server.close()
        self._ours = None

    def _config(self, use: float, **engine: Any) -> FlexFloorConfig:
        return config_of(self._options, use, engine=engine)

    def _stock_arm(self, chosen: Set, plan: EpochPlan) -> dict[str, float]:
        requests = [r for step in plan.steps for r in chosen.requests(step, self._vocabulary)]
        served = self._beside().run(requests, f"{chosen.name}{time.time_ns()}")
        return figures(served.seconds, served.seconds * self._options.ranks, served.tokens, self._options.ranks)

    @property
    def _vocabulary(self) -> int:
        return SHAPES[self._options.shape]["vocab_size"]

    def _pairs(self, name: str, ours: Ours) -> None:
        """Ratios ours / stock of neighbouring runs, order alternating; the first pair warms up."""
        pairs = self._options.pairs
        asked = self._sets[0].requests(self._sets[0].stock.steps[0], self._vocabulary)
        requests = [replace(request, max_tokens=PLAIN_TOKENS) for request in asked]
        runs: dict[str, Callable[[Sequence[Request], str], Served]] = {
            "stock": self._beside().run,
            "ours": ours.plain,
        }
        served: dict[str, list[Served]] = {"stock": [], "ours": []}
        for pair in range(-1, pairs):
            for label in ("stock", "ours") if pair % 2 else ("ours", "stock"):
                one = runs[label](requests, f"{label}{pair}")
                speed = f"{one.tokens / one.seconds:.0f} tokens/s, {1e3 * one.step_s:.3f} ms a step"
                print("PAIR", label, pair, speed, flush=True)
                if pair >= 0:
                    served[label].append(one)
            if pair >= 0:
                self.result[name] = compared(served)
                self.keep()

    def _calibrated(self, ours: Ours, rounds: int = 2) -> Calibrated:
        folder = self._out / "calibration"
        (folder / "events").mkdir(parents=True)
        grid = Grid((1, 8, 16, 32, 64), (128,), tokens=40, rounds=rounds, sampling=SAMPLING)
        settings = self._config(self._options.use_ours)
        campaign = Campaign(ours.server, ours.statuses, settings, ours.facts, grid, folder / "events", Watcher())
        campaign.warm_up()
        for _ in range(rounds):
            campaign.round()
        found = replace(campaign.conclude(), capacity={})
        save(found, folder, "natural", "dummy weights")
        return found


def main() -> None:
    """Run the parts and write DIR/result.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="a3b")
    parser.add_argument("--pmf", type=Path, required=True, help="CSV output_tokens,probability")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=(*PROGRAMS, *PARTS), default=(*PROGRAMS, *PARTS))
    parser.add_argument("--rounds", type=int, default=2, help="of the arms")
    parser.add_argument("--pairs", type=int, default=8, help="of no-plan and combine")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--floors", type=int, nargs="+", default=[1])
    parser.add_argument("--scale", type=float, default=0.04, help="factor on the drawn lengths")
    parser.add_argument("--seed", type=int, default=3, help="of the drawn lengths")
    parser.add_argument("--plans", type=Path, help="folder of the drawn set's plans, made before or now")
    parser.add_argument("--plan-only", action="store_true", help="write --plans and end: needs no device")
    parser.add_argument("--longest", type=int, default=1400, help="longest response, tokens")
    parser.add_argument("--use-stock", type=float, default=0.30, help="share of a device for the stock server")
    parser.add_argument("--use-ours", type=float, default=0.52, help="share of a device for FlexFloor's server")
    options = parser.parse_args()
    try:
        sets = sets_of(options)
        if options.plan_only:
            return
        options.out.absolute().mkdir(parents=True)
    except FileExistsError:
        parser.error(f"--out {options.out} is there already: name another folder")
    except FlexFloorError as error:
        parser.error(str(error))
    failed = [part for part in PROGRAMS if part in options.parts and not program(part, options)]
    if set(PARTS) & set(options.parts):
        with tempfile.TemporaryDirectory() as name:
            write = write_config if options.shape == "a3b" else write_weights
            run = Run(options, sets, write(Path(name) / "model", SHAPES[options.shape]))
            try:
                run.start()
                for part in PARTS:
                    if part in options.parts:
                        getattr(run, part.replace("-", "_"))()
            finally:
                run.close()
        show(run.result)
    if failed:
        sys.exit(f"these parts failed: {', '.join(failed)}")


def program(part: str, options: argparse.Namespace) -> bool:
    """Whether another measurement went through; its figures are in the output folder."""
    name, *arguments = PROGRAMS[part]
    ladder = [str(size) for size in (options.ranks, *sorted(options.floors, reverse=True))]
    file = options.out.absolute() / f"{part}.json"
    command = [
        sys.executable,
        str(Path(__file__).with_name(name)),
        *arguments,
        "--ladder",
        *ladder,
        "--json",
        str(file),
    ]
    return subprocess.run(command).returncode == 0


def compared(served: dict[str, list[Served]]) -> dict[str, Any]:
    """Ratios ours / stock of pairs, and what they were made of."""
    both = list(zip(served["ours"], served["stock"], strict=True))
    return {
        "tokens": PLAIN_TOKENS,
        "throughput": interval([(a.tokens / a.seconds) / (b.tokens / b.seconds) for a, b in both]),
        "step": interval([a.step_s / b.step_s for a, b in both]),
        "tokens_per_s": {label: [round(x.tokens / x.seconds, 1) for x in own] for label, own in served.items()},
        "step_ms": {label: [round(1e3 * x.step_s, 4) for x in own] for label, own in served.items()},
    }


def config_of(options: argparse.Namespace, use: float, *, engine: dict[str, Any], **changes: Any) -> FlexFloorConfig:
    """The configuration of a server that takes this share of a device."""
    dummy = options.shape == "a3b"
    made = section(dummy=dummy, combine="stock", use=use, world_size=options.ranks, floors=options.floors)
    made["engine"].update(engine)
    return config_from_mapping({**made, "num_experts": SHAPES[options.shape]["num_experts"], **changes})


def sets_of(options: argparse.Namespace) -> list[Set]:
    """The skewed set and, where arms are run, the drawn one; eight prompts a rank with eight responses each.

    Raises:
        FlexFloorError: the distribution cannot be read, or the plans belong to another configuration.
    """
    kv = {"capacity": {"natural": dict.fromkeys((*options.floors, options.ranks), 10**6)}}
    step = {"responses_per_prompt": 8, "step_prompts": 8 * options.ranks, "kv": kv}
    batched = config_of(options, options.use_ours, engine={}, **step)
    sets = [skewed(batched, options.longest)]
    if options.plan_only or "arms" in options.parts:
        if options.plans is not None:
            options.plans.mkdir(parents=True, exist_ok=True)
        cut = {"scale": options.scale, "longest": options.longest, "seed": options.seed}
        sets.append(from_distribution(batched, options.pmf, **cut, plans=options.plans))
    return sets


if __name__ == "__main__":
    main()
