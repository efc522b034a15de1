"""`flexfloor report`: JSON keys, table, page, trace, exit codes."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from ledger_logs import DATA, ev, leave, ledger, window, worked, write_log

from flexfloor.cli.main import run
from flexfloor.ledger import load_run
from flexfloor.ledger.html import page
from flexfloor.ledger.report import report_json
from flexfloor.ledger.timeline import FREE, SILENT, lay_out
from flexfloor.ledger.trace import trace_json

KEYS = """window_seconds response_tokens ranks occupied_rank_seconds throughput efficiency preemptions decode
dummy_seconds transitions per_seed gains problems"""
WORKED = str(DATA / "worked")
GOOD = '{"item_id": "a", "epoch": 1, "step": 0, "sample": 0, "rank": 0, "token_ids": [1, 2], "finish_reason": "length"}'


def baseline(tmp_path: Path, tokens: int = 7000) -> str:
    return str(write_log(tmp_path / "base" / "events" / "driver.jsonl", window(tokens=tokens)))


def test_worked_case_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", WORKED, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == KEYS.split()
    assert (report["window_seconds"], report["response_tokens"], report["ranks"]) == (100, 7000, 4)
    assert report["occupied_rank_seconds"] == pytest.approx([320, 322.1])
    assert report["throughput"] == 70
    assert report["efficiency"] == pytest.approx([7000 / 322.1, 7000 / 320])
    assert (report["gains"], report["problems"]) == ({}, [])
    assert report["decode"] == {"full": None, "eager": None}
    assert report["per_seed"][0]["checks"]["restore_inside_window"] == "ok"
    assert report["per_seed"][0]["checks"]["ack_before_restore"] == "not checked"


def test_worked_case_as_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", WORKED, "--note", "ranks share [two] cores"]) == 0
    out = capsys.readouterr().out
    for shown in ("[21.73, 21.88]", "[320.00, 322.10]", "70.00", "clock resolution", "Note: ranks share [two] cores"):
        assert shown in out
    assert "not checked" in out


def test_baseline_stands_beside_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = baseline(tmp_path)
    assert run(["report", WORKED, "--baseline", base, "--json"]) == 0
    gains = json.loads(capsys.readouterr().out)["gains"]
    assert gains["throughput"] == 0
    assert gains["efficiency"] == pytest.approx([400 / 322.1 - 1, 400 / 320 - 1])
    assert gains["matched_work"] is True
    assert run(["report", WORKED, "--baseline", base]) == 0
    out = capsys.readouterr().out
    assert "[+24.18%, +25.00%]" in out
    assert "[400.00, 400.00]" in out


def test_unequal_work_is_never_hidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = baseline(tmp_path, tokens=8000)
    assert run(["report", WORKED, "--baseline", base]) == 0
    out = capsys.readouterr().out
    for shown in ("7,000", "8,000", "unequal: -12.50%", "matched_work: seed 0"):
        assert shown in out


def test_notes_of_the_run_folder_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_log(tmp_path / "events.jsonl", worked())
    (folder / "notes.txt").write_text("ranks share two cores\n\n", encoding="utf-8")
    assert run(["report", str(folder)]) == 0
    assert "Note: ranks share two cores" in capsys.readouterr().out


def test_failed_checks_do_not_change_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_log(tmp_path / "events.jsonl", [*window(), ev(40, "detach_end", 1), ev(50, "restore_start", 1)])
    (folder / "events.jsonl").open("a", encoding="utf-8").write('{"t": 12')
    assert run(["report", str(folder), "--json"]) == 0
    half, detach = json.loads(capsys.readouterr().out)["problems"]
    assert "events.jsonl:5: half-written last line skipped" in half
    assert detach.startswith("one_release_per_detach: seed 0 epoch 1 step 0: rank 1")


BAD = {
    "line": (
        "events.jsonl",
        '{"t": 1, "event": "sleep_end", "released_bytes": "x"}\n',
        r"events.jsonl:1: released_bytes: ",
    ),
    "json": ("events.jsonl", "{]\n\n", r"events.jsonl:1: not a JSON line"),
    "none": ("other.txt", "", r"no events\*.jsonl"),
    "unfinished": ("events.jsonl", '{"t": 1, "event": "rollout_start"}\n', r"no finished rollout"),
    "responses": ("responses.jsonl", GOOD.replace("[1, 2]", "7") + "\n", r"responses.jsonl:1: token_ids: "),
    "lengths": ("lengths.jsonl", '{"item_id": "a", "epoch": -1, "lengths": []}\n', r"lengths.jsonl:1: epoch: "),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    name, text, message = BAD[case]
    if name in ("responses.jsonl", "lengths.jsonl"):
        write_log(tmp_path / "events.jsonl", worked())
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert run(["report", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert re.search(message, err)


def test_unwritable_page_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", WORKED, "--html", str(tmp_path / "absent" / "out.html")]) == 2
    assert "out.html: cannot be written" in capsys.readouterr().err


def test_saved_responses_give_lengths_cap_hits_and_preemptions(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "events.jsonl", window(tokens=6))
    lines = [GOOD, GOOD, GOOD.replace('"length"', '"stop", "num_preempted": 2')]
    (folder / "responses.jsonl").write_text("\n".join(lines) + "\n" + GOOD[:30], encoding="utf-8")
    lengths = {"item_id": "a", "epoch": 1, "prompt_tokens": 3, "lengths": [2, 2, 2], "censored": [1]}
    (folder / "lengths.jsonl").write_text(json.dumps(lengths) + "\n", encoding="utf-8")
    loaded = load_run(folder)
    seed = loaded.totals.seeds[0]
    assert (seed.responses, seed.mean_length, seed.cap_hits, seed.preemptions) == (3, 2, (1, 1), 2)
    assert loaded.lengths == (2, 2, 2)
    assert len(loaded.problems) == 1
    assert report_json(loaded)["per_seed"][0]["checks"]["tokens_as_saved"] == "ok"


def test_page_is_self_contained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.html"
    assert run(["report", WORKED, "--baseline", baseline(tmp_path), "--html", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", text) == []
    for shown in ("Ranks over time", "[21.73, 21.88]", "[+24.18%, +25.00%]", "Checks", "Plotly.newPlot"):
        assert shown in text


def test_names_are_escaped_on_the_page() -> None:
    text = page(ledger(worked(), name="<script>x"), notes=["<b>"])
    assert "<script>x" not in text.replace("&lt;script&gt;x", "")
    assert "&lt;b&gt;" in text


def test_timeline_covers_every_window() -> None:
    run_ledger = ledger([*worked(), *window(start=200, end=250, step=1), *leave(2, 210, 212, 240, step=1)])
    frames, segments, ranks = lay_out(run_ledger.entries)
    assert ranks == ["rank 0", "rank 1", "rank 2", "rank 3"]
    for frame in frames:
        for rank in ranks:
            own = [s for s in segments if s.step == frame.step and s.rank == rank]
            assert own[0].start == pytest.approx(frame.start)
            assert own[-1].end == pytest.approx(frame.end)
            assert all(a.end == pytest.approx(b.start) for a, b in pairwise(own))
    free = sum(s.end - s.start for s in segments if s.state == FREE)
    assert free == pytest.approx(48.9 + 29 + 28)
    assert {s.rank for s in segments if s.state == SILENT and s.step.step == 0} == {"rank 0", "rank 2"}


def test_trace_opens_in_perfetto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.json"
    assert run(["report", WORKED, "--trace", str(out)]) == 0
    events = json.loads(out.read_text(encoding="utf-8"))["traceEvents"]
    assert {e["ph"] for e in events} <= {"X", "M", "i"}
    spans = {(e["name"], e["tid"]): e for e in events if e["ph"] == "X"}
    assert (spans["rollout", 0]["ts"], spans["rollout", 0]["dur"]) == (0, 100_000_000)
    assert (spans["free", 3]["ts"], spans["free", 3]["dur"]) == (61_000_000, 29_000_000)
    assert spans["restore", 1]["ts"] == pytest.approx(91_900_000, abs=1)
    assert all(isinstance(e["ts"], int) and e["ts"] >= 0 for e in events if e["ph"] != "M")


def test_replicas_are_processes_of_the_trace() -> None:
    log = [*window(), ev(10, "local_complete", 0, replica=0), ev(11, "local_complete", 0, replica=1)]
    trace = trace_json(ledger(log))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert names == {0: "driver", 1: "replica 0", 2: "replica 1"}
    assert [e["pid"] for e in trace if e["name"] == "local_complete"] == [1, 2]
