"""Where experts go: every one reachable, fewest moves, spare copies used again."""

from __future__ import annotations

import math
from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexfloor.elastic.placement import Move, Placement, choose_survivors, refill, restore, shrink
from flexfloor.errors import ProtocolError

Rows = dict[int, dict[int, int | None]]


class Walk:
    """A placement with the rows' real contents, taken through shrinks and restores."""

    def __init__(self, ranks: int, experts: int, floor: int) -> None:
        self.ranks, self.experts = ranks, experts
        self.base = Placement.linear(experts, ranks, experts // floor)
        self.now = self.base.clone()
        self.members = list(range(ranks))
        self.rows: Rows = {r: dict(own) for r, own in self.base.active.items()}

    def apply(self, moves: list[Move]) -> None:
        for move in moves:
            assert self.rows[move.source][move.source_row] == move.expert, f"{move} sends another expert"
        for move in moves:
            assert 0 <= move.target_row < self.base.capacity
            self.rows[move.target][move.target_row] = move.expert

    def verify(self, present: list[int]) -> None:
        for rank in present:
            for row, expert in self.now.copies[rank].items():
                assert self.rows[rank][row] == expert, f"row {row} of rank {rank} is noted wrongly"
        per = self.experts // len(self.members)
        assert sorted(self.now.active) == self.members
        seen = [e for rank in self.members for e in self.now.active[rank].values()]
        assert sorted(seen) == list(range(self.experts)), "every expert exactly once"
        for rank in self.members:
            assert sorted(self.now.active[rank]) == list(range(per)), "rows 0 .. E/W - 1"
            table = self.now.expert_map(rank)
            assert {e: row for e, row in enumerate(table) if row >= 0} == {
                e: r for r, e in self.now.active[rank].items()
            }

    def shrink(self, survivors: list[int]) -> list[Move]:
        old = self.now.clone()
        target, moves = shrink(self.now, survivors)
        assert self.now == old, "the old placement is left alone: the exit may be abandoned"
        for rank in survivors:
            for row, expert in old.active[rank].items():
                assert target.active[rank][row] == expert, "rows that stay keep their place"
        assert len(moves) == cost(old, survivors), "fewest moves"
        self.apply(moves)
        gone = [rank for rank in self.members if rank not in survivors]
        self.now, self.members = target, sorted(survivors)
        self.verify(self.members)
        for rank in gone:
            self.rows[rank] = {}
        return moves

    def full(self) -> list[Move]:
        parked = [rank for rank in range(self.ranks) if rank not in self.members]
        held = self.now.clone()
        held.forget(parked)
        target, moves = restore(held, self.base, range(self.ranks))
        assert len(moves) == len(parked) * self.experts // self.ranks
        assert {move.target for move in moves} == set(parked), "survivors kept their first rows"
        self.apply(moves)
        self.now, self.members = target, list(range(self.ranks))
        self.verify(self.members)
        assert self.now.active == self.base.active
        self.now.check()
        return moves


def cost(placement: Placement, survivors: list[int]) -> int:
    """Experts with no valid copy in the rows that the smaller world uses; each must move once."""
    per = placement.experts // len(survivors)
    held = {e for rank in survivors for row, e in placement.copies[rank].items() if row < per}
    return placement.experts - len(held)


@st.composite
def walks(draw: st.DrawFn) -> tuple[int, int, int, int]:
    ranks = draw(st.sampled_from([2, 3, 4, 6, 8]))
    return ranks, ranks * draw(st.integers(1, 3)), draw(st.integers(0, 2**20)), draw(st.integers(2, 12))


@settings(max_examples=150, deadline=None)
@given(walks())
def test_random_shrinks_and_restores(drawn: tuple[int, int, int, int]) -> None:
    ranks, experts, seed, steps = drawn
    random, walk = Random(seed), Walk(ranks, experts, 1)
    for _ in range(steps):
        sizes = [s for s in range(1, len(walk.members)) if experts % s == 0]
        if not sizes or random.random() < 0.35:
            walk.full()
            continue
        size = random.choice(sizes)
        busy = sorted(random.sample(walk.members, random.randint(0, size)))
        idle = [rank for rank in walk.members if rank not in busy]
        order = random.sample(range(ranks), ranks)
        survivors = choose_survivors(walk.now, busy, idle, size, order)
        assert set(busy) <= set(survivors) <= set(walk.members)
        assert len(survivors) == size
        assert survivors == sorted(survivors)
        costs = {chosen: cost(walk.now, [*busy, *chosen]) for chosen in combinations(idle, size - len(busy))}
        least = min(costs.values())
        assert cost(walk.now, survivors) == least, f"{survivors} of {busy}+{idle}"
        walk.shrink(survivors)


def test_linear_is_the_loaders_placement() -> None:
    base = Placement.linear(8, 4, 8)
    assert base.active == {0: {0: 0, 1: 1}, 1: {0: 2, 1: 3}, 2: {0: 4, 1: 5}, 3: {0: 6, 1: 7}}
    assert base.copies == base.active
    assert base.home()[5] == (2, 1)
    assert base.expert_map(1) == [-1, -1, 0, 1, -1, -1, -1, -1]
    assert base.expert_map(9) == [-1] * 8


def test_a_non_contiguous_world_by_hand() -> None:
    target, moves = shrink(Placement.linear(8, 4, 4), [0, 3])
    assert moves == [Move(2, 1, 0, 0, 2), Move(3, 1, 1, 3, 2), Move(4, 2, 0, 0, 3), Move(5, 2, 1, 3, 3)]
    assert target.active == {0: {0: 0, 1: 1, 2: 2, 3: 4}, 3: {0: 6, 1: 7, 2: 3, 3: 5}}


def test_a_clone_is_independent() -> None:
    base = Placement.linear(4, 2, 4)
    other = base.clone()
    other.active[0][0], other.copies[1] = 3, {}
    assert base == Placement.linear(4, 2, 4)


def test_resident_copies_are_used_again_and_forgotten_when_told() -> None:
    walk = Walk(4, 16, 1)
    assert len(walk.shrink([1, 3])) == 8
    walk.full()
    assert walk.shrink([1, 3]) == [], "both still hold what they got the first time"
    walk.full()
    walk.now.forget_spares()
    assert len(walk.shrink([1, 3])) == 8, "new weights: spare copies are stale"
    walk.full()
    walk.now.forget([3])
    assert walk.now.copies[3] == {}
    with pytest.raises(ProtocolError, match="row 0 of rank 3 does not hold expert 12"):
        walk.now.check()


def test_topology_restore_then_refill_wakes_the_sleepers() -> None:
    walk = Walk(4, 8, 1)
    walk.shrink([2])
    held = walk.now.clone()
    held.forget([0, 1, 3])
    target, moves = restore(held, walk.base, [2])
    assert moves == []
    assert target.active == walk.base.active
    assert target.copies[0] == {}
    awake, moves = refill(target, walk.base, [0, 1, 3])
    assert {move.source for move in moves} == {2}
    walk.apply(moves)
    walk.now, walk.members = awake, [0, 1, 2, 3]
    walk.verify(walk.members)
    walk.now.check()
    assert target.copies[0] == {}, "the old placement is left alone"


def test_refill_without_any_holder_says_what_to_do() -> None:
    walk = Walk(4, 8, 1)
    walk.shrink([0, 2])
    held = walk.now.clone()
    held.forget([1, 3])
    target, _ = restore(held, walk.base, [0, 2])
    target.forget_spares()
    with pytest.raises(ProtocolError, match="no awake rank holds expert 2: load weights instead of waking"):
        refill(target, walk.base, [1, 3])


def test_divisibility_and_capacity() -> None:
    with pytest.raises(ProtocolError, match="10 experts do not divide over 4 ranks"):
        Placement.linear(10, 4, 4)
    with pytest.raises(ProtocolError, match="1 rows cannot hold 2 experts"):
        Placement.linear(8, 4, 1)
    base = Placement.linear(8, 4, 4)
    with pytest.raises(ProtocolError, match="8 experts do not divide over 3 ranks"):
        shrink(base, [0, 1, 3])
    with pytest.raises(ProtocolError, match="8 rows are needed on a rank, 4 exist"):
        shrink(base, [0])
    with pytest.raises(ProtocolError, match="more active rows than the smaller world"):
        shrink(Placement(4, 4, {0: {3: 0}, 1: {0: 1, 1: 2, 2: 3}}, {0: {3: 0}, 1: {0: 1, 1: 2, 2: 3}}), [0, 1])


@pytest.mark.parametrize(
    ("active", "copies", "says"),
    [
        ({0: {0: 0}, 1: {0: 0}}, {0: {0: 0}, 1: {0: 0}}, "expert 0 is active on ranks 0 and 1"),
        ({0: {0: 0}}, {0: {0: 0}}, "only 1 of 2 experts are reachable"),
        ({0: {0: 0}, 1: {0: 1}}, {0: {0: 0}, 1: {0: 0}}, "row 0 of rank 1 does not hold expert 1"),
    ],
)
def test_check_finds_what_is_wrong(active: Rows, copies: Rows, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        Placement(2, 2, active, copies).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("busy", "size", "order", "kept"),
    [
        ([], 2, [0, 1, 2, 3], [2, 3]),
        ([], 2, [3, 2, 1, 0], [0, 1]),
        ([0], 2, [1, 3, 2, 0], [0, 2]),
        ([2], 2, [0, 3, 1, 2], [1, 2]),
        ([1, 2], 2, [1, 2, 0, 3], [1, 2]),
        ([3], 3, [2, 0, 1, 3], [0, 1, 3]),
    ],
)
def test_equal_costs_follow_rank_order(busy: list[int], size: int, order: list[int], kept: list[int]) -> None:
    idle = [rank for rank in range(4) if rank not in busy]
    assert choose_survivors(Placement.linear(12, 4, 12), busy, idle, size, order) == kept


def test_a_spare_copy_outweighs_rank_order() -> None:
    walk = Walk(4, 16, 1)
    walk.shrink([0, 1])
    walk.full()
    assert choose_survivors(walk.now, [1], [0, 2, 3], 2, [0, 1, 2, 3]) == [0, 1]
    assert choose_survivors(walk.now, [2], [0, 1, 3], 2, [0, 1, 2, 3]) != [2, 3]


def test_overlapping_copies_do_not_fool_the_choice() -> None:
    """Rank 1 adds most at first, but ranks 2 and 3 together cover more."""
    held = {0: [0, 1], 1: [2, 3, 4, 5], 2: [6, 2, 3, 7], 3: [4, 5, 8, 9]}
    copies = {rank: dict(enumerate(own)) for rank, own in held.items()}
    placement = Placement(12, 12, {}, copies)
    kept = choose_survivors(placement, [0], [1, 2, 3], 3, [3, 2, 1, 0])
    assert kept == [0, 2, 3]
    assert cost(placement, kept) == 2


def test_ranks_with_more_copies_are_kept_in_a_large_world() -> None:
    base = Placement.linear(128, 64, 128)
    rich = {rank: rank - 1 for rank in range(1, 32, 2)}
    for rank, owner in rich.items():
        base.copies[rank] |= {row + 2: expert for row, expert in base.active[owner].items()}
    kept = choose_survivors(base, [], list(range(64)), 32, list(range(64)))
    assert set(rich) <= set(kept)


def test_rows_beyond_the_smaller_world_do_not_count() -> None:
    """Copies from a deeper stage lie in rows that a shallower world does not use."""
    walk = Walk(4, 16, 1)
    walk.shrink([0])
    walk.full()
    survivors = choose_survivors(walk.now, [0], [1, 2, 3], 2, [3, 2, 1, 0])
    assert cost(walk.now, survivors) == min(cost(walk.now, [0, rank]) for rank in (1, 2, 3))


def test_survivors_that_cannot_be_chosen() -> None:
    base = Placement.linear(8, 4, 8)
    for busy, idle, size in (([0, 1, 2], [3], 2), ([0], [1], 4)):
        with pytest.raises(ProtocolError, match=f"cannot form a world of {size}"):
            choose_survivors(base, busy, idle, size, [0, 1, 2, 3])


def test_a_large_world_is_chosen_quickly() -> None:
    base = Placement.linear(256, 64, 256)
    kept = choose_survivors(base, [5], [r for r in range(64) if r != 5], 32, list(range(64)))
    assert kept == [5, *range(33, 64)]
    assert math.comb(63, 31) > 10**17, "far too many sets to try them all"
