"""The watchdog, the guarded children and the reaper, on real processes."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from flexfloor.driver import children, reaper
from flexfloor.driver.processes import alive, end_processes, wait_gone
from flexfloor.driver.watchdog import SUPPORT, Death, Watchdog, culprit, last_fault
from flexfloor.elastic.board import Board, Status, beat
from flexfloor.elastic.states import Phase, RankState

SPAWN = multiprocessing.get_context("spawn")


def _sleep():
    time.sleep(300)


def _deaf(note):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note.write_text("deaf")
    time.sleep(300)


def _exit_when_told(path, code):
    while not path.exists():
        time.sleep(0.01)
    os._exit(code)


def line(phase, age_s=0.0):
    return Status(RankState.MEMBER, phase, 2, 0, 0, 0, beat() - int(age_s * 1e9), 0)


class Replica:
    """Two rank processes, a support process, their board, and what the watchdog reported."""

    def __init__(self, tmp_path, targets, stall_s=1e6):
        self.board = Board(tmp_path / "board", 2)
        self.events = tmp_path
        self.processes = {}
        for key, (target, args) in zip((0, 1, SUPPORT), targets, strict=True):
            self.processes[key] = SPAWN.Process(target=target, args=args)
            self.processes[key].start()
        self.lost = []
        self.told = threading.Event()
        self.dog = Watchdog(
            self.processes,
            self.board,
            stall_s=stall_s,
            events=lambda rank: tmp_path / f"rank-{rank}.jsonl",
            on_loss=self._report,
            grace_s=1.0,
        )
        self.dog.start()

    def _report(self, error):
        self.alive = [key for key, process in self.processes.items() if process.is_alive()]
        self.lost.append(error)
        self.told.set()

    def close(self):
        self.dog.stop()
        end_processes([process.pid for process in self.processes.values()], grace_s=0.5)
        for process in self.processes.values():
            process.join()


@pytest.fixture
def replica(tmp_path):
    made = []

    def make(*targets, **options):
        made.append(Replica(tmp_path, targets or ((_sleep, ()), (_sleep, ()), (_sleep, ())), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_killed_rank_is_named_with_its_phase_and_all_are_ended(replica):
    one = replica()
    one.board.write(1, line(Phase.STAGE))
    os.kill(one.processes[1].pid, signal.SIGKILL)
    assert one.told.wait(20)
    assert (one.lost[0].rank, one.lost[0].phase) == (1, "stage")
    assert "SIGKILL" in str(one.lost[0])
    assert one.alive == []


def test_a_deaf_process_is_killed_after_the_grace(replica, tmp_path):
    note = tmp_path / "note"
    one = replica((_deaf, (note,)), (_sleep, ()), (_sleep, ()))
    read(note)
    os.kill(one.processes[1].pid, signal.SIGKILL)
    assert one.told.wait(20)
    assert one.processes[0].exitcode == -signal.SIGKILL


def test_the_rank_with_a_fault_of_its_own_explains_the_others(replica, tmp_path):
    told = tmp_path / "go"
    one = replica((_exit_when_told, (told, 1)), (_exit_when_told, (told, 1)), (_sleep, ()))
    one.board.write(1, line(Phase.PARK))
    event = {"t": time.time() + 1, "event": "fault", "where": "park", "what": "no room"}
    (tmp_path / "rank-1.jsonl").write_text(json.dumps(event) + "\n")
    told.touch()
    assert one.told.wait(20)
    assert (one.lost[0].rank, one.lost[0].phase) == (1, "park")
    assert "no room" in one.lost[0].why


def test_the_coordinator_is_watched_too(replica):
    one = replica()
    os.kill(one.processes[SUPPORT].pid, signal.SIGKILL)
    assert one.told.wait(20)
    assert "serves all ranks" in one.lost[0].why
    assert one.alive == []


def test_a_silent_rank_is_a_stall(replica):
    one = replica(stall_s=1.0)
    one.board.write(0, line(Phase.IDLE, age_s=500))
    one.board.write(1, line(Phase.RESTORE_MOVE))
    assert one.told.wait(20)
    assert (one.lost[0].rank, one.lost[0].phase) == (1, "restore_move")
    assert "no sign of life" in one.lost[0].why
    assert one.alive == []


def test_a_stopped_process_is_the_cause_of_a_stall(replica):
    one = replica(stall_s=2.0)
    os.kill(one.processes[1].pid, signal.SIGSTOP)
    one.board.write(0, line(Phase.AGREE, age_s=1.0))
    one.board.write(1, line(Phase.STEP))
    assert one.told.wait(20)
    assert (one.lost[0].rank, one.lost[0].phase) == (1, "step")
    assert "stopped" in one.lost[0].why
    assert one.alive == []


def test_an_end_that_was_asked_for_is_no_loss(replica):
    one = replica()
    one.dog.stop()
    one.processes[0].kill()
    one.processes[0].join()
    time.sleep(1.5)
    assert one.lost == []


def test_what_kills_outweighs_what_follows():
    follower = Death(0, 1, Phase.STEP)
    at_fault = Death(1, 1, Phase.PARK, "park: no room")
    exited = Death(2, 3, Phase.STEP)
    killed = Death(3, -9, Phase.STAGE)
    ended = Death(4, -15, Phase.STEP)
    assert culprit([follower, ended]) is follower
    assert culprit([follower, ended, at_fault]) is at_fault
    assert culprit([follower, at_fault, exited]) is exited
    assert culprit([follower, at_fault, exited, killed]) is killed


def test_faults_of_earlier_steps_explain_nothing(tmp_path):
    path = tmp_path / "rank-0.jsonl"
    path.write_text('{"t": 5.0, "event": "fault", "where": "stage", "what": "x"}\n{"t": 6.0, "ev')
    assert last_fault(path, since=4.0) == "stage: x"
    assert last_fault(path, since=5.5) is None
    assert last_fault(tmp_path / "none", since=0.0) is None


def _children_then_sleep(note, context):
    child = context.Process(target=_sleep)
    child.start()
    note.write_text(f"{child.pid} {os.environ['FLEXFLOOR_TEST']}")
    time.sleep(300)


def _say_environment(note):
    note.write_text(os.environ.get("FLEXFLOOR_TEST", "unset"))


@pytest.fixture(params=[children.ForkServer, children.Spawn])
def context(request, monkeypatch):
    monkeypatch.setattr(children, "PRELOADED", ())
    monkeypatch.setenv("FLEXFLOOR_TEST", "first")
    return request.param()


def read(note):
    end = time.monotonic() + 30
    while not (note.exists() and note.read_text()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return note.read_text()


def test_a_guarded_child_ends_when_its_server_is_killed(context, tmp_path):
    server = SPAWN.Process(target=_children_then_sleep, args=(tmp_path / "note", context))
    server.start()
    child = psutil.Process(int(read(tmp_path / "note").split()[0]))
    time.sleep(3 * children.PERIOD_S)
    assert alive(child)
    server.kill()
    server.join()
    assert wait_gone([child], 15) == []


def test_a_guarded_child_has_the_environment_of_its_start(context, tmp_path, monkeypatch):
    for value in ("one", "two"):
        monkeypatch.setenv("FLEXFLOOR_TEST", value)
        process = context.Process(target=_say_environment, args=(tmp_path / value,))
        process.start()
        process.join()
        assert process.exitcode == 0
        assert (tmp_path / value).read_text() == value


def test_the_exit_code_is_the_same_for_all_who_ask(context):
    process = context.Process(target=_sleep)
    process.start()
    codes = []
    threads = [threading.Thread(target=lambda: codes.append(_wait_for_code(process))) for _ in range(8)]
    for thread in threads:
        thread.start()
    os.kill(process.pid, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert set(codes) == {-signal.SIGKILL}


def _wait_for_code(process):
    while (code := process.exitcode) is None:
        time.sleep(0.0005)
    return code


def test_the_reaper_ends_what_a_killed_server_leaves(tmp_path):
    """A parent with a child and a grandchild is killed; both follow, and the reaper ends itself."""
    note = tmp_path / "pids"
    grandchild = "import subprocess,sys,time;p=subprocess.Popen([sys.executable,'-c','import time;time.sleep(300)']);"
    grandchild += f"open({str(note)!r},'w').write(str(p.pid));time.sleep(300)"
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import subprocess,sys,time;subprocess.Popen([sys.executable,'-c',{grandchild!r}]);time.sleep(300)",
        ]
    )
    guard = reaper.start(parent.pid)
    try:
        end = time.monotonic() + 20
        while not (note.exists() and note.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        left = psutil.Process(parent.pid).children(recursive=True)
        assert len(left) == 2
        time.sleep(3 * reaper.PERIOD_S)
        parent.kill()
        parent.wait()
        _, alive = psutil.wait_procs(left, timeout=15)
        assert alive == []
        assert guard.wait(timeout=15) == 0
    finally:
        end_processes([parent.pid, guard.pid], grace_s=0.5)


def test_the_reaper_leaves_a_running_server_alone():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    guard = reaper.start(os.getpid())
    try:
        time.sleep(4 * reaper.PERIOD_S)
        assert child.poll() is None
        assert guard.poll() is None
    finally:
        guard.terminate()
        guard.wait()
        child.kill()
        child.wait()
