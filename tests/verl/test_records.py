"""The run directory: a resumed run knows what it knew at its checkpoint, and plans what it would have planned."""

import pytest
from test_epochs import config

from flexfloor.errors import InputError
from flexfloor.history import Observation
from verl_integration.epochs import plan_replicas, steps_per_epoch, train_steps
from verl_integration.items import ItemIndex
from verl_integration.records import RunRecords, plan_file
from verl_integration.section import RunSettings

IDS = [f"p{i:02}" for i in range(20)]
SETTINGS = config(b=8)
STEPS = steps_per_epoch(len(IDS), 8)


def settings(path, replicas=1):
    return RunSettings(SETTINGS, replicas, str(path), "run")


def plans(records, epoch, replicas=1):
    return plan_replicas(SETTINGS, records.known(epoch * STEPS), IDS, replicas, epoch)


def length(item, epoch, sample):
    return 12 + (7 * int(item[1:]) + 5 * epoch + sample) % 90


def train(records, first, last, replicas=1):
    """Steps ``first`` to ``last``; what is generated depends on item, epoch and sample alone."""
    for global_step in range(first, last + 1):
        epoch, step = divmod(global_step - 1, STEPS)
        own = plans(records, epoch, replicas)
        records.save_plans(own)
        placements = train_steps(SETTINGS, own, ItemIndex(IDS), epoch)[step].placements
        seen = [
            Observation(p.item_id, epoch, 9, tuple(length(p.item_id, epoch, s) for s in p.samples)) for p in placements
        ]
        records.record(global_step, epoch, seen)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("checkpoint", "reached"), [(0, 1), (0, 2), (2, 3), (3, 4), (3, 6), (4, 5), (5, 8)])
def test_a_killed_run_ends_as_one_that_was_never_stopped(tmp_path, checkpoint, reached, replicas):
    whole = RunRecords(settings(tmp_path / "whole", replicas))
    train(whole, 1, 9, replicas)
    killed = RunRecords(settings(tmp_path / "killed", replicas))
    train(killed, 1, reached, replicas)
    killed.close()
    resumed = RunRecords(settings(tmp_path / "killed", replicas))
    assert resumed.resume(checkpoint) == reached - checkpoint
    train(resumed, checkpoint + 1, 9, replicas)
    assert resumed.history.observations() == whole.history.observations()
    assert {(o.epoch, len(o.lengths)) for o in resumed.history.observations()} == {(e, 2) for e in range(3)}
    assert plans(resumed, 3, replicas) == plans(whole, 3, replicas)
    for epoch in range(3):
        for replica in range(replicas) if replicas > 1 else [None]:
            ours, theirs = (plan_file(tmp_path / name, epoch, replica).read_text() for name in ("killed", "whole"))
            assert ours == theirs


def test_a_step_is_recorded_once(tmp_path):
    records = RunRecords(settings(tmp_path))
    train(records, 1, 2)
    with pytest.raises(InputError, match="holds step 2 already"):
        train(records, 2, 2)


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="name a writable place"):
        RunRecords(settings(tmp_path / "file"))
