"""`flexfloor rollout` as a command, with Ray: what it writes, and that nothing outlives it, however it ends."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml
from driver_bed import plan, settings, step

from flexfloor.elastic.board import Board
from flexfloor.history import HistoryStore

LENGTHS = [4, 4, 4, 4, 40, 80, 160, 380]
START_S = 300.0
LIMIT_S = 60.0


class Command:
    """A running `flexfloor rollout` of two steps."""

    def __init__(self, folder, model):
        (folder / "flexfloor.yaml").write_text(yaml.safe_dump({"flexfloor": settings()}))
        lines = [
            {"item_id": f"p{i}", "prompt_token_ids": list(range(3 + i, 11 + 2 * i)), "max_tokens": n}
            for i, n in enumerate(LENGTHS)
        ]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        two = plan(step(0, [[0], [1], [2], [3]], LENGTHS, (4,)), step(1, [[4], [5], [6], [7]], LENGTHS, (4, 2, 1)))
        two.save(folder / "plan.json")
        self.out = folder / "run"
        options = {"plan": "plan.json", "prompts": "prompts.jsonl", "config": "flexfloor.yaml", "out": "run"}
        arguments = [part for name, value in options.items() for part in (f"--{name}", str(folder / value))]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flexfloor.cli.main", "rollout", "--model", str(model), "--json", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.seen = set()

    def wait_for_step_one(self):
        """Until the second step generates; remembers every process below the command."""
        end = time.monotonic() + START_S
        log = self.out / "events" / "driver.jsonl"
        while self.process.poll() is None and time.monotonic() < end:
            self.remember()
            if log.exists() and sum('"rollout_start"' in line for line in log.read_text().splitlines()) == 2:
                time.sleep(1.0)
                self.remember()
                return
            time.sleep(0.2)
        raise AssertionError(self.process.communicate(timeout=60))

    def remember(self):
        self.seen.update(psutil.Process(self.process.pid).children(recursive=True))

    def finish(self):
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out, err

    def left(self, within_s=30.0):
        """Processes seen below the command that still run."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            left = [process for process in self.seen if _runs(process)]
            if not left:
                return []
            time.sleep(0.1)
        return left

    def engine(self, rank):
        return psutil.Process(Board(self.out / "board", 4).read(rank).pid)

    def server(self):
        return next(p for p in self.engine(0).parents() if "ServerActor" in p.name() + " ".join(p.cmdline()))


def _runs(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def command(tmp_path, tiny_checkpoint):
    one = Command(tmp_path, tiny_checkpoint)
    yield one
    if one.process.poll() is None:
        one.process.kill()
        one.process.communicate()
    for process in one.seen:
        if _runs(process):
            process.kill()


def finished_steps(out):
    with HistoryStore(out / "history.sqlite") as history:
        return history.last_step, {seen.item_id for seen in history.observations()}


def test_a_run_from_plan_to_report(command):
    command.wait_for_step_one()
    code, out, err = command.process.communicate(timeout=START_S), None, None
    (out, err), code = code, command.process.returncode
    assert code == 0, err
    result = json.loads(out)
    assert [one["responses"] for one in result["steps"]] == [4, 4]
    assert [one["tokens"] for one in result["steps"]] == [16, sum(LENGTHS[4:])]
    assert result["report"]["problems"] == []
    assert [one["to"] for one in result["report"]["transitions"]] == [2, 1]
    names = {path.name for path in command.out.iterdir()}
    assert names >= {
        "config.yaml",
        "plan.json",
        "events",
        "responses.jsonl",
        "history.sqlite",
        "lengths.jsonl",
        "report.json",
    }
    assert {path.name for path in (command.out / "events").iterdir()} == {
        "driver.jsonl",
        *(f"rank-{r}.jsonl" for r in range(4)),
    }
    assert finished_steps(command.out) == (1, {f"p{i}" for i in range(8)})
    assert command.left() == []


def test_an_engine_killed_from_outside(command):
    command.wait_for_step_one()
    began = time.monotonic()
    command.engine(2).kill()
    code, _, err = command.finish()
    assert time.monotonic() - began < LIMIT_S
    assert code == 1
    last = err.strip().splitlines()[-1]
    assert last.startswith("flexfloor: rank 2 lost in phase '")
    assert "SIGKILL" in last
    assert "Traceback" not in err
    assert command.left() == []
    assert finished_steps(command.out) == (0, {f"p{i}" for i in range(4)})


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(command, sign):
    """Ctrl-C reaches the whole process group, SIGTERM the command alone."""
    command.wait_for_step_one()
    if sign == signal.SIGINT:
        os.killpg(command.process.pid, sign)
    else:
        command.process.send_signal(sign)
    code, _, err = command.finish()
    assert code == 130
    assert err.strip().splitlines()[-1] == "flexfloor: stopped"
    assert "Traceback" not in err
    assert command.left() == []
    assert finished_steps(command.out) == (0, {f"p{i}" for i in range(4)})


def test_the_command_itself_is_killed(command):
    command.wait_for_step_one()
    command.process.kill()
    command.process.communicate()
    assert command.left(LIMIT_S) == []
    assert finished_steps(command.out) == (0, {f"p{i}" for i in range(4)})


def test_the_server_process_is_killed(command):
    command.wait_for_step_one()
    command.server().kill()
    code, _, err = command.finish()
    assert code == 1
    assert "server is gone" in err.strip().splitlines()[-1]
    assert command.left() == []
