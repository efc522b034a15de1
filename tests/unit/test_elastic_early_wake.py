"""Parked ranks get their memory back while the survivors decode their last tokens."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from elastic_sim import Script, Sim, asks

from flexfloor.elastic.cadence import STRIDE
from flexfloor.elastic.early_wake import MARGIN, SAMPLES, tokens_left
from flexfloor.elastic.vector import Row
from flexfloor.ledger.trace import trace_json

WAKE_S = 0.2
LONG = Script(asks(([3], [3], [3], [80])), ladder=(4, 1))


@pytest.fixture
def sim(tmp_path: Path) -> Sim:
    made = Sim(tmp_path, 4)
    for engine in made.ranks:
        engine.worker.wake_s = WAKE_S
    return made


def wakes(sim: Sim) -> list[tuple[float, float]]:
    """(wake_start, restore_start) of the ranks that woke in the last rollout."""
    restored = {e.rank: e.t for e in sim.named("restore_start") if e.step == sim.number}
    return [(e.t, restored[e.rank]) for e in sim.named("wake_start") if e.step == sim.number]


def spacing(sim: Sim) -> float:
    """Seconds an iteration of the smaller world takes: the whole of it over its iterations."""
    (commit,) = (e.t for e in sim.named("stage_commit") if e.step == sim.number)
    begun = min(e.t for e in sim.named("restore_start") if e.step == sim.number)
    return (begun - commit) / sum(world == (3,) for world in sim.ranks[3].worlds)


def test_the_wake_is_over_when_the_last_token_is_and_no_sooner_than_it_must(sim: Sim) -> None:
    sim.rollout(LONG)
    found = wakes(sim)
    assert len(found) == 3
    for woken, restored in found:
        # A simulated rank may read its clock a stride early or late; sync points are a stride apart.
        assert 0.8 * WAKE_S <= restored - woken <= WAKE_S * MARGIN + 3 * STRIDE * spacing(sim)
    assert all("start_wake" in engine.worker.calls for engine in sim.ranks[:3])
    assert "start_wake" not in sim.ranks[3].worker.calls


def test_free_time_ends_where_the_wake_begins(sim: Sim) -> None:
    ledger = sim.rollout(LONG)
    free = [span for rank in ledger.entries[0].occupancy.ranks.values() for span in rank.surely_free]
    assert sorted(end for _, end in free) == pytest.approx(sorted(woken for woken, _ in wakes(sim)))


def test_spans_of_a_rank_lie_inside_each_other_or_apart(sim: Sim) -> None:
    ledger = sim.rollout(LONG)
    tracks: dict[object, list[tuple[int, int]]] = defaultdict(list)
    for event in trace_json(ledger)["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        assert not [(one, two) for one in spans for two in spans if one[0] < two[0] < one[1] < two[1]]
    assert "wake" in {event["name"] for event in trace_json(ledger)["traceEvents"]}


@pytest.mark.parametrize(
    "script",
    [
        replace(LONG, end="topology"),
        replace(LONG, asks=(*LONG.asks[:3], replace(LONG.asks[3], spare=500))),
        replace(LONG, asks=asks(([3], [3], [3], [3 + SAMPLES]))),
    ],
    ids=["memory stays away", "limits say nothing", "too short to judge"],
)
def test_without_grounds_nothing_wakes_early(sim: Sim, script: Script) -> None:
    sim.rollout(script)
    assert all("start_wake" not in engine.worker.calls for engine in sim.ranks)


def test_the_first_wake_of_a_rank_is_not_early_because_nothing_is_known_of_it(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4)
    sim.rollout(LONG)
    assert all("start_wake" not in engine.worker.calls for engine in sim.ranks)


def test_every_park_is_judged_anew(sim: Sim) -> None:
    for _ in range(3):
        sim.rollout(LONG)
        assert len(wakes(sim)) == 3
        assert all(woken < restored for woken, restored in wakes(sim))


def test_a_wake_that_failed_in_the_background_is_made_good_by_the_next_restore(sim: Sim) -> None:
    sim.ranks[1].worker.breaks["wake"] = RuntimeError("no memory")
    sim.rollout(LONG)
    assert [e.rank for e in sim.named("fault")] == [1]
    assert len(sim.named("plan_skipped")) == 1


@pytest.mark.parametrize(
    ("row", "left"),
    [
        (Row(closed=1, tokens_left=7), 7),
        (Row(closed=0, tokens_left=7), None),
        (Row(closed=1, tokens_left=7, open=1), None),
        (Row(closed=1, tokens_left=7, expected=1), None),
    ],
)
def test_what_may_still_come_is_no_end(row: Row, left: int | None) -> None:
    done = Row(closed=1)
    assert tokens_left([done, row], [1]) == left


def test_who_is_parked_has_nothing_left() -> None:
    assert tokens_left([Row(closed=1, tokens_left=9), Row(closed=1, tokens_left=2)], [1]) == 2
