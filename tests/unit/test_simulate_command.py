"""`flexfloor simulate` from the command line: output for people and machines, bad input with one line and exit 2."""

import json
import subprocess
import sys

import pytest
import yaml
from simulate_runs import SETTINGS

from flexfloor.cli.main import run
from flexfloor.ledger import load_run

TABLE = "ep,batch_per_rank,decode_ms\n" + "".join(f"{ep},{b},{4 * ep + b}\n" for ep in (1, 2, 4) for b in (1, 16))


@pytest.fixture
def files(tmp_path):
    paths = {name: tmp_path / name for name in ("flexfloor.yaml", "lengths.jsonl", "table.csv", "pmf.csv")}
    paths["flexfloor.yaml"].write_text(yaml.safe_dump({"flexfloor": SETTINGS}), encoding="utf-8")
    lines = [
        {"item_id": f"i{i}", "epoch": epoch, "prompt_tokens": 6, "lengths": [10 + i, 5 + 3 * i]}
        for epoch in (0, 1)
        for i in range(16)
    ]
    paths["lengths.jsonl"].write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    paths["table.csv"].write_text(TABLE, encoding="utf-8")
    paths["pmf.csv"].write_text("output_tokens,probability\n9,0.5\n40,0.5\n", encoding="utf-8")
    return paths


def simulate(files, *more, lengths=True):
    given = ["--config", files["flexfloor.yaml"], "--table", files["table.csv"]]
    given += ["--lengths", files["lengths.jsonl"]] if lengths else []
    return run(["simulate", *map(str, [*given, *more])])


def test_a_run_is_written_reported_and_printed(files, tmp_path, capsys):
    assert simulate(files, "--out", tmp_path / "out", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["problems"] == []
    assert any("no context axis" in line for line in printed["assumptions"])
    assert run(["report", str(tmp_path / "out"), "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["problems"] == []
    assert reported["response_tokens"] == printed["response_tokens"]
    assert load_run(tmp_path / "out").problems == ()


def test_a_plan_of_the_plan_command_is_simulated(files, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    common = ["--config", str(files["flexfloor.yaml"]), "--lengths", str(files["lengths.jsonl"])]
    assert run(["plan", *common, "--out", str(plan), "-q"]) == 0
    assert simulate(files, "--plan", plan, "--json") == 0
    assert json.loads(capsys.readouterr().out)["per_seed"][0]["epochs"] == [2]


def test_compare_and_sweep_print_and_draw(files, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert simulate(files, "--compare", "--sweep", "mu=1,1.3", "--html", page, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [arm["method"] for arm in found["arms"]] == ["verl", "lengthsort", "ls_tg", "fixed", "minskew", "flex"]
    assert [point["value"] for point in found["sweeps"][0]["points"]] == [1.0, 1.3]
    text = page.read_text(encoding="utf-8")
    assert "Assumed, not measured here" in text
    assert 'src="http' not in text
    assert simulate(files, "--compare") == 0
    assert "gains against verl" in capsys.readouterr().out


def test_drawn_lengths_and_several_seeds(files, capsys):
    pmf = files["pmf.csv"]
    more = ["--pmf", f"{pmf}=1", "--pmf", f"{pmf}=2", "--items", 16, "--seed", 0, "--seed", 1, "--json"]
    assert simulate(files, *more, lengths=False) == 0
    assert [seed["seed"] for seed in json.loads(capsys.readouterr().out)["per_seed"]] == [0, 1]


def test_ep_sizes_outside_of_the_table_are_refused_or_labelled(files, capsys):
    files["table.csv"].write_text(TABLE.split("4,1,")[0], encoding="utf-8")
    assert simulate(files) == 2
    assert "has no step times for EP 4 (it has EP 1, 2); measure them or allow extrapolation" in capsys.readouterr().err
    assert simulate(files, "--extrapolate") == 0
    assert "EP 4: step times are EXTRAPOLATED from EP 1, 2, not measured" in capsys.readouterr().out


def test_the_command_imports_nothing_heavy():
    code = (
        "import sys; from flexfloor.cli.main import run; code = run(['simulate', '--help']); "
        "found = [m for m in sys.modules if m.split('.')[0] in ('torch', 'ray', 'vllm', 'verl', 'transformers')]; "
        "sys.exit(code or ', '.join(found) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def write(name, text):
    def spoil(files):
        files[name].write_text(text, encoding="utf-8")

    return spoil


@pytest.mark.parametrize(
    ("spoil", "more", "told"),
    [
        (write("lengths.jsonl", '{"item_id": "a"}\n'), [], "lengths.jsonl:1: epoch: is missing"),
        (write("lengths.jsonl", ""), [], "lengths.jsonl: is empty"),
        (write("table.csv", "ep,batch_per_rank,decode_ms\n1,1,x\n"), [], "table.csv:2: decode_ms: must be a positive"),
        (write("flexfloor.yaml", "flexfloor:\n  world_size: 0\n"), [], "flexfloor.yaml:2: flexfloor.world_size"),
        (None, ["--noise", "0.2"], "--noise: noise is for a file of one epoch"),
        (None, ["--seed", "1", "--seed", "2"], "--seed: several seeds change nothing"),
        (None, ["--sweep", "speed"], "--sweep: 'speed' is none of floors, mu, n, ranks"),
        (None, ["--pmf", "x.csv"], "--lengths/--pmf: give one of them"),
        (None, ["--html", "x.html"], "--html: goes with --compare or --sweep"),
        (None, ["--compare", "--out", "x"], "go with a single run"),
        (None, ["--plan", "none.json"], "none.json: cannot be read"),
        (None, ["--costs", "none.yaml"], "none.yaml: cannot be read"),
        (None, ["--items", "0"], "--items"),
        (None, ["--scale", "0"], "--scale: must be positive"),
        (None, ["--calibrate", "nowhere"], "nowhere: no such run folder"),
    ],
)
def test_bad_input_ends_with_one_line(files, capsys, spoil, more, told):
    if spoil:
        spoil(files)
    assert simulate(files, *more) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.err.count("\n") == 1, captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("pmf", "told"),
    [("none.csv", "none.csv: cannot be read"), ("x.csv=-1", "x.csv: --pmf: weight must be a positive number")],
)
def test_a_bad_distribution_ends_with_one_line(files, capsys, pmf, told):
    assert simulate(files, "--pmf", pmf, lengths=False) == 2
    assert told in capsys.readouterr().err


def test_a_missing_configuration_ends_with_one_line(capsys):
    assert run(["simulate", "--lengths", "x"]) == 2
    assert "--config: is missing" in capsys.readouterr().err
