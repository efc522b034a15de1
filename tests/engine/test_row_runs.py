"""Rows that are neighbours on both ranks travel together."""

from flexfloor.elastic.placement import Move, Placement, shrink
from flexfloor.engine.experts import runs


def test_neighbours_on_both_sides_are_one_run():
    _, moves = shrink(Placement.linear(128, 2, 128), [0])
    assert runs(moves) == [(1, 0, 0, 64, 64)]


def test_a_gap_on_either_side_or_another_rank_begins_a_new_run():
    moves = [Move(0, 1, 4, 0, 8), Move(1, 1, 5, 0, 9), Move(2, 1, 7, 0, 10), Move(3, 2, 8, 0, 11), Move(4, 1, 8, 0, 12)]
    assert runs(moves) == [(1, 0, 4, 8, 2), (1, 0, 7, 10, 1), (1, 0, 8, 12, 1), (2, 0, 8, 11, 1)]


def test_every_row_moves_once_whatever_the_order():
    placement = Placement.linear(48, 4, 48)
    _, moves = shrink(placement, [1, 3])
    made = runs(list(reversed(moves)))
    rows = [(s, a + i, t, b + i) for s, t, a, b, n in made for i in range(n)]
    assert sorted(rows) == sorted(
        (m.source, m.source_row, m.target, m.target_row) for m in moves if m.source != m.target
    )
