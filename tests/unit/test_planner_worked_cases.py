"""The worked cases of planner.md section 8, through the command and through the modules."""

import json
from itertools import combinations
from pathlib import Path

import pytest
from planner_oracle import make_config, make_history

from flexfloor.cli.main import run
from flexfloor.config import load_config
from flexfloor.plan import EpochPlan
from flexfloor.planner import plan_epoch
from flexfloor.planner.admission import peak_tokens
from flexfloor.planner.demand import KvRules, Prompt, build_demand, to_micro
from flexfloor.planner.matching import all_pairs
from flexfloor.planner.schedule import Ladder, ladder_to

CONFIGS = Path(__file__).parents[2] / "configs"
FIGURE_3 = {
    "p0": [21, 19],
    "p1": [22, 4],
    "p2": [47, 7],
    "p3": [50, 39],
    "p4": [52, 48],
    "p5": [60, 16],
    "p6": [73, 68],
    "p7": [93, 16],
}


def write_figure_3(folder, method="flex", **changes):
    """lengths.jsonl and flexfloor.yaml of figure 3."""
    lengths, config = folder / "lengths.jsonl", folder / "flexfloor.yaml"
    lengths.write_text(
        "".join(
            json.dumps({"item_id": item, "epoch": 0, "prompt_tokens": 0, "lengths": row}) + "\n"
            for item, row in FIGURE_3.items()
        )
    )
    section = {
        "world_size": 4,
        "responses_per_prompt": 2,
        "step_prompts": 8,
        "floors": {"natural": [1, 2, 4]},
        "residency": "natural",
        "mu": 1,
        "kv": {"block_tokens": 1, "capacity": {"natural": {"2": 144, "4": 144}}},
        "method": method,
    }
    config.write_text(json.dumps({"flexfloor": {**section, **changes}}))
    return lengths, config


def plan_figure_3(folder, method, **changes):
    lengths, config = write_figure_3(folder, method, **changes)
    out = folder / "plan.json"
    assert run(["plan", "--lengths", str(lengths), "--config", str(config), "--out", str(out), "--quiet"]) == 0
    return EpochPlan.load(out)


@pytest.mark.parametrize(
    ("pair", "peak"),
    [
        (("p3", "p4"), 156),
        (("p0", "p3"), 78),
        (("p1", "p4"), 96),
        (("p2", "p6"), 141),
        (("p5", "p7"), 120),
        (("p0", "p1"), 57),
        (("p3", "p5"), 117),
        (("p4", "p7"), 144),
    ],
)
def test_active_token_peaks_of_figure_3(pair, peak):
    rules = KvRules(mu=1, block_tokens=1, prompt_sharing=True, responses=2)
    demand = build_demand([Prompt(p, to_micro(max(FIGURE_3[p])), tuple(FIGURE_3[p]), 0) for p in pair], 1000, rules)
    assert peak_tokens(demand.rows) == peak


@pytest.mark.parametrize("method", ["flex", "fixed"])
def test_release_aware_matching_of_figure_3(tmp_path, method):
    plan = plan_figure_3(tmp_path, method, fixed_floor=2)
    step = plan.steps[0]
    assert sorted(entry.completion for entry in step.ranks) == [50, 52, 73, 93]
    assert (step.tail, step.floor, step.ladder, step.quorum_times) == (93, 2, (4, 2), (52,))
    assert (step.release_area, step.kv_safe, step.optimality_gap) == (82, True, 0.0)
    assert (step.residency, step.kv_tokens_per_rank, step.cap) == ("natural", 144, None)
    assert step.excluded_floors == {"1": "no capacity"}
    assert max(step.capture_sizes) == 4
    assert [entry.completion for entry in step.ranks] == [50, 52, 73, 93], "rank 0 leaves first"
    assert plan.epoch == 1


def test_min_skew_matching_of_figure_3(tmp_path):
    step = plan_figure_3(tmp_path, "minskew").steps[0]
    assert sorted(entry.completion for entry in step.ranks) == [22, 60, 73, 93]
    assert (step.tail, step.quorum_times, step.release_area) == (93, (60,), 66)


@pytest.mark.parametrize("method", ["verl", "lengthsort", "ls_tg"])
def test_full_world_methods_do_not_shrink(tmp_path, method):
    step = plan_figure_3(tmp_path, method).steps[0]
    assert (step.ladder, step.quorum_times, step.release_area, step.floor) == ((4,), (), 0, 4)
    assert [entry.items for entry in step.ranks] == [("p0", "p1"), ("p2", "p3"), ("p4", "p5"), ("p6", "p7")]


def test_plan_file_has_the_keys_of_the_format(tmp_path):
    plan_figure_3(tmp_path, "flex")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert list(data) == ["schema", "epoch", "world_size", "method", "config_digest", "steps", "swaps"]
    assert list(data["steps"][0]) == [
        *("step", "items", "cap", "tail", "floor", "ladder", "quorum_times", "release_area", "residency"),
        *("kv_tokens_per_rank", "capture_sizes", "kv_safe", "optimality_gap", "excluded_floors", "ranks"),
    ]
    assert list(data["steps"][0]["ranks"][0]) == ["rank", "items", "completion", "peak_tokens"]
    assert data["schema"] == "flexfloor.plan/1"
    assert data["steps"][0]["tail"] == 93
    assert isinstance(data["steps"][0]["tail"], int)


def test_quotas_of_the_paper():
    assert Ladder((16, 8, 4, 2)).quotas == (8, 12, 14)
    assert ladder_to(4, [2, 4, 8, 16]).sizes == (16, 8, 4)


def test_a_step_of_32_prompts_has_at_most_496_pairs():
    assert len(all_pairs(32)) == 496 == len(list(combinations(range(32), 2)))


@pytest.mark.parametrize(
    ("preset", "method", "floors", "capacity"),
    [
        ("verl_baseline", "verl", None, {16: 380800}),
        ("lengthsort", "lengthsort", None, {16: 380800}),
        ("ls_tg", "ls_tg", None, {16: 380800}),
        ("fixed_f4", "fixed", None, {4: 280576, 8: 288256, 16: 380800}),
        ("minskew", "minskew", None, {4: 280576, 8: 288256, 16: 380800}),
        ("flex_n4", "flex", (16, 8, 4), {4: 280576, 8: 349952, 16: 380800}),
        ("flex_n2", "flex", (16, 8, 4, 2), {2: 131072, 4: 280576, 8: 349952, 16: 380800}),
        ("flex_p4", "flex", (16, 8, 4), {4: 133120, 8: 235264, 16: 380800}),
    ],
)
def test_presets_hold_the_papers_table(preset, method, floors, capacity):
    config = load_config(CONFIGS / f"{preset}.yaml")
    assert config.method == method
    assert floors is None or config.admissible_sizes == floors
    assert {size: config.capacity[size] for size in capacity} == capacity
    assert (config.world_size, config.responses_per_prompt, config.step_prompts) == (16, 16, 32)
    assert (str(config.mu), config.alpha, config.tail_guard.l_max) == ("1.16", 0.3, 16384)


def test_a_floor_without_capacity_leaves_the_ladder():
    lengths = {f"i{k}": [10 * k + 1] for k in range(16)}
    config = make_config(8, 16, 1, {2: 1000, 8: 1000}, floors={"natural": [2, 4, 8]})
    step = plan_epoch(config, make_history(lengths)).steps[0]
    assert step.ladder == (8, 2)
    assert step.excluded_floors == {"4": "no capacity"}
