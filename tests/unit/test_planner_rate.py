"""Rate-aware planning: predictions against a token-by-token loop, the choice of the floor, and bad tables."""

import json

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planner_oracle import make_config, make_history
from planner_rate_oracle import token_by_token
from test_planner_properties import steps
from test_planner_worked_cases import FIGURE_3, plan_figure_3, write_figure_3

from flexfloor.cli.main import run
from flexfloor.config import config_from_mapping, load_config
from flexfloor.config.sections import TransitionsConfig
from flexfloor.errors import InputError
from flexfloor.plan import EpochPlan
from flexfloor.planner import plan_epoch
from flexfloor.planner.demand import KvRules, Prompt, build_demand, to_micro
from flexfloor.planner.rate import Load, Prediction, choose, expected_lengths, predict
from flexfloor.step_times import Row, StepTimes

PROFILE = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
HEAD = "ep,rank1_idle,batch_per_rank,decode_ms"
FLAT = [HEAD, *(f"{ep},0,{batch},1000" for ep in (1, 2, 4) for batch in (1, 16))]
SLOW_2 = [HEAD, "4,0,1,1000", "4,0,16,1000", "2,0,1,1500", "2,0,16,1500"]
seconds = st.floats(0.0, 20.0)


def table(folder, lines, name="steps.csv"):
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


@st.composite
def schedules(draw):
    """(ranks, ladder, quorum times, table, costs, prompt): whole numbers throughout."""
    world = draw(st.integers(1, 5))
    ranks = draw(st.lists(st.lists(st.integers(1, 14), max_size=4), min_size=world, max_size=world))
    ranks[draw(st.integers(0, world - 1))].append(draw(st.integers(1, 14)))
    below = draw(st.sets(st.integers(1, world)))
    sizes = (world, *sorted(below - {world}, reverse=True))
    ends = sorted(max(lengths, default=0) for lengths in ranks)
    contexts = sorted(draw(st.sets(st.integers(1, 20), max_size=3))) or [0]
    ms = st.integers(5, 40)
    rows = [Row(ep, b, draw(ms) / 1e3, False, c) for ep in sizes for b in (1, 2, 5) for c in contexts]
    rows += [Row(ep, 2, draw(ms) / 1e3, True, contexts[0]) for ep in sizes if draw(st.booleans())]
    costs = TransitionsConfig(**{name: draw(seconds) for name in ("prepare_s", "shrink_s", "release_s", "restore_s")})
    return ranks, sizes, [ends[world - size - 1] for size in sizes[1:]], rows, costs, draw(st.integers(0, 9))


@PROFILE
@given(schedules())
def test_a_prediction_is_what_a_loop_over_tokens_gives(case):
    ranks, sizes, times, rows, costs, prompt = case
    steps_of = StepTimes(rows)
    curves = {size: steps_of.curve(size, extrapolate=True) for size in sizes}
    found = predict(Load.of(ranks, prompt), sizes, times, curves, costs)
    window, occupied = token_by_token(ranks, sizes, times, curves, costs, prompt)
    assert found.seconds == pytest.approx(window, rel=1e-9, abs=1e-12)
    assert found.rank_seconds == pytest.approx(occupied, rel=1e-9, abs=1e-12)
    assert found.tokens == sum(map(sum, ranks))
    assert found.rank_seconds <= sizes[0] * found.seconds + 1e-9


@PROFILE
@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 90), st.integers(1, 8)), min_size=1, max_size=6),
    st.floats(0, 1),
)
def test_the_choice_is_the_most_efficient_within_the_bound(rows, eps):
    predictions = [Prediction(t, h, 100.0) for t, h, _ in rows]
    taken = predictions[choose(predictions, [floor for *_, floor in rows], eps)]
    limit = (1 + eps) * min(p.seconds for p in predictions)
    assert taken.seconds <= limit
    assert all(p.efficiency <= taken.efficiency * (1 + 1e-8) for p in predictions if p.seconds <= limit)


def test_one_efficiency_takes_the_larger_floor():
    same = Prediction(5.0, 9.0, 100.0)
    assert choose([same, same, same], [2, 8, 4], 0.02) == 1


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """A table of 6 sizes: a step takes (1 + slope * (6 - EP)) * (8 + B) ms, one file a slope."""
    folder = tmp_path_factory.mktemp("tables")
    return {
        slope: table(
            folder,
            [HEAD, *(f"{e},0,{b},{(1 + slope * (6 - e)) * (8 + b)}" for e in range(1, 7) for b in (1, 64))],
            f"{slope}.csv",
        )
        for slope in (-0.1, 0.0, 0.05, 0.2, 1.0)
    }


@settings(PROFILE, max_examples=40)
@given(
    case=steps(),
    slope=st.sampled_from([-0.1, 0.0, 0.05, 0.2, 1.0]),
    eps=st.sampled_from([0.0, 0.02, 0.3]),
    each=seconds,
)
def test_never_less_efficient_than_the_release_area_choice_that_meets_the_bound(tables, case, slope, eps, each):
    config, lengths, tokens = case
    rate = {"table": tables[slope], "eps": eps, "transitions": {"shrink_s": each / 100, "restore_s": each / 50}}
    known = make_history(lengths, tokens)

    def step(**changes):
        return plan_epoch(config_from_mapping({**config.resolved(), "rate": rate, **changes}), known).steps[0]

    taken = step()
    area = step(rate={**rate, "objective": "release_area"})
    assert area.model_copy(update={"predicted": None}) == plan_epoch(config, known).steps[0]
    if not taken.kv_safe:
        assert taken == area
        return
    candidates = [area]
    for floor in config.admissible_sizes:
        one = step(method="fixed", fixed_floor=floor)
        candidates += [one] if one.floor == floor and one.kv_safe else []
    assert not area.kv_safe or area.floor in {one.floor for one in candidates[1:]}
    limit = (1 + eps) * min(one.predicted.seconds for one in candidates)
    assert taken.predicted.seconds <= limit * (1 + 1e-9)
    for one in candidates:
        if one.predicted.seconds <= limit * (1 - 1e-9):
            assert taken.predicted.efficiency >= one.predicted.efficiency * (1 - 1e-8)


# ---- figure 3 -------------------------------------------------------------------------------------------------------


def test_figure_3_where_all_sizes_are_equally_fast(tmp_path):
    step = plan_figure_3(tmp_path, "flex", rate={"table": table(tmp_path, FLAT)}).steps[0]
    assert (step.floor, step.quorum_times) == (2, (52,))
    tokens = sum(map(sum, FIGURE_3.values()))
    assert step.predicted.seconds == pytest.approx(93)
    assert step.predicted.rank_seconds == pytest.approx(4 * 93 - 82)
    assert step.predicted.efficiency == pytest.approx(tokens / (4 * 93 - 82))
    assert step.notes == ()


def test_figure_3_a_slow_small_world_stays_whole_and_eps_buys_it_back(tmp_path):
    slow = {"table": table(tmp_path, SLOW_2)}
    step = plan_figure_3(tmp_path, "flex", rate=slow).steps[0]
    assert (step.floor, step.release_area, step.optimality_gap) == (4, 0, 0)
    assert (step.predicted.seconds, step.predicted.rank_seconds) == (pytest.approx(93), pytest.approx(372))
    # 52 s at EP 4 and 41 * 1.5 s at EP 2: T 113.5 (22 % longer), H 4 * 52 + 2 * 61.5 = 331
    step = plan_figure_3(tmp_path, "flex", rate={**slow, "eps": 0.25}).steps[0]
    assert (step.floor, step.predicted.rank_seconds) == (2, pytest.approx(331))
    step = plan_figure_3(tmp_path, "flex", rate={**slow, "objective": "release_area"}).steps[0]
    assert (step.floor, step.predicted.seconds) == (2, pytest.approx(113.5))


def test_figure_3_transitions_are_paid_and_release_and_restore_are_charged(tmp_path):
    costs = {"prepare_s": 1.0, "shrink_s": 2.0, "release_s": 3.0, "restore_s": 4.0}
    rate = {"table": table(tmp_path, FLAT), "transitions": costs, "eps": 1.0}
    step = plan_figure_3(tmp_path, "flex", rate=rate).steps[0]
    assert step.predicted.seconds == pytest.approx(93 + 1 + 2 + 4)
    assert step.predicted.rank_seconds == pytest.approx(4 * 100 - 2 * (41 - 3))
    dear = plan_figure_3(tmp_path, "flex", rate={**rate, "transitions": {"shrink_s": 60}}).steps[0]
    assert dear.floor == 4


def test_other_methods_are_predicted_and_keep_their_choice(tmp_path):
    rate = {"table": table(tmp_path, SLOW_2)}
    for method in ("verl", "lengthsort", "minskew"):
        with_rate = plan_figure_3(tmp_path, method, rate=rate).steps[0]
        plain = plan_figure_3(tmp_path, method).steps[0]
        assert with_rate.predicted is not None
        assert with_rate.model_copy(update={"predicted": None}) == plain


def test_without_a_table_the_plan_has_no_new_key_and_enabled_switches_it_off(tmp_path):
    for rate in ({}, {"table": table(tmp_path, FLAT), "enabled": False}):
        plan = plan_figure_3(tmp_path, "flex", rate=rate)
        assert {"predicted", "notes"}.isdisjoint(plan.to_json()["steps"][0])


def test_a_prediction_survives_the_plan_file(tmp_path):
    plan = plan_figure_3(tmp_path, "flex", rate={"table": table(tmp_path, FLAT)})
    assert set(plan.to_json()["steps"][0]["predicted"]) == {"seconds", "rank_seconds", "efficiency"}
    assert EpochPlan.load(tmp_path / "plan.json") == plan


def test_explain_names_every_candidate_and_the_missing_context(tmp_path):
    rate = {"table": table(tmp_path, SLOW_2), "explain": True}
    notes = plan_figure_3(tmp_path, "flex", rate=rate).steps[0].notes
    assert [note.split(":")[0] for note in notes[:2]] == ["floor 2", "floor 4"]
    assert "113.5 s, 331 rank-s" in notes[0]
    assert "no context axis" in notes[2]


def test_a_context_axis_makes_long_prompts_dearer(tmp_path):
    head = "ep,batch_per_rank,context_tokens,decode_ms"
    rows = [f"{ep},{b},{c},{ms}" for ep in (2, 4) for b in (1, 16) for c, ms in ((10, 10), (1010, 110))]
    lengths, config = write_figure_3(tmp_path, rate={"table": table(tmp_path, [head, *rows]), "explain": True})
    text = lengths.read_text()
    seconds = []
    for prompt in (0, 500):
        lengths.write_text(text.replace('"prompt_tokens": 0', f'"prompt_tokens": {prompt}'))
        out = tmp_path / "plan.json"
        changed = yaml.safe_load(config.read_text())
        changed["flexfloor"]["kv"]["capacity"]["natural"] = {2: 5000, 4: 5000}
        config.write_text(json.dumps(changed))
        assert run(["plan", "--lengths", str(lengths), "--config", str(config), "--out", str(out), "-q"]) == 0
        step = EpochPlan.load(out).steps[0]
        seconds.append(step.predicted.seconds)
        assert not any("no context axis" in note for note in step.notes)
    # 93 positions; context position + 500 instead of position, 0.1 ms a token beyond the first 10
    assert seconds[1] == pytest.approx(93 * 0.010 + sum(k + 0.5 + 490 for k in range(93)) * 1e-4)
    assert seconds[0] < seconds[1]


def test_lengths_are_stretched_to_the_prediction_and_clipped_to_the_cap():
    rules = KvRules(mu=1, block_tokens=1, prompt_sharing=True, responses=2)
    prompts = [Prompt("a", to_micro(30), (20, 10), 0), Prompt("b", to_micro(80), (100, 4), 0)]
    assert expected_lengths(build_demand(prompts, 50, rules)).tolist() == [[30, 15], [50, 4]]


def test_items_without_history_get_no_prediction(tmp_path):
    config = config_from_mapping(
        {**make_config(4, 8, 2, {4: 999}).resolved(), "rate": {"table": table(tmp_path, FLAT)}}
    )
    assert plan_epoch(config, make_history({}), [f"i{k}" for k in range(8)]).steps[0].predicted is None


# ---- bad input ------------------------------------------------------------------------------------------------------


def complaint(tmp_path, capsys, rate, **changes):
    lengths, config = write_figure_3(tmp_path, rate=rate, **changes)
    out = tmp_path / "plan.json"
    assert run(["plan", "--lengths", str(lengths), "--config", str(config), "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    assert not out.exists()
    return captured.err


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([*FLAT, "4,0,x,3"], "steps.csv:8: batch_per_rank: must be a whole number"),
        ([*FLAT, "4,0,16,3"], "steps.csv:8: EP 4 batch 16 stands in line 7 too"),
        ([*FLAT, "4,0,8,-1"], "steps.csv:8: decode_ms: must be a positive number"),
        (["ep,decode_ms", "4,1"], "steps.csv:1: has the columns ep, decode_ms"),
        (FLAT[:5], "steps.csv: ep: has no step times for EP 4 (it has EP 1, 2); measure them, remove these floors"),
        ([HEAD, "2,0,3,9", "4,0,3,9"], "steps.csv: batch_per_rank: ends at batch 3 for EP 2, a rank of this"),
    ],
)
def test_a_bad_table_is_refused_with_file_line_and_field(tmp_path, capsys, lines, said):
    message = complaint(tmp_path, capsys, {"table": table(tmp_path, lines)})
    assert f"{tmp_path}/{said}" in message


def test_a_missing_table_is_refused(tmp_path, capsys):
    assert "none.csv: cannot be read" in complaint(tmp_path, capsys, {"table": str(tmp_path / "none.csv")})


def test_extrapolation_needs_num_experts_and_is_labelled(tmp_path, capsys):
    rate = {"table": table(tmp_path, FLAT[:5]), "extrapolate": True}
    assert "num_experts" in complaint(tmp_path, capsys, rate)
    notes = plan_figure_3(tmp_path, "flex", rate=rate, num_experts=16).steps[0].notes
    assert notes == ("EP 4: step times are extrapolated from EP 1, 2",)
    between = [FLAT[0], "1,0,16,900", "4,0,16,1000"]
    rate = {"table": table(tmp_path, between), "extrapolate": True}
    notes = plan_figure_3(tmp_path, "flex", rate=rate).steps[0].notes
    assert notes == ("EP 2: step times are interpolated from EP 1, 4",)
    rate = {"table": table(tmp_path, [HEAD, "2,0,3,9", "4,0,3,9"]), "extrapolate": True}
    notes = plan_figure_3(tmp_path, "flex", rate=rate).steps[0].notes
    assert notes == ("EP 2, 4: the largest batches lie above the table and are extrapolated",)


@pytest.mark.parametrize(
    ("rate", "field", "said"),
    [
        ("eps: -0.1", "eps", "greater than or equal to 0"),
        ("eps: '0.1'", "eps", "valid number"),
        ("table: 7", "table", "valid string"),
        ("table: ''", "table", "at least 1 character"),
        ("objective: speed", "objective", "'efficiency' or 'release_area'"),
        ("extrapolate: 1", "extrapolate", "valid boolean"),
        ("enabled: maybe", "enabled", "must be auto, true or false"),
        ("enabled: 1", "enabled", "must be auto, true or false"),
        ("enabled: true", "table", "is missing, but rate.enabled is true"),
        ("transitions: {shrink_s: -1}", "transitions.shrink_s", "greater than or equal to 0"),
        ("transitions: {shrink: 1}", "transitions.shrink", "known here: prepare_s, release_s, restore_s, shrink_s"),
        ("tabel: x", "tabel", "known here: enabled, eps, explain, extrapolate, objective, table, transitions"),
    ],
)
def test_bad_settings_are_refused_with_file_line_and_field(tmp_path, rate, field, said):
    path = tmp_path / "c.yaml"
    path.write_text(f"flexfloor:\n  world_size: 2\n  responses_per_prompt: 1\n  step_prompts: 2\n  rate:\n    {rate}\n")
    with pytest.raises(InputError) as caught:
        load_config(path)
    line = 5 if rate == "enabled: true" else 6
    assert str(caught.value).startswith(f"{path}:{line}: flexfloor.rate.{field}: ")
    assert said in str(caught.value)


def test_the_section_reads_back_what_it_resolves_to():
    rate = {"table": "t.csv", "enabled": True, "eps": 0.1, "transitions": {"shrink_s": 16.0}}
    config = config_from_mapping({"world_size": 2, "responses_per_prompt": 1, "step_prompts": 2, "rate": rate})
    assert config_from_mapping(config.resolved()) == config
    assert (config.rate.transition_s, config.rate.release_s, config.rate.restore_s) == (16.0, 0.0, 0.0)
