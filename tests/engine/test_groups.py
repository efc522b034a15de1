"""Groups on their way out are waited for before graphs are captured, but not for ever."""

import threading
import time

import pytest

from flexfloor.engine import groups
from flexfloor.engine.groups import Groups


class Device:
    """Destroys a group when it is let."""

    def __init__(self):
        self.let, self.gone = threading.Event(), []

    def destroy_group(self, group):
        self.let.wait(10)
        self.gone.append(group)


@pytest.fixture
def device():
    made = Device()
    yield made
    made.let.set()


@pytest.fixture
def kept(device):
    made = Groups(device, 0, 4, 8, "test")
    made._sets[0, 1] = "a world's groups"
    return made


def test_a_group_that_is_dropped_is_gone_when_graphs_are_captured(device, kept):
    kept.drop((0, 1))
    threading.Timer(0.2, device.let.set).start()
    kept.settle()
    assert device.gone == ["a world's groups"]


def test_a_group_that_does_not_go_keeps_nobody(device, kept, monkeypatch):
    monkeypatch.setattr(groups, "SETTLE_S", 0.1)
    kept.drop((0, 1))
    began = time.monotonic()
    kept.settle()
    assert time.monotonic() - began < 5
    assert device.gone == []


def test_nothing_is_waited_for_where_nothing_goes(device, kept):
    kept.drop((2, 3))
    kept.drop(())
    kept.settle()
    assert kept.has((0, 1))
