"""New weights reach every expert row that holds anything: primary rows, and spare ones before they can be used."""

import hashlib

import pytest
import torch
from bed_runs import events, requests, roll
from tiny_checkpoint import make

from flexfloor.engine.row_versions import NOTHING

RANKS, PER, CAPACITY = 4, 4, 16
LENGTHS = [[60], [8], [24], [8]]
"""(4, 2, 1) goes to ranks 0 and 2, then to rank 0."""


def write(worker, folder):
    """What verl's weight sync does on a rank: other weights into the running model."""
    from safetensors.torch import load_file

    from flexfloor.engine.worker import world_of
    from verl_integration.cpu.weights import reload_weights

    weights = load_file(folder / "model.safetensors")
    reload_weights(worker, [(name, tensor.clone()) for name, tensor in weights.items()])
    world_of(worker).renewed()


def digests(worker):
    """A digest of what each row holds over all layers; None for a row without weights (NaN)."""
    from flexfloor.engine.worker import world_of

    rows = world_of(worker).experts
    found = []
    for index in range(rows.capacity):
        tensors = rows.row(index)
        empty = [bool(tensor.isnan().all()) for tensor in tensors]
        assert all(empty) or not any(empty), f"row {index} is half empty"
        content = b"".join(tensor.clone().view(torch.uint8).numpy().tobytes() for tensor in tensors)
        found.append(None if all(empty) else hashlib.sha256(content).hexdigest())
    return found


def versions(worker):
    from flexfloor.engine.worker import world_of

    return world_of(worker).row_versions()


def spoil(worker, row, version):
    """The record says that ``row`` holds ``version``."""
    from flexfloor.engine.worker import world_of

    world_of(worker)._versions._held[row] = version


def sync(bed, folder):
    """All ranks get the weights of ``folder``; returns their version."""
    bed.call("on_worker", write, folder)
    assert bed.call("on_worker", versions) == [[NOTHING] * CAPACITY] * RANKS
    return bed.call("loaded")[0]["version"]


@pytest.fixture
def weights(bed, tiny_checkpoint, tmp_path):
    """Folder of other weights; those of the start come back at the end."""
    yield make(tmp_path, seed=1)
    roll(bed, requests([[4]] * RANKS), (4,))  # a step without prediction: no row is kept
    sync(bed, tiny_checkpoint)


def spare_rows_hold_their_primaries(bed, version):
    """Every row that is taken to hold an expert equals its primary bit for bit; returns the spare rows by rank."""
    held, (placement, *others) = bed.call("on_worker", digests), bed.call("placement")
    assert all(other == placement for other in others)
    primary = {expert: held[expert // PER][expert % PER] for expert in range(RANKS * PER)}
    assert len(set(primary.values())) == RANKS * PER
    for rank, rows in placement.copies.items():
        assert {row: held[rank][row] for row in rows} == {row: primary[expert] for row, expert in rows.items()}
        recorded = bed.call("on_worker", versions)[rank]
        assert recorded == [version if row in rows else NOTHING for row in range(CAPACITY)]
    return {rank: sorted(row for row in rows if row >= PER) for rank, rows in placement.copies.items()}


def test_a_shrink_after_the_sync_fills_spare_rows_with_the_new_weights(bed, weights):
    made = requests(LENGTHS)
    bed.call("loaded")
    before = roll(bed, made, (4, 2, 1))
    old = {digest for rows in bed.call("on_worker", digests) for digest in rows}
    version = sync(bed, weights)
    held = bed.call("on_worker", digests)
    assert all(rows[PER:] == [None] * (CAPACITY - PER) for rows in held), "a spare row was not emptied"
    assert not old & {digest for rows in held for digest in rows[:PER]}
    assert spare_rows_hold_their_primaries(bed, version) == {rank: [] for rank in range(RANKS)}
    shrunk = roll(bed, made, (4, 2, 1))
    assert shrunk.worlds[1:3] == [(0, 2), (0,)]
    assert spare_rows_hold_their_primaries(bed, version)[0] == list(range(PER, CAPACITY))
    assert shrunk.same_as(roll(bed, made, (4,)))
    assert shrunk.tokens != before.tokens


def test_rows_of_planned_residency_hold_the_new_weights_right_after_the_sync(bed, weights):
    made, planned = requests(LENGTHS), {"predicted": ((0, 2), (0,))}
    bed.call("loaded")
    roll(bed, made, (4, 2, 1), **planned)
    version = sync(bed, weights)
    spares = spare_rows_hold_their_primaries(bed, version)
    assert spares == {0: list(range(PER, CAPACITY)), 1: [], 2: list(range(PER, 2 * PER)), 3: []}
    before = len(events(bed, "rehearsal"))
    shrunk = roll(bed, made, (4, 2, 1), **planned)
    assert {event["moved_rows"] for event in events(bed, "rehearsal")[before:]} == {0}
    assert shrunk.same_as(roll(bed, made, (4,)))


def test_a_row_of_an_older_version_can_neither_travel_nor_be_used(bed):
    made = requests(LENGTHS)
    bed.call("loaded")
    full = roll(bed, made, (4,))
    bed.call("on_worker", spoil, 2, 0)
    before = len(events(bed, "fault")), len(events(bed, "plan_skipped"))
    seen = roll(bed, made, (4, 2))
    assert seen.worlds == [(0, 1, 2, 3)]
    assert seen.same_as(full)
    faults = [event["what"] for event in events(bed, "fault")[before[0] :]]
    assert any("row 2 of rank 1 holds weights of version 0, not of version" in what for what in faults)
    assert len(events(bed, "plan_skipped")) > before[1]
    bed.call("loaded")
    assert roll(bed, made, (4, 2)).same_as(full)
