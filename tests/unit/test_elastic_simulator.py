"""The simulator of the protocol's tests can fail: hangs, broken worlds and collectives of a subset are seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from elastic_sim import LONG, Engine, Script, Sim, asks, at
from elastic_world import EndedError, FakeWorker, HangError, Lockstep

from flexfloor.elastic.vector import Row


@pytest.fixture
def sim(tmp_path: Path) -> Sim:
    return Sim(tmp_path, 4)


def test_a_hang_is_named_at_once() -> None:
    steps = Lockstep()
    steps.run([lambda: steps.wait(0, lambda: False, "rain"), lambda: None])
    assert isinstance(steps.errors[0], HangError)
    assert "rank 0 waits for rain" in str(steps.errors[0])


def test_a_lost_peer_ends_who_waits_for_it() -> None:
    steps = Lockstep()

    def dies() -> None:
        raise ValueError

    steps.run([lambda: steps.wait(0, lambda: False, "rank 1"), dies])
    assert isinstance(steps.errors[0], EndedError)
    assert isinstance(steps.errors[1], ValueError)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda w: w.rows.__setitem__(0, "stale"), "stale is not expert"),
        (lambda w: setattr(w, "map", [-1] * 16), "experts are not reachable"),
        (lambda w: setattr(w, "group", (0, 1)), "is in"),
        (lambda w: setattr(w, "released", True), "without weights"),
    ],
)
def test_a_broken_world_is_seen(sim: Sim, spoil: Callable[[FakeWorker], None], says: str) -> None:
    script = Script(asks(LONG), (4, 2, 1), calls=(at(4, 1, lambda engine: spoil(engine.worker)),))
    with pytest.raises(AssertionError, match=says):
        sim.rollout(script)


def test_a_subset_in_a_collective_is_seen(sim: Sim) -> None:
    def leave(engine: Engine) -> None:
        engine.session.ballot.meet(Row())

    with pytest.raises(Exception, match="did not"):
        sim.rollout(Script(asks(LONG), (4, 2), calls=(at(1, 2, leave),)))
