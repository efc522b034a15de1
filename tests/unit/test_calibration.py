"""Calibration points, windows and tables, on made-up engines whose step time is known."""

import random

import pytest

from flexfloor.cli.main import run
from flexfloor.config import config_from_mapping
from flexfloor.driver.calibration import Findings, Grid, Point, Room, order_of, points, rounds, step_seconds
from flexfloor.driver.orders import Request, Response

ROOM = Room(kv_tokens=2048, block_tokens=32, sequences=16, length=512, chunk=64, vocabulary=50)
GRID = Grid(batches=(1, 4), contexts=(16,), tokens=20, rounds=2)


def config(**changes):
    section = {"world_size": 4, "responses_per_prompt": 1, "step_prompts": 4, "floors": {"natural": [1, 2]}, **changes}
    return config_from_mapping(section)


def answer(rank, times, tokens=None):
    request = Request("x", 0, rank, (1, 2), tokens or len(times), 0, False)
    return Response(request, rank, tuple(range(len(times))), None, "length", 0, 2, tuple(times))


def test_every_size_batch_and_context_is_a_point_and_idle_worlds_need_a_second_rank():
    wanted = points(config(), Grid((1, 2), (8, 16), tokens=20), ROOM, notes := [])
    decode = {(p.ep, p.batch, p.prompt) for p in wanted if p.kind == "decode"}
    assert decode == {(ep, batch, prompt) for ep in (4, 2, 1) for batch in (1, 2) for prompt in (8, 16)}
    assert {p.ep for p in wanted if p.kind == "idle"} == {4, 2}
    assert notes == []


@pytest.mark.parametrize(
    ("batch", "prompt", "why"),
    [
        (17, 16, "max_num_seqs is 16"),
        (1, 500, "longest sequence of 512"),
        (16, 128, "KV tokens are needed, a rank has 2048"),
    ],
)
def test_what_would_be_preempted_or_refused_is_left_out_with_the_reason(batch, prompt, why):
    wanted = points(config(), Grid((batch,), (prompt,), tokens=20), ROOM, notes := [])
    assert [p for p in wanted if p.kind != "prefill"] == []
    assert why in notes[0]


def test_rounds_visit_every_point_once_each_in_another_order_and_repeatably():
    wanted = points(config(), GRID, ROOM, [])
    endless = rounds(wanted, GRID)
    first, second = next(endless), next(endless)
    assert sorted(first) == sorted(second) == sorted(wanted)
    assert first != second
    assert first == next(rounds(wanted, GRID))


def test_survivors_are_the_last_to_leave_and_leavers_get_one_token():
    order = order_of(Point(2, 4, 16), 3, config(rank_order=[2, 0, 3, 1]), GRID, ROOM, "events")
    assert order.ladder == (4, 2)
    assert order.expected == [1, 4, 1, 4]
    assert {request.max_tokens for request in order.requests if request.rank in (2, 0)} == {1}
    assert {len(request.content) for request in order.requests if request.rank in (3, 1)} == {16}
    assert order.timed


def test_an_idle_world_has_one_busy_rank():
    order = order_of(Point(2, 4, 16, "idle"), 0, config(), GRID, ROOM, "events")
    assert (order.ladder, order.expected) == ((4, 2), [1, 1, 1, 4])


def test_the_window_opens_after_the_shrink_when_all_decode_and_closes_with_the_first_end():
    fast = [0.1 * i for i in range(1, 11)] + [1.0 + 0.5 * i for i in range(1, 21)]  # the shrink is over at 1.0
    late = [2.0 + 0.5 * i for i in range(1, 40)]
    assert step_seconds([answer(2, fast), answer(3, late)], since=1.0) == pytest.approx(0.5)


def test_a_window_with_too_few_steps_says_nothing():
    early, late = [0.1 * i for i in range(1, 31)], [2.9 + 0.1 * i for i in range(30)]
    assert step_seconds([answer(2, early), answer(3, late)], since=0.0) is None


def known(load, overhead=0.02, each=0.005):
    """Findings of engines whose step takes ``overhead + each * batch``, by largest or mean batch."""
    findings = Findings()
    noise = random.Random(1)
    for ep in (4, 2, 1):
        for batch in (1, 2, 4, 8):
            for kind in ("decode", "idle"):
                if kind == "idle" and ep == 1:
                    continue
                charged = batch / ep if kind == "idle" and load == "mean" else batch
                seconds = (overhead * ep + each * charged) * noise.uniform(0.99, 1.01)
                findings.seconds[Point(ep, batch, 16, kind)] = [seconds, seconds * 1.5, seconds * 0.9]
    return findings


@pytest.mark.parametrize("load", ["largest", "mean"])
def test_the_load_that_explains_idle_worlds_is_found(load):
    assert known(load).load() == load


def test_the_table_holds_medians_and_idle_rows_only_where_the_largest_batch_counts():
    table = known("largest").table("largest", GRID, ROOM, "t")
    assert table.sizes == (1, 2, 4)
    assert table.curve(2).seconds(4) == pytest.approx(0.06, rel=0.02)
    assert any(row.idle for row in table.rows)
    assert not any(row.idle for row in known("mean").table("mean", GRID, ROOM, "t").rows)


def test_several_contexts_become_an_axis():
    findings = Findings()
    for prompt in (16, 128):
        findings.seconds[Point(4, 1, prompt)] = [0.01 + prompt * 1e-4]
    table = findings.table("largest", Grid((1,), (16, 128), tokens=20), ROOM, "t")
    assert table.has_context
    assert table.curve(4).seconds(1, context=1000.0) > table.curve(4).seconds(1, context=30.0)


def test_prefill_is_what_a_long_prompt_adds_and_start_what_remains():
    findings = known("largest")
    findings.first_token[Point(4, 1, 2, "prefill")] = [0.25, 0.24, 0.9]
    findings.first_token[Point(4, 1, 102, "prefill")] = [0.75, 0.7, 0.9]
    table = findings.table("largest", GRID, ROOM, "t")
    rate, start = findings.prefill(table, 4)
    assert rate == pytest.approx(200.0)
    assert start == pytest.approx(0.25 - table.curve(4).seconds(1))


def test_bad_input_is_one_line_and_exit_two(tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16}')
    section = tmp_path / "c.yaml"
    section.write_text("flexfloor: {world_size: 4, responses_per_prompt: 1, step_prompts: 4, floors: {natural: [2]}}\n")
    common = ["calibrate", "--model", str(model), "--config", str(section), "--out", str(tmp_path / "out")]
    for more, told in (
        (["--batches", "1,x"], "batches: must be whole numbers above 0"),
        (["--batches", "0"], "batches: must be whole numbers above 0"),
        (["--contexts", ""], "contexts: names no prompt length"),
        (["--slots", "2"], "4 ranks need 4 slots"),
        (["--tokens", "1"], "--tokens"),
    ):
        assert run([*common, *more]) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1
        assert told in lines[0]
    assert not (tmp_path / "out").exists()


def test_a_folder_in_use_is_refused(tmp_path, capsys):
    (tmp_path / "out" / "events").mkdir(parents=True)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16}')
    section = tmp_path / "c.yaml"
    section.write_text("flexfloor: {world_size: 4, responses_per_prompt: 1, step_prompts: 4, floors: {natural: [2]}}\n")
    options = ["--model", str(model), "--config", str(section), "--out", str(tmp_path / "out")]
    assert run(["calibrate", *options]) == 2
    assert "holds a calibration or a run already" in capsys.readouterr().err
