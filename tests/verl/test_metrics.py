"""FlexFloor's figures of a step: the ledger's worked case, as verl's logger gets it."""

import json
import math
from pathlib import Path

import pytest

from flexfloor.events import EventWriter, read_events
from verl_integration.metrics import EventTail, skip_reasons, step_metrics

WORKED = Path(__file__).parents[1] / "unit" / "data" / "ledger" / "worked"


@pytest.fixture
def worked():
    return read_events(WORKED).events


def test_the_worked_case(worked):
    first = next(event for event in worked if event.event == "rollout_start")
    found = step_metrics(worked, first.epoch, first.step)
    assert found["flexfloor/throughput_q"] == pytest.approx(70)
    assert found["flexfloor/efficiency_e/lo"] == pytest.approx(7000 / 322.1)
    assert found["flexfloor/efficiency_e/hi"] == pytest.approx(7000 / 320)
    assert found["flexfloor/released_rank_seconds/lo"] == pytest.approx(77.9)
    assert found["flexfloor/released_rank_seconds/hi"] == pytest.approx(80)
    assert all(isinstance(value, float) and math.isfinite(value) for value in found.values())


def test_a_step_without_its_window_has_no_figures(worked):
    assert step_metrics([e for e in worked if e.event != "rollout_end"], worked[0].epoch, worked[0].step) == {}
    assert step_metrics(worked, 99, 0) == {}


def test_two_replicas_have_free_time_between_and_within_apart(tmp_path):
    for replica, (leave, over) in enumerate(((10, 20), (40, 100))):
        for rank in (0, 1):
            name = f"replica-{replica}-rank-{rank}.jsonl"
            log = EventWriter(tmp_path / "events" / name, run="r", rank=rank, replica=replica, res=0.0)
            log.set_step(0, 0)
            log.emit("plan_installed", t=0.0, ladder=[2, 1], expected=1)
            if rank == 0:
                for event, t in (("detach_start", leave), ("detach_end", leave), ("sleep_end", leave)):
                    log.emit(event, t=float(t))
                log.emit("restore_start", t=float(over))
            log.close()
    with EventWriter(tmp_path / "events" / "driver.jsonl", run="r", res=0.0) as log:
        log.set_step(0, 0)
        log.emit("rollout_start", t=0.0, world_size=4)
        for replica, over in ((0, 20.0), (1, 100.0)):
            log.emit("generation_end", t=over, replica=replica)
        log.emit("rollout_end", t=100.0, response_tokens=50, world_size=4, responses=4)
    found = step_metrics(read_events(tmp_path).events, 0, 0)
    assert found["flexfloor/free_between_workers/lo"] == pytest.approx(2 * 80)
    assert found["flexfloor/free_within_workers/lo"] == pytest.approx(10 + 60)
    assert found["flexfloor/released_rank_seconds/lo"] == pytest.approx(10 + 60)


def test_the_tail_reads_whole_new_lines_once(tmp_path):
    tail, file = EventTail(tmp_path), tmp_path / "driver.jsonl"
    line = json.dumps({"t": 1.0, "run": "r", "event": "generation_end"})
    file.write_text(line + "\n" + line[:10])
    assert len(tail.read()) == 1
    file.write_text(line + "\n" + line + "\n")
    assert [event.line for event in tail.read()] == [2]
    assert tail.read() == []
    later = EventTail(tmp_path)
    later.skip()
    assert later.read() == []


def test_reasons_become_names(tmp_path):
    with EventWriter(tmp_path / "rank-0.jsonl", run="r", rank=0) as log:
        log.emit("plan_skipped", stage=2, reason="rank 1 failed in switch, attempt 1 of 3")
    assert skip_reasons(read_events_of(tmp_path)) == ["rank_1_failed_in_switch"]


def read_events_of(folder):
    return EventTail(folder).read()
