"""The decision of a sync point, as a function of the rows alone; and the counts that feed it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexfloor.elastic.decision import MAX_ATTEMPTS, Action, World, complete, decide, gate_opens
from flexfloor.elastic.step import check_ladder
from flexfloor.elastic.trajectories import Trajectories
from flexfloor.elastic.vector import Row, decode, digest_number, encode
from flexfloor.errors import ProtocolError, RefusedError

DONE = Row(digest=9, received=4, expected=4, closed=1)
BUSY = DONE._replace(unfinished=2)
MISSING = DONE._replace(received=3)
OPEN = DONE._replace(open=1)


def armed(size: int, ladder: list[int], members: list[int] | None = None, **fields: int) -> World:
    return World(size, members or list(range(size)), ladder, armed=True, **fields)


def rows(size: int, busy: list[int], other: Row = DONE, working: Row = BUSY) -> list[Row]:
    return [working if rank in busy else other for rank in range(size)]


@pytest.mark.parametrize(
    ("busy", "target"),
    [([0, 1, 2], None), ([3, 5, 9, 11, 12], 8), ([3, 5, 9, 11], 4), ([2, 9], 2), ([15], 2), (list(range(9)), None)],
)
def test_goes_to_the_deepest_size_whose_quorum_is_complete(busy: list[int], target: int | None) -> None:
    size = 4 if target is None and len(busy) == 3 else 16
    ladder = [4, 2] if size == 4 else [16, 8, 4, 2]
    decision = decide(armed(size, ladder), rows(size, busy))
    assert decision.running
    if target is None:
        assert decision.action is Action.RUN
    else:
        assert (decision.action, decision.target) == (Action.SHRINK, target)
        assert decision.busy == tuple(busy)
        assert decision.idle == tuple(r for r in range(size) if r not in busy)


@pytest.mark.parametrize("holding", [MISSING, OPEN, BUSY])
def test_a_rank_that_may_get_work_is_not_complete(holding: Row) -> None:
    assert not complete(holding)
    world = armed(4, [4, 2])
    assert decide(world, rows(4, [1, 2, 3], working=holding)).action is Action.RUN
    assert decide(world, rows(4, [1, 2], working=holding)).target == 2


@given(st.data())
def test_only_completed_members_leave_and_sizes_decrease_along_the_ladder(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([2, 4, 6, 8, 16]))
    ladder = sorted({size, *data.draw(st.sets(st.integers(1, size)))}, reverse=True)
    members = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1)))
    row = st.builds(
        Row,
        digest=st.just(9),
        unfinished=st.integers(0, 1),
        received=st.integers(2, 3),
        expected=st.just(3),
        open=st.integers(0, 1),
        closed=st.integers(0, 1),
        want_restore=st.sampled_from([0, 0, 0, 1]),
        pause=st.sampled_from([0, 0, 0, 1]),
    )
    all_rows = data.draw(st.lists(st.one_of(st.just(DONE), row), min_size=size, max_size=size))
    attempts = data.draw(st.dictionaries(st.sampled_from(ladder), st.integers(0, MAX_ATTEMPTS)))
    world = World(
        size, members, ladder, True, data.draw(st.booleans()), attempts, 5, data.draw(st.sampled_from([0, 9]))
    )
    decision = decide(world, all_rows)
    parked = [rank for rank in range(size) if rank not in members]
    working = [rank for rank in members if not complete(all_rows[rank])]
    fits = [s for s in ladder if max(1, len(working)) <= s < len(members) and attempts.get(s, 0) < MAX_ATTEMPTS]
    asked = any(all_rows[r].want_restore for r in range(size))
    may_shrink = not (world.gate or world.retry_at or asked)
    late = any(all_rows[r].unfinished for r in parked)
    if all(complete(r) and r.closed for r in all_rows):
        assert decision.action is Action.FINISH
    elif any(r.pause for r in all_rows):
        assert decision.action is Action.RUN
    elif parked and (late or asked):
        assert decision.action is Action.RESTORE
    elif fits and working and may_shrink:
        assert decision.action is Action.SHRINK
        assert decision.target == min(fits)
        assert list(decision.busy) == working
        assert sorted(decision.busy + decision.idle) == members
    else:
        assert decision.action is Action.RUN
        assert decision.running or all(r.pause for r in all_rows)


def test_nothing_is_decided_before_all_digests_agree() -> None:
    world = World(4, list(range(4)))
    for other in (0, 8):
        mixed = [BUSY, *rows(3, [])[1:], DONE._replace(digest=other), DONE]
        assert decide(world, mixed).action is Action.RUN
    assert decide(world, [DONE, DONE, DONE, DONE._replace(digest=0)]).action is Action.STOP
    assert decide(world, rows(4, [0])).action is Action.ARM
    assert decide(world, rows(4, [])).action is Action.ARM, "an installed step is armed however idle"


def test_gate_opens_when_everything_expected_has_arrived_everywhere() -> None:
    world = armed(4, [4, 2], gate=True)
    assert not gate_opens(world, [DONE, DONE, MISSING, DONE])
    assert gate_opens(world, [DONE, BUSY, DONE, DONE])
    assert not gate_opens(World(4, [0]), rows(4, []))
    assert decide(world, rows(4, [0])).action is Action.RUN, "no exit while the gate is shut"


def test_empty_but_open_keeps_running() -> None:
    still = [DONE._replace(closed=0), DONE, DONE, DONE]
    assert decide(armed(4, [4, 2]), still).action is Action.RUN
    assert decide(armed(4, [4, 2]), still).running
    assert decide(armed(4, [4, 2], [1]), rows(4, [2], working=MISSING)).running, "a parked rank was promised more"
    assert decide(armed(4, [4, 2]), rows(4, [])).action is Action.FINISH


def test_a_parked_rank_with_work_or_any_wish_restores() -> None:
    world = armed(4, [4, 2], [1, 3])
    late = decide(world, rows(4, [2, 3]))
    assert (late.action, late.rank) == (Action.RESTORE, 2)
    for rank in range(4):
        wish = rows(4, [3])
        wish[rank] = wish[rank]._replace(want_restore=1)
        assert (decide(world, wish).action, decide(world, wish).rank) == (Action.RESTORE, rank)


def test_no_exit_against_a_wish_for_the_full_world() -> None:
    wish = rows(4, [3])
    wish[0] = wish[0]._replace(want_restore=1)
    assert decide(armed(4, [4, 2]), wish).action is Action.RUN


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=8), st.booleans())
def test_pause_and_running_as_in_vllm(state: list[tuple[int, bool]], plan: bool) -> None:
    """ParallelConfig.sync_dp_state: running = any unfinished or 0 < pausing < N; paused = all pausing."""
    size = len(state)
    own = [Row(digest=9 * plan, unfinished=u, received=1, expected=1, pause=int(p)) for u, p in state]
    pausing = sum(p for _, p in state)
    world = armed(size, [size], list(range(size))) if plan else World(size, list(range(size)))
    decision = decide(world, own)
    assert decision.paused == (pausing == size)
    if plan and pausing < size:
        assert decision.running, "an open step keeps the wave alive"
    else:
        assert decision.running == (any(u for u, _ in state) or pausing % size != 0)
    if pausing:
        assert decision.action in (Action.RUN, Action.STOP), "no transition while a pause is pending"


def test_failed_sizes_wait_and_are_given_up_after_three_attempts() -> None:
    world = armed(16, [16, 8, 4], attempts={4: MAX_ATTEMPTS - 1}, syncs=7, retry_at=8)
    assert decide(world, rows(16, [1])).action is Action.RUN
    world.syncs = 8
    assert decide(world, rows(16, [1])).target == 4
    world.attempts[4] = MAX_ATTEMPTS
    assert decide(world, rows(16, [1])).target == 8
    world.attempts[8] = MAX_ATTEMPTS
    assert decide(world, rows(16, [1])).action is Action.RUN


@given(st.integers(1, 16).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, 2**61), min_size=12 * n))))
def test_the_vector_gives_every_rank_all_rows(drawn: tuple[int, list[int]]) -> None:
    size, numbers = drawn
    width = len(Row._fields)
    own = [Row(*numbers[rank * width : (rank + 1) * width]) for rank in range(size)]
    flat = [sum(column) for column in zip(*(encode(row, r, size) for r, row in enumerate(own)), strict=True)]
    assert decode(flat, size) == own


def test_digest_numbers_fit_a_summed_64_bit_integer_and_are_never_zero() -> None:
    assert digest_number("0" * 64) == 1
    assert 0 < digest_number("f" * 64) < 2**62
    assert digest_number("1" * 64) != digest_number("2" * 64)


def test_trajectories_count_once_stay_open_and_close() -> None:
    counts = Trajectories()
    counts.begin(2, closed=False)
    counts.arrive("a", more=True)
    counts.arrive("a", more=True)
    counts.arrive("b")
    assert (counts.received, counts.expected, counts.open, counts.closed) == (2, 2, 1, False)
    counts.arrive("a")
    assert counts.open == 0, "the last turn closes it"
    counts.arrive("b", more=True)
    counts.close_trajectory("b")
    counts.close()
    assert (counts.open, counts.closed) == (0, True)
    with pytest.raises(ProtocolError, match="never received"):
        counts.close_trajectory("c")
    counts.begin(5, closed=True)
    assert (counts.received, counts.expected, counts.open) == (0, 5, 0)
    with pytest.raises(ProtocolError, match="cannot expect -1"):
        counts.begin(-1, closed=True)


@pytest.mark.parametrize("first", ["arrive", "revise"])
def test_an_extra_trajectory_and_its_revision_come_in_any_order(first: str) -> None:
    counts = Trajectories()
    counts.begin(1, closed=True)
    counts.arrive("a")
    if first == "revise":
        counts.revise(1)
    counts.arrive("extra")
    if first == "arrive":
        counts.revise(1)
    assert (counts.received, counts.expected) == (2, 2)


def test_revise_takes_back_what_will_not_come() -> None:
    counts = Trajectories()
    counts.begin(3, closed=True)
    counts.arrive("a")
    counts.revise(-2)
    assert (counts.received, counts.expected) == (1, 1)
    with pytest.raises(ProtocolError, match="cannot revise by -2"):
        counts.revise(-2)


@pytest.mark.parametrize(
    ("ladder", "says"),
    [
        ((), "does not decrease"),
        ((4, 4), "does not decrease"),
        ((2, 4), "does not decrease"),
        ((8, 4), "does not decrease"),
        ((4, 2, 0), "does not decrease"),
        ((4, 3), "EP size 3 does not divide 16 experts"),
        ((4, 2, 1), "EP size 1 needs 16 expert rows a rank, 8 were allocated"),
    ],
)
def test_a_ladder_that_cannot_run_is_refused_with_the_remedy(ladder: tuple[int, ...], says: str) -> None:
    with pytest.raises(RefusedError, match=says) as refused:
        check_ladder(ladder, 4, 16, 8)
    assert refused.value.remedy in str(refused.value)


def test_a_ladder_that_can_run_is_accepted() -> None:
    check_ladder((4, 2), 4, 16, 8)
    check_ladder((4,), 4, 16, 4)
