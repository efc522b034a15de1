"""States of a rank, faults on demand, and the status board."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from itertools import product
from pathlib import Path

import pytest

from flexfloor.elastic.board import Board, Status, beat
from flexfloor.elastic.faults import Fault, FaultPlan, InjectedFaultError
from flexfloor.elastic.states import Phase, RankState, moved
from flexfloor.errors import InputError, ProtocolError

S = RankState
MOVES = {
    (S.FULL, S.MEMBER),
    (S.MEMBER, S.DETACHING),
    (S.MEMBER, S.RESTORING),
    (S.DETACHING, S.PARKED),
    (S.DETACHING, S.RESTORING),
    (S.PARKED, S.LEASED),
    (S.PARKED, S.RESTORING),
    (S.LEASED, S.PARKED),
    (S.RESTORING, S.FULL),
    (S.RESTORING, S.MEMBER),
    (S.RESTORING, S.PARKED),
}


@pytest.mark.parametrize(("old", "new"), list(product(S, S)))
def test_legal_and_illegal_moves(old: RankState, new: RankState) -> None:
    if (old, new) in MOVES:
        assert moved(old, new) is new
    else:
        with pytest.raises(ProtocolError, match=f"{old.name} to {new.name}"):
            moved(old, new)


def test_phases_have_names_for_people() -> None:
    assert Phase.RESTORE_MOVE.label == "restore_move"
    assert len({phase.label for phase in Phase}) == len(Phase)


@pytest.mark.parametrize("text", ["", "stage", "stage:1", "stage:x:raise", "nowhere:1:raise", "stage:1:raise:x"])
def test_a_malformed_fault_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InputError, match="write phase:rank:kind") as refused:
        Fault.parse(text)
    assert "\n" not in str(refused.value)


def test_an_unknown_kind_of_fault_names_the_known_ones() -> None:
    with pytest.raises(InputError, match="'explode': use one of raise, kill, exit, hang"):
        Fault.parse("stage:1:explode")


def test_faults_strike_their_rank_the_nth_time() -> None:
    plan = FaultPlan.of(["stage:1:raise:2", "trial:0:raise"], rank=1)
    for _ in range(3):
        plan.enter(Phase.TRIAL)
    plan.enter(Phase.STAGE)
    with pytest.raises(InjectedFaultError, match="injected in stage"):
        plan.enter(Phase.STAGE)
    plan.enter(Phase.STAGE)


@pytest.mark.parametrize(("kind", "code"), [("kill", -9), ("exit", 3)])
def test_kill_and_exit_end_the_own_process(kind: str, code: int) -> None:
    script = (
        "from flexfloor.elastic.faults import FaultPlan; from flexfloor.elastic.states import Phase;"
        f"FaultPlan.of(['park:2:{kind}'], 2).enter(Phase.PARK); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (code, "")


# -- board ---------------------------------------------------------------------------------------


def line(step: int, pid: int = 7) -> Status:
    return Status(S.PARKED, Phase.PARK, step % 17, step, step, step, step, pid)


def test_a_rank_that_never_wrote_reads_full_in_start(tmp_path: Path) -> None:
    board = Board(tmp_path / "new" / "board", 3)
    assert board.read_all() == [Status(S.FULL, Phase.START, 0, 0, 0, 0, 0, 0)] * 3
    assert board.parked() == set()


def test_lines_are_apart_and_seen_by_all_who_map_the_file(tmp_path: Path) -> None:
    mine, theirs = Board(tmp_path / "board", 3), Board(tmp_path / "board", 3)
    mine.write(1, Status(S.DETACHING, Phase.TRIAL, 2, 5, -1, -1, beat(), os.getpid()))
    theirs.write(2, Status(S.LEASED, Phase.IDLE, 2, 5, 1, 0, 1, 2))
    assert theirs.read(1).phase is Phase.TRIAL
    assert theirs.read(1).epoch == -1
    assert mine.parked() == theirs.parked() == {1, 2}
    assert mine.read(0).pid == 0
    mine.close()
    (tmp_path / "board").unlink()
    assert theirs.read(1).pid == os.getpid(), "who mapped the file keeps it"


def test_a_half_written_file_is_made_whole_and_nothing_in_it_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "board"
    Board(path, 2).write(0, line(3))
    path.write_bytes(path.read_bytes()[:64] + b"\0" * 13)
    board = Board(path, 4)
    assert board.read(0) == line(3)
    assert board.read(3).state is S.FULL
    assert path.stat().st_size == 4 * 64


def test_opening_again_never_empties_the_file(tmp_path: Path) -> None:
    path = tmp_path / "board"
    first = Board(path, 2)
    first.write(1, line(4))
    larger = Board(path, 8)
    assert larger.read(1) == first.read(1) == line(4)
    assert Board(path, 2).read(1) == line(4)
    assert path.stat().st_size == 8 * 64


WRITER = """
import sys
from flexfloor.elastic.board import Board, Status
from flexfloor.elastic.states import Phase, RankState
board, rank = Board(sys.argv[1], 3), int(sys.argv[2])
for step in range(1, 1 << 62):
    value = (step % 200 + 1) * 0x0101010101010101 >> 1
    board.write(rank, Status(RankState.PARKED, Phase.PARK, value, value, value, value, value, value))
    if step % 64 == 0 and not sys.stdin.readable():
        break
"""


def test_several_processes_write_and_no_reader_sees_an_empty_or_torn_number(tmp_path: Path) -> None:
    path = tmp_path / "board"
    board = Board(path, 3)
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(rank)], stdin=subprocess.PIPE) for rank in (0, 2)
    ]
    try:
        allowed = {(step % 200 + 1) * 0x0101010101010101 >> 1 for step in range(200)}
        waited = threading.Event()
        for _ in range(3000):
            if all(board.read(rank).pid for rank in (0, 2)):
                break
            waited.wait(0.01)
        seen = set()
        for _ in range(30000):
            for status in (board.read(0), board.read(2)):
                assert status.state is S.PARKED
                assert status.phase is Phase.PARK
                assert set(status[2:]) <= allowed
                seen.add(status.serial)
        assert len(seen) > 5, "the writers did write meanwhile"
        assert board.read(1).pid == 0
        assert board.parked() == {0, 2}
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
            assert writer.stdin is not None
            writer.stdin.close()


def test_processes_that_start_together_share_one_file(tmp_path: Path) -> None:
    path = tmp_path / "board"
    script = "import sys; from flexfloor.elastic.board import *; b = Board(sys.argv[1], 6); r = int(sys.argv[2]); "
    script += "b.write(r, Status(RankState.PARKED, Phase.PARK, 1, 1, 1, 1, 1, r + 1))"
    writers = [subprocess.Popen([sys.executable, "-c", script, str(path), str(rank)]) for rank in range(6)]
    assert [writer.wait(timeout=60) for writer in writers] == [0] * 6
    assert [status.pid for status in Board(path, 6).read_all()] == [1, 2, 3, 4, 5, 6]
