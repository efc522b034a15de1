"""Expert rows that lose their memory between steps: no rank may count on a copy there."""

from pathlib import Path

import pytest
from elastic_sim import Ask, Engine, Script, Sim

from flexfloor.elastic.placement import Placement


def asks(*lengths: int) -> tuple[Ask, ...]:
    return tuple(Ask(f"r{rank}", rank, length) for rank, length in enumerate(lengths))


SCRIPT = Script(asks(20, 2, 8, 2), (4, 2, 1))


def lose(engine: Engine, rows: int) -> None:
    """As an installation does: memory of the rows behind goes."""
    engine.worker.rows[rows:] = [None] * (len(engine.worker.rows) - rows)
    engine.session.backed(rows)


def moved(sim: Sim) -> list[int]:
    return [e.fields["moved_rows"] for e in sim.named("stage_commit") if e.rank == 0]


def test_copies_with_memory_make_the_second_step_cheaper(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4)
    for _ in range(2):
        sim.rollout(SCRIPT)
    assert moved(sim) == [8, 8, 4, 0], "rank 0 never slept and kept its copies"


def test_all_ranks_lose_and_get_rows_back(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4)
    sim.rollout(SCRIPT)
    sim.all(lambda engine: lose(engine, 4))
    sim.rollout(Script(asks(5, 5, 5, 5), (4,)))
    sim.all(lambda engine: engine.session.backed(16))
    sim.rollout(SCRIPT)
    assert moved(sim)[2:] == moved(sim)[:2]


@pytest.mark.parametrize("rank", range(4))
def test_one_rank_alone_lost_rows_in_a_step_that_was_withdrawn(tmp_path: Path, rank: int) -> None:
    sim = Sim(tmp_path, 4)
    sim.rollout(SCRIPT)
    lose(sim.ranks[rank], 4)
    sim.ranks[rank].session.backed(16)
    sim.rollout(SCRIPT)
    placements = [engine.session.placement for engine in sim.ranks]
    assert all(one.copies == placements[0].copies for one in placements)
    assert moved(sim)[2:] == moved(sim)[:2], "every rank must have forgotten the spare rows"


def test_lost_rows_are_remembered_until_a_step_is_armed(tmp_path: Path) -> None:
    sim = Sim(tmp_path, 4)
    sim.all(lambda engine: lose(engine, 8))
    for _ in range(3):
        sim.rollout(Script(asks(20, 2, 8, 2), (4, 2)))
    assert moved(sim)[1:] == [0, 0]


def test_trim_keeps_what_lies_before() -> None:
    placement = Placement.linear(8, 2, 8)
    placement.copies[0][5] = 7
    placement.trim(5)
    assert placement.copies == {0: {0: 0, 1: 1, 2: 2, 3: 3}, 1: {0: 4, 1: 5, 2: 6, 3: 7}}
    placement.check()
