"""`flexfloor plan` with bad input: exit 2 and one line that says file, line and field (planner.md section 7)."""

import json

import pytest
from test_planner_worked_cases import write_figure_3

import flexfloor
from flexfloor.cli.main import run
from flexfloor.plan import EpochPlan


@pytest.fixture
def files(tmp_path):
    lengths, config = write_figure_3(tmp_path)
    return {"lengths": lengths, "config": config, "out": tmp_path / "plan.json", "items": tmp_path / "items.txt"}


def plan(files, *more):
    return run(
        [
            "plan",
            "--lengths",
            *map(str, (files["lengths"], "--config", files["config"])),
            "--out",
            str(files["out"]),
            *more,
        ]
    )


def complaint(files, capsys, *more):
    assert plan(files, *more) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1, captured.err
    assert "Traceback" not in captured.err
    assert not files["out"].exists()
    return captured.err


LINE = {"item_id": "a", "epoch": 0, "prompt_tokens": 3, "lengths": [5, 6]}


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("{not json", "is no JSON"),
        ("[1, 2]", "must be a JSON object"),
        (json.dumps({**LINE, "lengths": "5"}), "lengths"),
        (json.dumps({**LINE, "lengths": []}), "lengths"),
        (json.dumps({**LINE, "lengths": [5, 0]}), "lengths.1"),
        (json.dumps({**LINE, "lengths": [5, 1.5]}), "lengths.1"),
        (json.dumps({**LINE, "lengths": [5, True]}), "lengths.1"),
        (json.dumps({**LINE, "prompt_tokens": "3"}), "prompt_tokens"),
        (json.dumps({**LINE, "prompt_tokens": -1}), "prompt_tokens"),
        (json.dumps({**LINE, "epoch": -1}), "epoch"),
        (json.dumps({**LINE, "item_id": 7}), "item_id"),
        (json.dumps({**LINE, "item_id": ""}), "item_id"),
        (json.dumps({**LINE, "censored": [2]}), "censored"),
        (json.dumps({**LINE, "lenghts": [5]}), "lenghts: unknown field"),
        (json.dumps({k: v for k, v in LINE.items() if k != "epoch"}), "epoch: is missing"),
        (json.dumps({**LINE, "item_id": "p3"}), "item_id: item 'p3' in epoch 0 already stands in line 4"),
        ('{"item_id": "a", "item_id": "b", "epoch": 0, "prompt_tokens": 3, "lengths": [5]}', "stands twice"),
    ],
)
def test_malformed_lengths_line(files, capsys, line, field):
    with files["lengths"].open("a") as file:
        file.write(line + "\n")
    message = complaint(files, capsys)
    assert f"{files['lengths']}:9: " in message
    assert field in message


def test_missing_and_empty_files(files, capsys):
    assert "cannot be read" in complaint({**files, "lengths": files["lengths"].with_name("none")}, capsys)
    assert "cannot be read" in complaint({**files, "config": files["config"].with_name("none")}, capsys)
    assert "cannot be read" in complaint(files, capsys, "--items", "none")
    files["items"].write_text("\n\n")
    assert "is empty" in complaint(files, capsys, "--items", str(files["items"]))
    files["lengths"].write_text("")
    assert "is empty" in complaint(files, capsys)
    files["config"].write_text("")
    assert "must be a mapping" in complaint(files, capsys)
    files["config"].write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in complaint(files, capsys)


@pytest.mark.parametrize(
    ("old", "new", "line", "field"),
    [
        ("world_size: 4", "world_size: four", 2, "world_size"),
        ("world_size: 4", "world_size: 4\n  world_sise: 4", 3, "world_sise: unknown key"),
        ("  world_size: 4\n", "", 2, "world_size: is missing"),
        ("[2, 4]", "[2, 8]", 5, "floors.natural: floor 8 is above world_size 4"),
        ("[2, 4]", "[2, 0]", 5, "floors.natural.1"),
        ("mu: 1", "mu: 0.9", 6, "mu"),
        ("mu: 1", "mu: 1\n  method: fixed", 2, "fixed_floor: method 'fixed' needs it"),
        ("mu: 1", "mu: 1\n  mu: 2", 7, "mu: stands twice"),
        ("mu: 1", "num_experts: 6", 5, "floors.natural: floor 4 does not divide num_experts 6"),
        ("{2: 144}", "{two: 144}", 9, "floor 'two' must be a positive integer"),
        ("{2: 144}", '{2: 144, "2": 144}', 9, "stands twice"),
        ("{2: 144}", "{2: -1}", 9, "kv.capacity.natural.2"),
        ("{2: 144}", "[", 10, "is no YAML"),
    ],
)
def test_bad_config(files, capsys, old, new, line, field):
    text = (
        "flexfloor:\n  world_size: 4\n  responses_per_prompt: 2\n  step_prompts: 8\n  floors: {natural: [2, 4]}\n"
        "  mu: 1\n  kv:\n    capacity:\n      natural: {2: 144}\n"
    )
    assert old in text
    files["config"].write_text(text.replace(old, new))
    message = complaint(files, capsys)
    assert f"{files['config']}:{line}: " in message
    assert field in message


def test_command_line_mistakes_are_one_line(files, capsys):
    assert run(["plan"]) == 2
    assert "--lengths" in capsys.readouterr().err
    assert run(["plan", "--nonsense"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert run(["nonsense"]) == 2
    assert "no command 'nonsense'" in capsys.readouterr().err
    assert plan({**files, "out": files["out"].parent / "none" / "plan.json"}) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_version_and_help(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"flexfloor {flexfloor.__version__}\n"
    assert run([]) == run(["--help"]) == 0
    assert "plan" in capsys.readouterr().out
    assert run(["plan", "--help"]) == 0


def test_items_file_with_repeats_and_unseen_items(files, capsys):
    files["items"].write_text("p0\np1\np1\nnew\n")
    assert plan(files, "--items", str(files["items"])) == 0
    assert "1 items have no history" in capsys.readouterr().err
    step = EpochPlan.load(files["out"]).steps[0]
    assert step.items == ("p0", "p1", "p1", "new"), "items never seen sort last"
    assert step.ladder == (4,), "a step that holds an item without history is planned without shrinking"
    assert step.excluded_floors["2"].startswith("the step holds items without history")


def test_verls_whole_configuration_is_read(files):
    section = json.loads(files["config"].read_text())
    files["config"].write_text(json.dumps({"trainer": {"nnodes": 1}, "data": {"path": "${oc.env:X}"}, **section}))
    assert plan(files, "-q") == 0


def test_nothing_but_the_table_on_standard_output(files, capfd):
    assert plan(files, "--quiet") == 0
    assert capfd.readouterr() == ("", "")
    assert plan(files) == 0
    assert "release" in capfd.readouterr().out
