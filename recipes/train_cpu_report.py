"""What the arms of the CPU training recipe show, from their files alone; each check says pass or fail."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from flexfloor.driver.identity import compare_runs
from flexfloor.engine.row_versions import NOTHING
from flexfloor.events import Event, read_events
from flexfloor.history import read_lengths

GAP = "training/rollout_probs_diff_mean"
PEARSON = "training/rollout_actor_probs_pearson_corr"
SHOWN = {
    "reward": "critic/score/mean",
    "length": "response_length/mean",
    "gap": GAP,
    "pearson": PEARSON,
    "epoch": "flexfloor/epoch",
    "floor": "flexfloor/floor_reached",
    "q": "flexfloor/throughput_q",
    "e_lo": "flexfloor/efficiency_e/lo",
    "e_hi": "flexfloor/efficiency_e/hi",
    "released_lo": "flexfloor/released_rank_seconds/lo",
}


def figures(out: Path) -> dict[str, Any]:
    """All figures that the arms below ``out`` allow."""
    found: dict[str, Any] = {"arms": {}, "checks": {}, "failed": []}
    for folder in sorted(path.parent for path in out.glob("*/metrics.jsonl")):
        rows = metrics(folder / "metrics.jsonl")
        found["arms"][folder.name] = [
            {"step": row["step"], **{name: row.get(key) for name, key in SHOWN.items()}} for row in rows
        ]
    for name, check in (("train", _train), ("gap", _gap), ("identity", _identity), ("agreement", _agreement)):
        outcome = check(out, found["arms"])
        if outcome is not None:
            found["checks"][name] = outcome
            found["failed"] += [name] if not outcome["passed"] else []
    return found


def metrics(file: Path) -> list[dict[str, Any]]:
    """Steps of verl's file logger."""
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]
    return [{"step": row["step"], **row["data"]} for row in rows]


def _train(out: Path, arms: dict[str, Any]) -> dict[str, Any] | None:
    folder = out / "train" / "flexfloor"
    if "train" not in arms or not folder.is_dir():
        return None
    seen = read_lengths(folder / "lengths.jsonl")
    sizes = Counter((one.epoch, len(one.lengths)) for one in seen)
    log = read_events(folder).events
    late = restores_after_end(log)
    shrunk = Counter(int(event.epoch or 0) for event in log if event.event == "stage_commit")
    rewards = rewards_by_epoch(out / "train" / "rollouts", arms["train"])
    epochs = sorted({epoch for epoch, _ in sizes})
    whole = all(len({n for e, n in sizes if e == epoch}) == 1 for epoch in epochs)
    learned = rewards[-1] - rewards[0]
    loads = [event.fields for event in log if event.event == "weights_loaded"]
    stale = sum(row not in (load["version"], NOTHING) for load in loads for row in load["rows"])
    return {
        "passed": whole
        and not late
        and not stale
        and shrunk[0] == 0
        and all(shrunk[epoch] > 0 for epoch in epochs[1:])
        and learned > 0,
        "items_by_epoch": {str(epoch): sum(c for (e, _), c in sizes.items() if e == epoch) for epoch in epochs},
        "every_item_once_an_epoch": whole,
        "transitions_by_epoch": {str(epoch): shrunk[epoch] for epoch in epochs},
        "restores_after_the_rollout": late,
        "reward_by_epoch": rewards,
        "weights_versions": sorted({load["version"] for load in loads}),
        "rows_with_older_weights_after_a_sync": stale,
    }


def rewards_by_epoch(folder: Path, steps: list[dict[str, Any]]) -> list[float]:
    """Mean reward of each epoch; every epoch has the same prompts."""
    found: dict[int, list[float]] = defaultdict(list)
    for row in steps:
        lines = (folder / f"{row['step']}.jsonl").read_text("utf-8").splitlines()
        found[int(row["epoch"])] += [json.loads(line)["score"] for line in lines]
    return [sum(own) / len(own) for _, own in sorted(found.items())]


def restores_after_end(log: list[Event]) -> int:
    """Ranks that were not restored when their step's rollout ended, over all steps."""
    ends = {(e.epoch, e.step): e.t for e in log if e.event == "rollout_end"}
    gone: dict[tuple[Any, ...], int] = defaultdict(int)
    for event in log:
        if event.event in ("detach_end", "restore_end") and (event.epoch, event.step) in ends:
            late = event.t > ends[event.epoch, event.step]
            key = (event.epoch, event.step, event.replica, event.rank)
            gone[key] = 1 if event.event == "detach_end" or late else 0
    return sum(gone.values())


def _gap(_: Path, arms: dict[str, Any]) -> dict[str, Any] | None:
    stock = [row["gap"] for name in ("stock-a", "stock-b") for row in arms.get(name, [])]
    ours = [row["gap"] for row in arms.get("train", [])]
    if not stock or not ours:
        return None
    pairs = list(zip(arms.get("stock-a", []), arms.get("stock-b", []), strict=False))
    away = [min(abs(gap - one["gap"]) for one in pair) for gap, pair in zip(ours, pairs, strict=False)]
    on, off = ([row["gap"] for row in arms.get(name, [])] for name in ("on", "off"))
    return {
        "passed": max(ours) <= max(stock) and on == off,
        "least_mean_most": {
            name: [min(gaps), sum(gaps) / len(gaps), max(gaps)]
            for name in ("train", "stock-a", "stock-b")
            if (gaps := [row["gap"] for row in arms.get(name, [])])
        },
        "least_correlation": {
            name: min(row["pearson"] for row in arms[name]) for name in ("train", "stock-a", "stock-b") if name in arms
        },
        "largest_difference_of_two_stock_runs_in_a_step": max(
            (abs(a["gap"] - b["gap"]) for a, b in pairs), default=None
        ),
        "largest_distance_of_train_from_the_nearer_stock_run_in_a_step": max(away, default=None),
        "same_gaps_with_shrinking_and_without": on == off if on and off else None,
    }


def _identity(out: Path, arms: dict[str, Any]) -> dict[str, Any] | None:
    if not {"on", "off"} <= arms.keys():
        return None
    on, off = (out / name / "flexfloor" for name in ("on", "off"))
    same = compare_runs(on, off)
    shrunk = sum(event.event == "stage_commit" for event in read_events(on).events)
    kept = sum(event.event == "stage_commit" for event in read_events(off).events)
    return {
        "passed": same.whole and shrunk > 0 and kept == 0,
        "identical": same.identical,
        "responses": same.total,
        "transitions": shrunk,
        "transitions_with_shrinking_off": kept,
        "first_difference": same.first_difference,
    }


def _agreement(out: Path, arms: dict[str, Any]) -> dict[str, Any] | None:
    names = ("greedy-stock", "greedy-moved", "greedy-flex")
    if not set(names) <= arms.keys():
        return None
    steps = len(arms["greedy-stock"])
    stock, moved, flex = (outputs(out / name / "rollouts", steps) for name in names)
    itself, ours = agreement(stock[0], moved[0]), [agreement(stock[0], one) for one in flex]
    return {
        "passed": min(ours) >= itself,
        "responses": sum(len(own) for own in stock[0].values()),
        "stock_with_itself_under_another_placement": itself,
        "flexfloor_with_stock_by_epoch": ours,
        "prompts": len(stock[0]),
    }


def outputs(folder: Path, steps: int) -> list[dict[str, list[str]]]:
    """By epoch of so many steps, the responses of each prompt (verl's rollout dumps)."""
    found: list[dict[str, list[str]]] = []
    for file in sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem)):
        epoch = (int(file.stem) - 1) // steps
        while len(found) <= epoch:
            found.append(defaultdict(list))
        for line in file.read_text("utf-8").splitlines():
            row = json.loads(line)
            found[epoch][row["input"]].append(row["output"])
    return found


def agreement(ours: dict[str, list[str]], theirs: dict[str, list[str]]) -> float:
    """Share of responses that both have for the same prompt."""
    same = sum((Counter(ours[p]) & Counter(theirs.get(p, []))).total() for p in ours)
    return same / max(1, sum(len(own) for own in ours.values()))


def text(figures: dict[str, Any]) -> str:
    """The figures for people."""
    lines = []
    for name, rows in figures["arms"].items():
        lines.append(f"{name}: step " + " ".join(f"{key:>11}" for key in SHOWN))
        for row in rows:
            cells = [row[key] for key in SHOWN]
            lines.append(f"  {row['step']:>4} " + " ".join(f"{'-':>11}" if c is None else f"{c:>11.5g}" for c in cells))
    for name, outcome in figures["checks"].items():
        lines.append(f"{name}: {'pass' if outcome['passed'] else 'FAIL'}")
        lines += [f"    {key}: {value}" for key, value in outcome.items() if key != "passed"]
    return "\n".join(lines)
