"""Stock vLLM against FlexFloor on CUDA devices, in one run: Q, E, transitions, memory, and what the simulator foretold.

Two servers stand side by side on the same devices: vLLM untouched, and FlexFloor's with expert rows for the floor.

    1. no plan        both run the same requests in turn; the ratio of throughputs, pair by pair
    2. calibration    step times and transition costs of FlexFloor's server, on prompts of its own
    3. predictions    T, H, Q and E of every arm below, written to --out before anything of it is measured
    4. arms           per set (skewed; drawn from --pmf and planned): stock, static, flex natural, flex planned, in turn
    5. report         medians beside the predictions; every run's folder is kept for `flexfloor report --html`

Usage: python tools/bench_cuda.py --shape a3b --pmf lengths_pmf.csv --out DIR [--rounds 3] [--pairs 8]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu.gaps import token_gap_ms
from gpu.serving import section, spec_of
from gpu.sets import Set, from_distribution, skewed
from gpu.shapes import SHAPES, write_config, write_weights
from gpu_elastic import versions
from rich.console import Console
from rich.table import Table
from unplanned import submit_all, untouched

from flexfloor.config import FlexFloorConfig, config_from_mapping
from flexfloor.driver.calibrate import Calibrated, Campaign, Watcher, save
from flexfloor.driver.calibration import Grid
from flexfloor.driver.checks import ModelFacts
from flexfloor.driver.engines import Engines
from flexfloor.driver.handles import LocalServer
from flexfloor.driver.orders import Request, Response, Sampling, StepOrder, predicted_survivors
from flexfloor.driver.rollout import logged_step
from flexfloor.events import PARTS, EventWriter, read_events
from flexfloor.ledger import load_run, report_json
from flexfloor.plan import EpochPlan
from flexfloor.simulate import Machine, simulate_workloads

SAMPLING = Sampling(temperature=1.0, ignore_eos=True, seeded=False)
"""Dummy weights repeat one token when they are sampled greedily, and repeated tokens share their experts."""
PLAIN_TOKENS = 480
"""Tokens of a request where no plan is installed: long enough for a hiccup to weigh little."""
ARMS = ("stock", "static", "natural", "planned")


class Stock:
    """vLLM untouched: no settings, no hooks in use, no spare rows."""

    def __init__(self, config: FlexFloorConfig, model: Path, folder: Path) -> None:
        spec = spec_of(config, model, folder)
        with untouched(spec):
            self.engines = Engines.start(spec)

    async def run(self, requests: Sequence[Request], name: str) -> tuple[float, int]:
        """Seconds and tokens of all requests, sent at once."""
        return await submit_all(self.engines, requests, SAMPLING, name)


class Ours:
    """FlexFloor's server."""

    def __init__(self, config: FlexFloorConfig, model: Path, folder: Path, vocabulary: int) -> None:
        self._folder, self._vocabulary, self._count = folder, vocabulary, 0
        self.responses: list[Response] = []
        self.server = LocalServer(spec_of(config, model, folder / "server"))
        self.statuses = self.server.start()
        self.facts = ModelFacts.read(model)

    def plain(self, requests: Sequence[Request], name: str) -> tuple[float, int]:
        """As `Stock.run`, on this server without a plan."""
        engines = self.server.server._engines
        if engines is None:
            raise RuntimeError("the server is not started")
        return self.server.wait(submit_all(engines, requests, SAMPLING, name))

    def arm(self, chosen: Set, plan: EpochPlan, name: str) -> Path:
        """Runs a plan; its run folder. The responses are kept until the next."""
        folder = self._folder / "runs" / f"{self._count:03d}-{chosen.name.replace(' ', '-')}-{name}"
        (folder / "events").mkdir(parents=True)
        events = EventWriter(folder / "events" / "driver.jsonl", run=folder.name)
        self.responses = []
        for step in plan.steps:
            self._count += 1
            order = StepOrder(
                digest=hashlib.sha256(f"{self._count}{folder.name}".encode()).hexdigest(),
                epoch=plan.epoch,
                step=step.step,
                ladder=step.ladder,
                rank_order=chosen.config.leave_order,
                requests=chosen.requests(step, self._vocabulary),
                sampling=SAMPLING,
                run=folder.name,
                events_dir=str(folder / "events"),
                predicted=predicted_survivors(step, step.ladder, chosen.config.leave_order),
                timed=True,
            )
            self.responses += logged_step(order, self.server, events, lambda _: None)
        events.close()
        return folder


def variants(chosen: Set) -> dict[str, EpochPlan]:
    """The plans of FlexFloor's arms."""
    still = [step.model_copy(update={"ladder": step.ladder[:1]}) for step in chosen.ours.steps]
    planned = [step.model_copy(update={"residency": "planned"}) for step in chosen.ours.steps]
    natural = [step.model_copy(update={"residency": "natural"}) for step in chosen.ours.steps]
    return {
        name: chosen.ours.model_copy(update={"steps": tuple(steps)})
        for name, steps in (("static", still), ("natural", natural), ("planned", planned))
    }


def figures(seconds: float, occupied: float, tokens: int, ranks: int) -> dict[str, float]:
    """T, H, W, Q, E of a run."""
    return {
        "T": seconds,
        "H": occupied,
        "W": tokens,
        "Q": tokens / seconds,
        "E": tokens / occupied,
        "share": occupied / (seconds * ranks),
    }


def measured(folder: Path) -> dict[str, float]:
    """Of a run folder; H is the middle of its bounds."""
    report = report_json(load_run(folder))
    occupied = statistics.mean(report["occupied_rank_seconds"])
    return figures(report["window_seconds"], occupied, report["response_tokens"], report["ranks"])


def foretold(chosen: Set, plan: EpochPlan, found: Calibrated) -> dict[str, float]:
    """By the simulator, from calibration and true lengths."""
    machine = Machine(found.table, found.costs, True)
    report = report_json(simulate_workloads(chosen.config, {0: chosen.truth}, machine, plan=plan).ledger())
    occupied = statistics.mean(report["occupied_rank_seconds"])
    return figures(report["window_seconds"], occupied, report["response_tokens"], report["ranks"])


def transitions(folder: Path, responses: Sequence[Response]) -> dict[str, Any]:
    """Parts of the shrinks in ms, rehearsal, restore, memory given back, graphs: from event log and token times."""
    events = read_events(folder).events
    left = [e.t for e in events if e.event == "detach_start"]
    commits = [
        {
            "to": e.fields["to"],
            **{part: round(e.fields[part] * 1e3, 2) for part in PARTS if part in e.fields},
            "quorum_to_token_ms": round(1e3 * sum(e.fields.get(part, 0.0) for part in PARTS), 2),
            "token_gap_ms": token_gap_ms(responses, e.fields["survivors"], max(t for t in left if t < e.t), e.t),
            "moved_bytes": e.fields.get("moved_bytes", 0),
            "captured": e.fields.get("captured", []),
        }
        for e in events
        if e.event == "stage_commit"
    ]
    starts = {e.rank: e.t for e in events if e.event == "sleep_start"}
    done = {e.rank: e.t for e in events if e.event == "local_complete"}
    over = max((e.t for e in events if e.event == "generation_end"), default=0.0)
    restored = {e.rank: e.t for e in events if e.event == "restore_start"}
    allowed = sum(over - done[rank] for rank in starts)
    return {
        "commits": commits,
        "allowed_rank_s": round(allowed, 4),
        "released_share": round(free_rank_seconds(folder) / allowed, 4) if allowed else None,
        "woken_before_restore_s": [
            round(restored[e.rank] - e.t, 4) for e in events if e.event == "wake_start" and e.t < restored[e.rank]
        ],
        "rehearsal_s": [round(e.fields["seconds"], 3) for e in events if e.event == "rehearsal" and e.rank == 0],
        "later_captures": [
            [e.fields["sizes"], round(e.fields["seconds"], 4)] for e in events if e.event == "capture_end"
        ],
        "restore_s": [round(e.fields["duration"], 4) for e in events if e.event == "restore_end" and e.rank == 0],
        "released": [
            {"rank": e.rank, "bytes": e.fields["released_bytes"], "s": round(e.t - starts[e.rank], 4)}
            for e in events
            if e.event == "sleep_end" and e.rank in starts
        ],
        "eager_steps": sum(e.fields["eager"] for e in events if e.event == "decode_audit"),
        "dummy": [
            [e.rank, e.fields["count"], round(e.fields["seconds"], 4)] for e in events if e.event == "dummy_steps"
        ],
    }


def free_rank_seconds(folder: Path) -> float:
    """Rank-seconds that were free for certain."""
    report = report_json(load_run(folder))
    return float(report["ranks"] * report["window_seconds"] - max(report["occupied_rank_seconds"]))


def no_plan(stock: Stock, ours: Ours, requests: Sequence[Request], pairs: int) -> dict[str, Any]:
    """Ratios ours / stock of neighbouring runs, order alternating."""
    runs: dict[str, Callable[[str], tuple[float, int]]] = {
        "stock": lambda name: ours.server.wait(stock.run(requests, name)),
        "ours": lambda name: ours.plain(requests, name),
    }
    speeds: dict[str, list[float]] = {"stock": [], "ours": []}
    for pair in range(-2, pairs):
        for label in ("stock", "ours") if pair % 2 else ("ours", "stock"):
            seconds, tokens = runs[label](f"{label}{pair}")
            if pair >= 0:
                speeds[label].append(tokens / seconds)
    ratios = [a / b for a, b in zip(speeds["ours"], speeds["stock"], strict=True)]
    whole = statistics.median(speeds["ours"]) / statistics.median(speeds["stock"])
    return {"ratios": ratios, "median": statistics.median(ratios), "of_medians": whole, "tokens_per_s": speeds}


def calibration(ours: Ours, config: FlexFloorConfig, folder: Path, rounds: int) -> Calibrated:
    """On prompts of its own; written to ``folder``."""
    (folder / "events").mkdir(parents=True)
    grid = Grid((1, 8, 16, 32, 64), (128,), tokens=40, rounds=rounds, sampling=SAMPLING)
    campaign = Campaign(ours.server, ours.statuses, config, ours.facts, grid, folder / "events", Watcher())
    campaign.warm_up()
    for _ in range(rounds):
        campaign.round()
    found = replace(campaign.conclude(), capacity={})
    save(found, folder, "natural", "dummy weights")
    return found


def main() -> None:
    """Run everything and write DIR/result.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="a3b")
    parser.add_argument("--pmf", type=Path, required=True, help="CSV output_tokens,probability")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=6)
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
    out = options.out.absolute()
    out.mkdir(parents=True)
    shape = SHAPES[options.shape]
    sets = sets_of(options, shape)
    if options.plan_only:
        return
    result: dict[str, Any] = {"shape": options.shape, "versions": versions(), "ranks": options.ranks}

    def keep() -> None:
        (out / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")

    with tempfile.TemporaryDirectory() as name:
        model = (write_config if options.shape == "a3b" else write_weights)(Path(name) / "model", shape)
        began = time.perf_counter()
        settings = config_of(options, shape, options.use_ours)
        stock = Stock(config_of(options, shape, options.use_stock), model, out / "stock")
        ours = Ours(settings, model, out, shape["vocab_size"])
        result["start_s"] = round(time.perf_counter() - began, 1)
        try:
            asked = sets[0].requests(sets[0].stock.steps[0], shape["vocab_size"])
            equal = [replace(request, max_tokens=PLAIN_TOKENS) for request in asked]
            result["no_plan"] = no_plan(stock, ours, equal, options.pairs)
            print("NO PLAN", round(result["no_plan"]["median"], 4), flush=True)
            found = calibration(ours, settings, out / "calibration", 2)
            plans = {chosen.name: {"stock": chosen.stock, **variants(chosen)} for chosen in sets}
            result["foretold"] = {
                chosen.name: {arm: foretold(chosen, plan, found) for arm, plan in plans[chosen.name].items()}
                for chosen in sets
            }
            keep()
            print("FORETOLD", json.dumps(result["foretold"]), flush=True)
            result["arms"] = {chosen.name: {arm: [] for arm in ARMS} for chosen in sets}
            result["transitions"] = {chosen.name: {arm: [] for arm in ARMS[1:]} for chosen in sets}
            for turn in range(options.rounds):
                for chosen in sets:
                    for arm in ARMS if turn % 2 else reversed(ARMS):
                        answer, seen = one(stock, ours, chosen, plans[chosen.name][arm], arm, shape["vocab_size"])
                        result["arms"][chosen.name][arm].append(answer)
                        if seen:
                            result["transitions"][chosen.name][arm].append(seen)
                        print("ARM", chosen.name, arm, json.dumps(answer), flush=True)
                        keep()
        finally:
            keep()
            ours.server.close()
            stock.engines.shut_down()
    show(result)


def config_of(options: argparse.Namespace, shape: dict[str, int], use: float, **changes: Any) -> FlexFloorConfig:
    """The configuration of a server that takes this share of a device."""
    dummy = options.shape == "a3b"
    made = section(dummy=dummy, combine="stock", use=use, world_size=options.ranks, floors=options.floors)
    return config_from_mapping({**made, "num_experts": shape["num_experts"], **changes})


def sets_of(options: argparse.Namespace, shape: dict[str, int]) -> list[Set]:
    """The skewed set and the drawn one; eight prompts a rank with eight responses each."""
    kv = {"capacity": {"natural": dict.fromkeys((*options.floors, options.ranks), 10**6)}}
    batched = config_of(options, shape, options.use_ours, responses_per_prompt=8, step_prompts=8 * options.ranks, kv=kv)
    if options.plans is not None:
        options.plans.mkdir(parents=True, exist_ok=True)
    drawn = from_distribution(
        batched, options.pmf, scale=options.scale, longest=options.longest, seed=options.seed, plans=options.plans
    )
    return [skewed(batched, options.longest), drawn]


def one(
    stock: Stock, ours: Ours, chosen: Set, plan: EpochPlan, arm: str, vocabulary: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Figures of one run, and what its log says of transitions (nothing for stock)."""
    if arm != "stock":
        folder = ours.arm(chosen, plan, arm)
        return measured(folder), transitions(folder, ours.responses)
    requests = [request for step in plan.steps for request in chosen.requests(step, vocabulary)]
    seconds, tokens = ours.server.wait(stock.run(requests, f"{chosen.name}{time.time_ns()}"))
    ranks = chosen.config.world_size
    return figures(seconds, seconds * ranks, tokens, ranks), {}


def show(result: dict[str, Any]) -> None:
    """The figures as a table."""
    console = Console(width=150)
    table = Table("set", "arm", "T, s", "foretold", "H, rank-s", "foretold", "Q", "E", "E / stock's", "foretold")
    for name, arms in result["arms"].items():
        told = result["foretold"][name]
        base = statistics.median(a["E"] for a in arms["stock"])
        for arm, answers in arms.items():
            middle = {key: statistics.median(a[key] for a in answers) for key in ("T", "H", "Q", "E")}
            table.add_row(
                name,
                arm,
                f"{middle['T']:.3f}",
                f"{told[arm]['T'] / middle['T'] - 1:+.1%}",
                f"{middle['H']:.3f}",
                f"{told[arm]['H'] / middle['H'] - 1:+.1%}",
                f"{middle['Q']:.0f}",
                f"{middle['E']:.0f}",
                f"{middle['E'] / base:.3f}",
                f"{told[arm]['E'] / told['stock']['E']:.3f}",
            )
    console.print(table)
    console.print(f"no plan, ours / stock: median {result['no_plan']['median']:.4f}")


if __name__ == "__main__":
    main()
