"""Events: what is written is what is read, and a broken log is named by file, line and field."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from flexfloor.errors import InputError
from flexfloor.events import EVENT_NAMES, EventWriter, read_events

GOOD = '{"t": 1.0, "res": 0, "run": "r", "seed": 0, "epoch": 0, "step": 0, "rank": 0, "event": "detach_end"}'

# (line, field that the message must name)
MALFORMED = [
    ("not json", None),
    ("[1, 2]", None),
    ('{"t": 1, "event": "detatch_end"}', "event"),
    ('{"t": 1}', "event"),
    ('{"event": "detach_end"}', "t"),
    ('{"t": "1", "event": "detach_end"}', "t"),
    ('{"t": true, "event": "detach_end"}', "t"),
    ('{"t": 1e999, "event": "detach_end"}', "t"),
    ('{"t": NaN, "event": "detach_end"}', None),
    ('{"t": 1, "res": -1, "event": "detach_end"}', "res"),
    ('{"t": 1, "rank": -1, "event": "detach_end"}', "rank"),
    ('{"t": 1, "rank": 1.5, "event": "detach_end"}', "rank"),
    ('{"t": 1, "run": 3, "event": "detach_end"}', "run"),
    ('{"t": 1, "event": "rollout_end", "world_size": 4}', "response_tokens"),
    ('{"t": 1, "event": "rollout_end", "world_size": 4, "response_tokens": -3}', "response_tokens"),
    ('{"t": 1, "event": "restore_end", "duration": -0.1}', "duration"),
    ('{"t": 1, "event": "restore_end", "duration": "3"}', "duration"),
    ('{"t": 1, "event": "plan_installed", "ladder": [4, "2"]}', "ladder"),
    ('{"t": 1, "event": "plan_installed", "ladder": [4], "expected": {"a": 1}}', "expected"),
    ('{"t": 1, "event": "decode_audit", "full": 3}', "eager"),
]


def test_written_events_come_back(tmp_path: Path) -> None:
    with EventWriter(
        tmp_path / "events" / "a.jsonl", run="r", rank=3, replica=1, host="h", clock=lambda: 12.5
    ) as writer:
        writer.set_step(1, 2, 7)
        writer.emit("stage_commit", from_=np.int64(4), to=2, survivors=np.array([0, 3]), stage=1, move=np.float32(0.5))
        writer.emit("fault", t=3.0, res=1.0, epoch=5, rank=None, where="move", what="torn")
    first, second = read_events(tmp_path).events
    assert (first.t, first.res, first.run, first.seed, first.epoch, first.step) == (12.5, 1e-6, "r", 7, 1, 2)
    assert (first.rank, first.replica, first.host) == (3, 1, "h")
    assert first.fields == {"from": 4, "to": 2, "survivors": [0, 3], "stage": 1, "move": 0.5}
    assert (second.t, second.end, second.epoch, second.rank, second.line) == (3.0, 4.0, 5, None, 2)


def test_both_places_are_read(tmp_path: Path) -> None:
    for name in ("events.jsonl", "events-2.jsonl", "events/x.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(GOOD + "\n\n", encoding="utf-8")
    (tmp_path / "responses.jsonl").write_text("not an event log", encoding="utf-8")
    assert len(read_events(tmp_path).events) == 3


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events.jsonl", run="r")

    def emit() -> None:
        for _ in range(200):
            writer.emit("active_batch", sizes=list(range(50)))

    threads = [threading.Thread(target=emit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = read_events(tmp_path)
    assert len(log.events) == 800
    assert log.problems == []


@pytest.mark.parametrize(
    ("event", "fields"), [("detatch_end", {}), ("rollout_end", {"world_size": 4}), ("fault", {"where": float("nan")})]
)
def test_writer_refuses_what_no_reader_takes(tmp_path: Path, event: str, fields: dict[str, object]) -> None:
    writer = EventWriter(tmp_path / "events.jsonl", run="r")
    with pytest.raises(ValueError, match=r"unknown event|lacks response_tokens|JSON compliant"):
        writer.emit(event, **fields)
    assert (tmp_path / "events.jsonl").read_bytes() == b""


@pytest.mark.parametrize(("line", "field"), MALFORMED)
def test_malformed_line_names_file_line_and_field(tmp_path: Path, line: str, field: str | None) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f"{GOOD}\n{line}\n{GOOD}\n", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_events(tmp_path)
    assert str(caught.value).startswith(f"{path}:2: " + (f"{field}: " if field else ""))
    assert (caught.value.line, caught.value.field) == (2, field)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cut", range(1, len(GOOD)))
def test_half_line_of_a_killed_process_is_reported_and_skipped(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f"{GOOD}\n{GOOD[:cut]}", encoding="utf-8")
    log = read_events(tmp_path)
    assert len(log.events) == 1
    assert log.problems == [f"{path}:2: half-written last line skipped (the process was killed)"]


def test_half_line_inside_a_character_is_skipped(tmp_path: Path) -> None:
    whole = json.dumps({"t": 1, "event": "fault", "where": "é", "what": "x"}, ensure_ascii=False).encode()
    (tmp_path / "events.jsonl").write_bytes(whole + b"\n" + whole[: whole.index("é".encode()) + 1])
    log = read_events(tmp_path)
    assert (len(log.events), len(log.problems)) == (1, 1)


def test_next_process_on_the_same_file_cuts_the_half_line(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(f"{GOOD}\n{GOOD[:20]}", encoding="utf-8")
    EventWriter(tmp_path / "events.jsonl", run="r").emit("detach_end")
    log = read_events(tmp_path)
    assert (len(log.events), log.problems) == (2, [])


def test_last_line_with_its_line_feed_is_not_half_written(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(f"{GOOD}\n{GOOD[:20]}\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"events\.jsonl:2"):
        read_events(tmp_path)


def test_nothing_to_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such run folder"):
        read_events(tmp_path / "absent")
    with pytest.raises(InputError, match="RUN_DIR"):
        read_events(tmp_path)


def test_names_of_the_specification_are_known() -> None:
    named = """rollout_start rollout_end plan_installed generation_end local_complete stage_commit detach_start
    detach_end sleep_start sleep_end restore_start restore_end wake_start wake_end capture_end capture_release
    decode_audit dummy_steps preemption plan_skipped sidecar_start sidecar_ready sidecar_stop sidecar_exit sidecar_ack
    weights_loaded fault active_batch"""
    added = {"rehearsal"}
    assert set(EVENT_NAMES) == set(named.split()) | added


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("flexfloor.events", {"numpy", "rich", "pydantic", "torch"}),
        ("flexfloor.cli.report", {"torch", "ray", "vllm", "verl", "plotly", "pulp"}),
        ("flexfloor.ledger.html", {"torch", "ray", "vllm", "verl", "pulp"}),
    ],
)
def test_nothing_heavy_is_imported(module: str, heavy: set[str]) -> None:
    code = f"import sys, {module}; print(*({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
