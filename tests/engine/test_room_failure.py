"""Memory that does not come when rows and KV change places: the layout of before stands again, and nobody trusts it."""

from types import SimpleNamespace

import pytest
import torch

from flexfloor.engine.devices.base import Device
from flexfloor.engine.room import Room

EXPERTS, BLOCKS = 8, 16


class Memory:
    """A device whose memory does not come for the next ``refusals`` layouts."""

    page = 1
    refusals = 0
    outline, awake, backed = Device.outline, Device.awake, Device.backed

    def __init__(self):
        self.layouts = []

    def hollow(self, holes):
        self.layouts.append([(span.start, span.stop) for spans in holes for span in spans])
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError("out of memory")


@pytest.fixture
def made():
    device = Memory()
    weight, kv = torch.ones(EXPERTS, 4), torch.ones(BLOCKS, 4)
    experts = SimpleNamespace(experts=EXPERTS, capacity=EXPERTS, tensors=lambda: [weight])
    runner = SimpleNamespace(
        kv_caches=[kv],
        kv_cache_config=SimpleNamespace(num_blocks=BLOCKS),
        max_model_len=4,
        cache_config=SimpleNamespace(block_size=4),
    )
    settings = SimpleNamespace(world_size=4, smallest_floor=1, poison=True)
    return device, Room(device, experts, runner, settings, charged=False), weight, kv


def test_a_refusal_brings_the_layout_of_before(made):
    device, room, weight, kv = made
    room.make(2, 8)
    before = device.layouts[-1]
    weight.fill_(1)
    kv.fill_(1)
    device.refusals = 1
    with pytest.raises(RuntimeError, match="out of memory"):
        room.make(1, 12)
    assert device.layouts[-1] == before
    assert room.rows == 4
    assert weight[:2].eq(1).all()
    assert weight[2:4].isnan().all(), "spare rows hold nothing"
    assert kv[:8].eq(0).all()
    assert room.make(1, 12) == (8, 12)


def test_after_two_refusals_the_next_step_lays_everything_out_anew(made):
    device, room, _, kv = made
    before = room.make(2, 8)
    device.refusals = 2
    with pytest.raises(RuntimeError, match="out of memory"):
        room.make(1, 12)
    kv.fill_(1)
    count = len(device.layouts)
    assert room.make(2, 8) == before
    assert len(device.layouts) == count + 1
    assert kv[:8].eq(0).all()


def test_all_rows_for_a_while_and_back(made):
    device, room, weight, _ = made
    before = room.make(2, 8), device.layouts[-1]
    with room.all_rows():
        assert room.rows == EXPERTS
        weight.fill_(3)
    assert (room.make(2, 8), device.layouts[-1]) == before
    assert weight[:2].eq(3).all()
    assert weight[2:4].isnan().all()
