"""How far apart sync points are, and what that changes: when ranks leave, never what requests get."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from elastic_sim import STEP_S, Script, Sim, asks
from hypothesis import given
from hypothesis import strategies as st

from flexfloor.elastic.cadence import STRIDE, stride
from flexfloor.elastic.decision import World
from flexfloor.elastic.vector import Row

DONE = Row(received=1, expected=1, closed=1)
BUSY = Row(received=1, expected=1, closed=1, unfinished=1, tokens_left=100)


def armed(**changes: object) -> World:
    made = World(2, [0, 1], [2, 1], armed=True)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("world", "row", "iterations"),
    [
        (armed(), BUSY, STRIDE),
        (armed(), BUSY._replace(tokens_left=3), 3),
        (armed(), BUSY._replace(tokens_left=0), 1),
        (armed(armed=False), BUSY, 1),
        (armed(gate=True), BUSY, 1),
        (armed(retry_at=4), BUSY, 1),
        (armed(syncs=4, retry_at=4), BUSY, STRIDE),
        (armed(), BUSY._replace(want_restore=1), 1),
        (armed(), BUSY._replace(pause=1), 1),
        (armed(), DONE, 1),
        (armed(), DONE._replace(open=1), 1),
        (armed(members=[0]), BUSY, 1),
    ],
)
def test_ranks_meet_when_something_can_change(world: World, row: Row, iterations: int) -> None:
    assert stride(world, [DONE, row]) == iterations


def test_the_first_step_in_a_new_world_is_confirmed_at_once() -> None:
    assert stride(armed(), [DONE, BUSY], changed=True) == 1


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6))
def test_no_rank_that_uses_all_its_tokens_is_seen_late(left: list[int]) -> None:
    rows = [BUSY._replace(tokens_left=n) for n in left]
    world = World(len(left), list(range(len(left))), [len(left)], armed=True)
    assert 1 <= stride(world, rows) <= max(1, min(left))


@pytest.fixture
def sim(tmp_path: Path) -> Sim:
    return Sim(tmp_path, 4)


def left_at(sim: Sim) -> int:
    return next(i for i, world in enumerate(sim.ranks[0].worlds) if len(world) < 4)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 23])
def test_a_rank_that_uses_all_its_tokens_leaves_at_once(sim: Sim, length: int) -> None:
    sim.rollout(Script(asks([length, length, length, 60]), (4, 1)))
    first = sim.ranks[0].steps[0]
    assert left_at(sim) == first + length - 1


@pytest.mark.parametrize("length", [1, 7, 8, 9, 23])
def test_a_rank_that_ends_before_its_limit_leaves_within_the_stride(sim: Sim, length: int) -> None:
    ended = tuple(replace(ask, spare=500) for ask in asks([length, length, length, 60]))
    sim.rollout(Script(ended, (4, 1)))
    first = sim.ranks[0].steps[0]
    assert first + length - 1 <= left_at(sim) < first + length - 1 + STRIDE


def test_completion_is_logged_when_it_is_though_others_learn_it_later(sim: Sim) -> None:
    sim.rollout(Script(tuple(replace(ask, spare=500) for ask in asks([11, 12, 13, 60])), (4, 1)))
    done = [(e.t, e.rank) for e in sim.named("local_complete")]
    assert [rank for _, rank in done] == [0, 1, 2, 3]
    assert all(late - early > STEP_S / 2 for (early, _), (late, _) in pairwise(done))


@pytest.mark.parametrize("spare", [0, 500])
def test_a_commit_tells_the_iterations_that_were_made_before_it(sim: Sim, spare: int) -> None:
    sim.rollout(Script(tuple(replace(ask, spare=spare) for ask in asks([11, 12, 13, 60])), (4, 1)))
    (commit,) = sim.named("stage_commit")
    assert commit.fields["iterations"] == left_at(sim) - sim.ranks[3].steps[0] + 1
    assert (commit.fields["iterations"] == 13) is (spare == 0)


def test_most_iterations_have_no_meeting(sim: Sim) -> None:
    sim.rollout(Script(asks([200, 200, 200, 200]), (4, 1)))
    assert sim.hub.entered[0] < 200 / STRIDE + 10
