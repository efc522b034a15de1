"""`flexfloor rollout` refuses bad input with one line and exit code 2; signals wait for what must not be cut short."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from test_driver_checks import checkpoint, plan

from flexfloor.cli.main import run
from flexfloor.cli.rollout import default_config
from flexfloor.driver.cluster import Terminated, orderly_end, undisturbed

SETTINGS = {"world_size": 4, "responses_per_prompt": 2, "step_prompts": 2, "floors": {"natural": [1, 2]}}


@pytest.fixture
def files(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    checkpoint(model)
    plan().save(tmp_path / "plan.json")
    (tmp_path / "prompts.jsonl").write_text('{"item_id": "a", "prompt": "x"}\n{"item_id": "b", "prompt": "y"}\n')
    (tmp_path / "flexfloor.yaml").write_text(yaml.safe_dump({"flexfloor": SETTINGS}))
    return tmp_path


def rollout(files, capsys, *more, **changes):
    options = {
        "model": "model",
        "plan": "plan.json",
        "prompts": "prompts.jsonl",
        "config": "flexfloor.yaml",
        "out": "run",
    }
    options = {name: value for name, value in {**options, **changes}.items() if value is not None}
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(files / value))]
    code = run(["rollout", *arguments, *more])
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return code, error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan": None}, "give --plan, or --bootstrap"),
        ({"plan": "none.json"}, "none.json: cannot be read"),
        ({"prompts": "none.jsonl"}, "none.jsonl: cannot be read"),
        ({"config": "none.yaml"}, "none.yaml: cannot be read"),
        ({"model": "none"}, "is no folder"),
    ],
)
def test_missing_files(files, capsys, changes, message):
    code, error = rollout(files, capsys, **changes)
    assert code == 2
    assert message in error


def test_bad_lines_are_named(files, capsys):
    (files / "prompts.jsonl").write_text('{"item_id": "a", "prompt": "x"}\n{"item_id": "b", "promt": "y"}\n')
    code, error = rollout(files, capsys)
    assert code == 2
    assert "prompts.jsonl:2: " in error


def test_bootstrap_and_a_plan_contradict_each_other(files, capsys):
    assert rollout(files, capsys, "--bootstrap")[0] == 2
    code, error = rollout(files, capsys, "--bootstrap", plan=None, config=None)
    assert code == 2
    assert "config: --bootstrap needs it" in error


def test_a_dense_model_is_refused_and_nothing_is_written(files, capsys):
    checkpoint(files / "model", num_local_experts=None)
    code, error = rollout(files, capsys)
    assert code == 2
    assert "dense model" in error
    assert not (files / "run").exists()


def test_fewer_slots_than_ranks(files, capsys):
    code, error = rollout(files, capsys, "--slots", "2")
    assert code == 2
    assert "4 ranks need 4 slots, 2 are at hand" in error


def test_a_floor_without_rows(files, capsys):
    (files / "flexfloor.yaml").write_text(yaml.safe_dump({"flexfloor": {**SETTINGS, "floors": {}}}))
    code, error = rollout(files, capsys)
    assert code == 2
    assert "the plan asks for floor 2" in error


def test_a_plan_says_enough_to_run_without_a_configuration():
    made = default_config(plan())
    assert (made.world_size, made.admissible_sizes, made.responses_per_prompt) == (4, (4, 2), 1)
    json.dumps(made.resolved())


def test_sigterm_takes_the_way_of_ctrl_c():
    def work():
        with orderly_end():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    with pytest.raises(Terminated):
        work()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_signals_wait_for_what_must_not_be_cut_short(sign):
    done = []

    def work():
        with undisturbed():
            os.kill(os.getpid(), sign)
            time.sleep(0.05)
            done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["whole"]


def test_output_that_cannot_be_written_is_one_line():
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "flexfloor.cli.main", "doctor", "--json"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("flexfloor: the output: No space left on device")


def test_a_reader_that_has_gone_is_no_error_to_speak_of():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "flexfloor.cli.main", "doctor", "--json"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, "")
