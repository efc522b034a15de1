"""Occupied rank-time: the worked case, credit that must not be given, and properties over random logs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_logs import ev, leave, ledger, one_step, window, worked

from flexfloor.events import Event
from flexfloor.ledger.bounds import Bounds, gain
from flexfloor.ledger.occupancy import StepOccupancy
from flexfloor.ledger.windows import RankKey

NOISE = 1e-6


def free(step: StepOccupancy, rank: int) -> Bounds:
    return step.ranks[RankKey(None, rank)].free


def near(bounds: Bounds) -> list[object]:
    return [pytest.approx(end, abs=1e-9) for end in bounds.as_list()]


# -- the worked case ---------------------------------------------------------------------------------------------------


def test_worked_case() -> None:
    step = one_step(worked())
    cycle = step.ranks[RankKey(None, 1)].cycles[0]
    assert cycle.release == Bounds(42, 43)
    assert near(cycle.reacquired or Bounds(0, 0)) == [91.9, 93.0]
    assert near(free(step, 1)) == [48.9, 51.0]
    assert near(free(step, 3)) == [29, 29]
    assert near(step.occupied) == [320, 322.1]
    assert step.occupied.text(2) == "[320.00, 322.10]"
    assert step.occupied.text(1) == "[320.0, 322.1]"


def test_worked_case_metrics() -> None:
    totals = ledger(worked()).totals
    assert totals.throughput == 70
    assert near(totals.efficiency) == [7000 / 322.1, 7000 / 320]
    assert totals.efficiency.text(2) == "[21.73, 21.88]"
    assert totals.efficiency.text(4) == "[21.7323, 21.8750]"


@pytest.mark.parametrize(
    ("bounds", "digits", "text"),
    [
        (Bounds(1.001, 1.001), 2, "[1.00, 1.01]"),
        (Bounds(-1.001, -0.001), 2, "[-1.01, 0.00]"),
        (Bounds(2.0, 2.0), 2, "[2.00, 2.00]"),
        (Bounds(0.1 + 0.2, 0.1 + 0.2), 1, "[0.3, 0.3]"),
        (Bounds(66435.52, 66435.52), 1, "[66,435.5, 66,435.6]"),
    ],
)
def test_printed_bounds_round_outward(bounds: Bounds, digits: int, text: str) -> None:
    assert bounds.text(digits).replace("-0.00", "0.00") == text


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6), st.integers(0, 4))
def test_outward_rounding_leaves_nothing_out(low: float, width: float, digits: int) -> None:
    out = Bounds(low, low + width).outward(digits)
    assert out.lo <= low + NOISE
    assert out.hi >= low + width - NOISE
    assert out.lo > low - 1.001 * 10.0**-digits
    assert out.hi < low + width + 1.001 * 10.0**-digits


# -- credit that must not be given -------------------------------------------------------------------------------------


def test_detach_alone_is_never_free() -> None:
    step = one_step([*window(), ev(40, "detach_end", 1), ev(90, "restore_start", 1)])
    assert step.occupied == Bounds(400, 400)


def test_sleep_alone_is_never_free() -> None:
    step = one_step([*window(), ev(40, "sleep_end", 1), ev(90, "wake_start", 1)])
    assert step.occupied == Bounds(400, 400)


def test_detach_alone_would_be_wrong_in_the_worked_case() -> None:
    assert free(one_step(worked()), 1).hi < 93.0 - 40


def test_release_waits_for_the_later_of_detach_and_sleep() -> None:
    assert free(one_step([*window(), *leave(1, 50, 45, 90)]), 1) == Bounds(40, 40)


def test_every_tag_must_sleep() -> None:
    log = [*window(), ev(40, "detach_end", 1), ev(41, "sleep_end", 1, tag="kv"), ev(55, "sleep_end", 1, tag="weights")]
    assert free(one_step(log), 1) == Bounds(45, 45)


def test_sleeping_again_while_asleep_changes_nothing() -> None:
    assert (
        free(one_step([*window(), *leave(1, 40, 41), ev(80, "sleep_end", 1), ev(90, "restore_start", 1)]), 1).lo == 49
    )


def test_sleep_after_the_return_began_is_not_free() -> None:
    log = [*window(), ev(40, "detach_end", 1), ev(50, "restore_start", 1), ev(60, "sleep_end", 1)]
    assert one_step(log).occupied == Bounds(400, 400)


def test_earliest_of_restore_and_wake_closes() -> None:
    log = [*window(), *leave(1, 40, 42, 90), ev(80, "wake_start", 1, res=2.0)]
    assert free(one_step(log), 1) == Bounds(38, 40)


def test_explicit_start_and_duration_give_the_earlier_of_both() -> None:
    log = [*window(), *leave(1, 40, 42), ev(91, "restore_start", 1, res=1.0)]
    log += [ev(95, "restore_end", 1, res=1.0, duration=3.5, duration_res=0.5)]
    assert free(one_step(log), 1) == Bounds(91 - 42, 92 - 42)
    log[-1] = ev(95, "restore_end", 1, res=1.0, duration=5.0, duration_res=0.5)
    assert free(one_step(log), 1) == Bounds(89.5 - 42, 91.0 - 42)


def test_restore_of_unknown_start_may_have_begun_at_once() -> None:
    assert free(one_step([*window(), *leave(1, 40, 42), ev(95, "restore_end", 1)]), 1) == Bounds(0, 53)


def test_second_detach_without_return_leaves_the_first_interval_open_to_doubt() -> None:
    log = [*window(), *leave(1, 20, 22), *leave(1, 60, 62, 90)]
    assert free(one_step(log), 1) == Bounds(28, 28 + 38)


def test_intervals_add_up_and_overlaps_count_once() -> None:
    assert free(one_step([*window(), *leave(1, 10, 12, 30), *leave(1, 50, 52, 90)]), 1) == Bounds(18 + 38, 18 + 38)
    log = [*window(), *leave(1, 10, 12), ev(29, "restore_end", 1, res=4.0, duration=1.0)]
    log += [ev(31, "detach_end", 1), ev(31, "sleep_end", 1), ev(90, "restore_start", 1)]
    assert free(one_step(log), 1) == Bounds(16 + 59, 90 - 12)


def test_interval_is_clipped_to_the_window() -> None:
    assert free(one_step([*window(), *leave(1, -5, -4, 120)]), 1) == Bounds(100, 100)
    assert free(one_step([*window(), *leave(1, 101, 102, 120)]), 1) == Bounds(0, 0)


def test_no_return_means_free_until_the_end() -> None:
    assert free(one_step([*window(), *leave(1, 40, 42)]), 1) == Bounds(58, 58)


def test_sidecar_time_is_free_for_the_primary() -> None:
    lease = [ev(50, "sidecar_start", 1), ev(80, "sidecar_ack", 1)]
    assert one_step([*worked(), *lease]).occupied == one_step(worked()).occupied


def test_strangers_void_all_credit() -> None:
    assert one_step([*worked(), *leave(7, 10, 11, 90)]).occupied == Bounds(400, 400)


def test_wall_clock_times_do_not_blur_the_bounds() -> None:
    base = 1.8e9
    moved = [replace(event, t=event.t + base) for event in worked()]
    assert one_step(moved).occupied.as_list() == pytest.approx([320, 322.1], abs=1e-5)


def test_order_of_lines_settles_what_a_coarse_clock_leaves_open() -> None:
    true = [("detach_end", 10.0, 0), ("sleep_end", 10, 1), ("restore_start", 10.9, 0), ("detach_end", 10.95, 0)]
    true += [("sleep_end", 10, 1), ("restore_start", 90.0, 0)]
    log = [ev(t, name, 1, res=res, file="f", line=line) for line, (name, t, res) in enumerate(true, start=1)]
    bounds = free(one_step([*window(), *log]), 1)
    assert bounds.lo <= 79.0 <= bounds.hi


# -- properties over random logs ---------------------------------------------------------------------------------------

TICKS = 400  # the true clock, hundredths of a second of one window
RESOLUTIONS = st.sampled_from([0, 1, 5, 25, 100])


@st.composite
def rank_histories(draw: st.DrawFn) -> tuple[list[tuple[str, int, int, int]], int]:
    """Logged (name, tick, res, duration or -1) of one rank in true order, and its true free ticks."""
    cuts = sorted(draw(st.lists(st.integers(1, TICKS - 1), min_size=0, max_size=10, unique=True)))
    events: list[tuple[str, int, int, int]] = []
    away = 0
    for a, b, start, end in zip(*(iter(cuts),) * 4, strict=False):
        first, second = draw(st.permutations(["detach_end", "sleep_end"]))
        events += [(first, a, draw(RESOLUTIONS), -1), (second, b, draw(RESOLUTIONS), -1)]
        told = draw(st.sampled_from(["start", "end", "both", "wake"]))
        if told in ("start", "both"):
            events.append(("restore_start", start, draw(RESOLUTIONS), -1))
        if told == "wake":
            events.append(("wake_start", start, draw(RESOLUTIONS), -1))
        if told in ("end", "both"):
            events.append(("restore_end", end, draw(RESOLUTIONS), end - start))
        away += sum(1 for tick in range(TICKS) if max(a, b) <= tick < start)
    left = cuts[len(cuts) // 4 * 4 :]
    if len(left) >= 2:
        events += [("sleep_end", left[0], draw(RESOLUTIONS), -1), ("detach_end", left[1], draw(RESOLUTIONS), -1)]
        away += sum(1 for tick in range(TICKS) if left[1] <= tick)
    elif left:
        events.append(("detach_end", left[0], draw(RESOLUTIONS), -1))
    return events, away


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Event], float, int]:
    """A log of one step, its true free rank-seconds, its world."""
    world = draw(st.integers(1, 4))
    log = window(end=TICKS / 100, world=world, tokens=draw(st.integers(1, 10**6)))
    away = 0
    for rank in range(world):
        marks, ticks = draw(rank_histories())
        away += ticks
        for line, (name, tick, res, duration) in enumerate(marks, start=1):
            stamp = tick // res * res if res else tick
            fields = {}
            if duration >= 0:
                dres = draw(st.sampled_from([0, 1, 10]))
                told = duration // dres * dres if dres else duration
                fields = {"duration": told / 100, "duration_res": dres / 100}
            log.append(ev(stamp / 100, name, rank, res=res / 100, file=f"rank-{rank}", line=line, **fields))
    return log, away / 100, world


@given(histories())
def test_bounds_bracket_the_integral(case: tuple[list[Event], float, int]) -> None:
    log, away, world = case
    step = one_step(log)
    whole = world * TICKS / 100
    assert step.free.lo - NOISE <= away <= step.free.hi + NOISE
    assert step.occupied.lo - NOISE <= whole - away <= step.occupied.hi + NOISE
    tokens = step.log.response_tokens
    if away < whole:
        efficiency = step.occupied.dividing(tokens)
        assert efficiency.lo * (1 - 1e-9) <= tokens / (whole - away) <= efficiency.hi * (1 + 1e-9) + NOISE


@given(histories())
def test_free_and_occupied_add_up(case: tuple[list[Event], float, int]) -> None:
    log, _, world = case
    step = one_step(log)
    whole = world * TICKS / 100
    assert math.isclose(step.occupied.lo + step.free.hi, whole, abs_tol=NOISE)
    assert math.isclose(step.occupied.hi + step.free.lo, whole, abs_tol=NOISE)
    for rank in step.ranks.values():
        assert 0 <= rank.free.lo <= rank.free.hi + NOISE
        assert rank.free.hi <= TICKS / 100 + NOISE


@given(histories(), st.data())
def test_order_of_events_across_files_is_irrelevant(case: tuple[list[Event], float, int], data: st.DataObject) -> None:
    log, _, _ = case
    names = data.draw(st.permutations("abcde"))
    shuffled = data.draw(st.permutations(log))
    renamed = [replace(event, file=names[-1 if event.rank is None else event.rank]) for event in shuffled]
    assert one_step(renamed).occupied == one_step(log).occupied


@given(histories(), st.data())
def test_exact_clocks_need_no_order_at_all(case: tuple[list[Event], float, int], data: st.DataObject) -> None:
    log, _, _ = case
    exact = [replace(event, res=0.0) for event in log]
    names = data.draw(st.permutations(range(len(exact))))
    scattered = [replace(event, file=f"{name:03}", line=1) for event, name in zip(exact, names, strict=True)]
    marks = {(event.rank, event.t) for event in exact}
    if len(marks) == len(exact):
        assert one_step(scattered).occupied == one_step(exact).occupied


@given(histories(), st.integers(0, 3), st.floats(0, TICKS / 100), st.sampled_from(["restore_start", "wake_start"]))
def test_a_later_restore_never_raises_efficiency(
    case: tuple[list[Event], float, int], rank: int, t: float, name: str
) -> None:
    log, _, world = case
    rank %= world
    own = [event for event in log if event.rank == rank]
    last = max((event.end for event in own), default=0.0)
    more = ev(max(t, last), name, rank, file=f"rank-{rank}", line=len(own) + 1)
    before, after = one_step(log), one_step([*log, more])
    assert after.occupied.lo >= before.occupied.lo - NOISE
    assert after.occupied.hi >= before.occupied.hi - NOISE
    tokens = before.log.response_tokens
    assert after.occupied.dividing(tokens).lo <= before.occupied.dividing(tokens).lo + NOISE


@given(histories())
def test_doubling(case: tuple[list[Event], float, int]) -> None:
    """Twice the time on every clock doubles H; twice the tokens doubles E; two equal steps change neither Q nor E."""
    log, _, _ = case
    step = one_step(log)
    slow = [replace(e, t=2 * e.t, res=2 * e.res, fields=_doubled(e)) for e in log]
    twice = one_step(slow)
    assert twice.occupied.lo == pytest.approx(2 * step.occupied.lo, abs=NOISE)
    assert twice.occupied.hi == pytest.approx(2 * step.occupied.hi, abs=NOISE)
    again = [replace(event, step=1, t=event.t + 50) for event in log]
    once, both = ledger(log).totals, ledger([*log, *again]).totals
    assert both.throughput == pytest.approx(once.throughput)
    assert both.occupied.hi == pytest.approx(2 * once.occupied.hi, abs=NOISE)
    assert gain(both.efficiency, both.efficiency).lo <= 0 <= gain(both.efficiency, both.efficiency).hi


def _doubled(event: Event) -> dict[str, float]:
    return {name: 2 * value if name.startswith("duration") else value for name, value in event.fields.items()}
