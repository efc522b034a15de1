"""A calibration of real engines: each point is measured in the world it names, and the simulator reads the result."""

import json

import pytest
from driver_bed import config

from flexfloor.driver.calibrate import Campaign, Watcher, save
from flexfloor.driver.calibration import Grid, Point
from flexfloor.driver.checks import ModelFacts
from flexfloor.driver.room import changes, kv_room, kv_tokens
from flexfloor.errors import InputError
from flexfloor.events import read_events
from flexfloor.simulate import Machine, load_costs
from flexfloor.step_times import StepTimes


def statuses(replica):
    return replica.wait(replica.server._call("status", {}))


def test_points_are_measured_in_their_world_and_the_simulator_reads_the_tables(replica, tiny_checkpoint, tmp_path):
    facts = ModelFacts.read(tiny_checkpoint)
    grid = Grid(batches=(1, 4), contexts=(8,), tokens=12, rounds=1)
    (tmp_path / "events").mkdir()
    found = Campaign(replica, statuses(replica), config(), facts, grid, tmp_path / "events", Watcher()).run()

    wanted = {Point(ep, batch, 8, kind) for ep in (4, 2, 1) for batch in (1, 4) for kind in ("decode", "idle")}
    assert set(found.findings.seconds) == {p for p in wanted if p.kind == "decode" or p.ep > 1}
    assert all(0 < seconds < 5 for answers in found.findings.seconds.values() for seconds in answers)
    reached = {}
    for event in read_events(tmp_path).events:
        if event.event == "stage_commit":
            reached.setdefault(event.step, set()).add((event.fields["to"], tuple(event.fields["survivors"])))
    assert {world for worlds in reached.values() for world in worlds} == {(2, (2, 3)), (1, (3,))}
    assert found.costs.natural.shrink.trial > 0
    assert found.costs.restore_s > 0

    paths = save(found, tmp_path, "natural", "tiny")
    assert [path.name for path in paths] == ["step_times.csv", "costs.yaml", "calibration.json"]
    table = StepTimes.load(paths[0])
    machine = Machine(table, load_costs(paths[1]))
    assert set(machine.curves(config(), (4, 2, 1))) == {4, 2, 1}
    assert len(json.loads(paths[2].read_text())["step_times"]) == len(found.findings.seconds)


def test_a_grid_that_fits_nowhere_is_refused_before_a_step(replica, tiny_checkpoint, tmp_path):
    (tmp_path / "events").mkdir()
    facts = ModelFacts.read(tiny_checkpoint)
    grid = Grid(batches=(64,), contexts=(8,), tokens=12)
    with pytest.raises(InputError, match="max_num_seqs is 16"):
        Campaign(replica, statuses(replica), config(), facts, grid, tmp_path / "events", Watcher())
    assert kv_tokens(statuses(replica)) > 0


def test_started_engines_say_what_kv_there_is_beside_the_rows_of_every_floor(replica):
    told = statuses(replica)
    assert changes(told)
    assert set(kv_room(told, (4, 2, 1)).values()) == {max(told[0]["kv_tokens_by_floor"].values())}, "a stated KV size"
