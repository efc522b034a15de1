"""A rank that is killed, in every phase: named within 60 s, nothing left running, the last finished step kept."""

import os
import signal
import threading
import time

import pytest
from driver_bed import RUN, config, local_server, plan, prompts, step

from flexfloor.driver.rollout import Watcher, run_plan
from flexfloor.driver.run_dir import RunDirectory
from flexfloor.elastic.board import Board
from flexfloor.errors import EngineLostError
from flexfloor.events import read_events
from flexfloor.ledger import load_run

LENGTHS = [4, 4, 4, 4, 20, 40, 90, 160]
QUIET = [[0], [1], [2], [3]]
SHRINKING = [[4], [5], [6], [7]]
LIMIT_S = 60.0


class Steps(Watcher):
    def __init__(self):
        self.done = []

    def finished(self, result):
        self.done.append(result.step)


def run(tmp_path, tiny_checkpoint, faults=(), strike=None):
    """Two steps, the second shrinks 4 -> 2 -> 1. Returns the error, how long ago its rank gave a last sign of life
    (seconds), the finished steps and the run.
    """
    settings = config()
    steps = Steps()
    directory = RunDirectory(tmp_path / RUN, settings)
    server = local_server(tmp_path, tiny_checkpoint, settings, faults=faults, events_dir=directory.events_dir)
    try:
        server.start()
        if strike is not None:
            threading.Thread(target=strike, args=(server,), daemon=True).start()
        two = plan(step(0, QUIET, LENGTHS, (4,)), step(1, SHRINKING, LENGTHS, (4, 2, 1)))
        with pytest.raises(EngineLostError) as caught:
            run_plan(two, settings, prompts(LENGTHS), server, directory, run_id=RUN, watcher=steps)
        last_sign = Board(server.spec.settings.board, 4).read(caught.value.rank).beat_ns
        return caught.value, (time.monotonic_ns() - last_sign) / 1e9, steps.done, directory
    finally:
        server.close()


def check_kept(directory, done):
    """The history holds the finished steps, the log can be read, and a report can be made."""
    assert directory.history.last_step == (len(done) - 1 if done else None)
    epochs = {(seen.item_id, seen.epoch) for seen in directory.history.observations()}
    assert epochs == ({(f"p{i}", 0) for i in range(4)} if done else set())
    events = read_events(directory.path).events
    assert sum(event.event == "rollout_end" for event in events) == len(done)
    if done:
        load_run(directory.path)
    directory.close()


@pytest.mark.parametrize(
    "phase",
    [
        "prepare",
        "stage",
        "switch",
        "capture",
        "trial",
        "confirm",
        "park",
        "restore_wake",
        "restore_move",
        "restore_switch",
        "restore_confirm",
    ],
)
def test_killed_in_a_transition(tmp_path, tiny_checkpoint, processes_below, phase):
    rank = 1 if phase == "park" else 2
    before = {process.pid for process in processes_below()}
    error, seconds, done, directory = run(tmp_path, tiny_checkpoint, faults=(f"{phase}:{rank}:kill",))
    assert (error.rank, error.phase) == (rank, phase)
    assert "SIGKILL" in error.why
    assert seconds < LIMIT_S
    assert done == [0]
    assert {process.pid for process in processes_below()} - before == set()
    check_kept(directory, done)


def test_killed_while_agreeing(tmp_path, tiny_checkpoint, processes_below):
    before = {process.pid for process in processes_below()}
    error, seconds, done, directory = run(tmp_path, tiny_checkpoint, faults=("agree:3:kill:3",))
    assert (error.rank, error.phase) == (3, "agree")
    assert seconds < LIMIT_S
    assert {process.pid for process in processes_below()} - before == set()
    check_kept(directory, done)


def test_killed_from_outside_while_stepping(tmp_path, tiny_checkpoint, processes_below):
    def strike(server):
        while (now := server.server.progress()).step != 1 or now.tokens < 40:
            time.sleep(0.01)
        os.kill(server.server.pids()[2], signal.SIGKILL)

    before = {process.pid for process in processes_below()}
    error, seconds, done, directory = run(tmp_path, tiny_checkpoint, strike=strike)
    assert error.rank == 2
    assert error.phase in ("step", "agree")
    assert seconds < LIMIT_S
    assert done == [0]
    assert {process.pid for process in processes_below()} - before == set()
    check_kept(directory, done)


def test_hung_in_a_transition(tmp_path, tiny_checkpoint, processes_below):
    """A rank that never comes back is a loss too: silent beyond the stall limit."""
    before = {process.pid for process in processes_below()}
    error, seconds, done, directory = run(tmp_path, tiny_checkpoint, faults=("switch:2:hang",))
    assert error.phase == "switch"
    assert "no sign of life" in error.why
    assert seconds < LIMIT_S
    assert done == [0]
    assert {process.pid for process in processes_below()} - before == set()
    check_kept(directory, done)


def test_killed_while_starting(tmp_path, tiny_checkpoint, processes_below):
    before = {process.pid for process in processes_below()}
    server = local_server(tmp_path, tiny_checkpoint, config())

    def strike():
        """Below the fork server: vLLM's coordinator first, then the engine cores by rank."""
        while len(started := [process for process in processes_below() if process.pid not in before]) < 4:
            time.sleep(0.05)
        sorted(started, key=lambda process: process.pid)[2].kill()

    threading.Thread(target=strike, daemon=True).start()
    try:
        with pytest.raises(EngineLostError) as caught:
            server.start()
    finally:
        server.close()
    assert (caught.value.rank, caught.value.phase) == (1, "start")
    assert {process.pid for process in processes_below()} - before == set()
