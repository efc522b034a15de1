"""Pooling by seed, means, gains, intervals and the further figures."""

from __future__ import annotations

import pytest
from ledger_logs import ev, leave, ledger, one_step, window

from flexfloor.events import Event
from flexfloor.ledger.aggregate import compare
from flexfloor.ledger.bounds import Bounds, gain
from flexfloor.ledger.figures import step_figures
from flexfloor.ledger.paired import paired_difference, student_t
from flexfloor.ledger.records import kept_tokens
from flexfloor.ledger.reuse import step_reuse
from flexfloor.ledger.transitions import step_transitions

# Two-sided 95 % quantiles as the usual tables print them.
STUDENT = {1: 12.7062, 2: 4.30265, 3: 3.18245, 4: 2.77645, 9: 2.26216, 10: 2.22814, 30: 2.04227, 1000: 1.96234}


def three_seeds(scale: float = 1.0) -> list[Event]:
    """Seeds 0, 2, 3; two steps each of unequal length and work."""
    log: list[Event] = []
    for seed, tokens in ((0, 1000), (2, 1300), (3, 900)):
        log += window(end=10 * scale, tokens=tokens, seed=seed, step=0)
        log += window(start=500, end=500 + 40 * scale, tokens=5 * tokens, seed=seed, step=1)
    return log


@pytest.mark.parametrize(("degrees", "quantile"), STUDENT.items())
def test_student_t(degrees: int, quantile: float) -> None:
    assert student_t(0.975, degrees) == pytest.approx(quantile, abs=1e-5)


def test_paired_interval_by_hand() -> None:
    found = paired_difference([10, 12, 17], [8, 9, 11])
    half = 4.302653 * (13 / 3) ** 0.5 / 3**0.5
    assert (found.seeds, found.mean) == (3, pytest.approx(11 / 3))
    assert (found.low, found.high) == (pytest.approx(11 / 3 - half), pytest.approx(11 / 3 + half))
    assert paired_difference([1], [2]).low is None


def test_work_and_time_are_pooled_before_the_ratio() -> None:
    totals = ledger(three_seeds()).totals
    assert [seed.throughput for seed in totals.seeds] == [pytest.approx(6 * w / 50) for w in (1000, 1300, 900)]
    assert totals.throughput == pytest.approx((120 + 156 + 108) / 3)
    assert totals.throughput != pytest.approx((100 + 125) / 2 * 3200 / 3000)
    assert totals.efficiency.mid == pytest.approx(128 / 4)
    assert totals.throughput_sd == pytest.approx(((8**2 + 28**2 + 20**2) / 2) ** 0.5)


def test_cost_is_the_mean_of_costs() -> None:
    totals = ledger(three_seeds()).totals
    assert totals.cost is not None
    assert totals.cost.mid == pytest.approx(sum(200 / (6 * w) for w in (1000, 1300, 900)) / 3)
    assert totals.cost.mid != pytest.approx(1 / totals.efficiency.mid, rel=1e-3)


def test_gains_are_ratios_of_means() -> None:
    gains = compare(ledger(three_seeds()).totals, ledger(three_seeds(2.0)).totals)
    assert gains.throughput == pytest.approx(1.0)
    assert gains.efficiency.lo == pytest.approx(1.0)
    assert gains.problems == []
    assert gains.paired["window_seconds"].mean == -50


def test_gain_bounds_take_the_outer_corners() -> None:
    assert gain(Bounds(30, 33), Bounds(20, 22)) == Bounds(30 / 22 - 1, 33 / 20 - 1)


def test_unequal_work_is_a_problem() -> None:
    gains = compare(ledger(window(tokens=7000)).totals, ledger(window(tokens=7100)).totals)
    assert gains.problems == ["matched_work: seed 0: 7000 response tokens against 7100 of the baseline (-1.41%)"]
    lone = compare(ledger(window(seed=1)).totals, ledger(window(seed=2)).totals)
    assert len(lone.problems) == 2


@pytest.mark.parametrize(
    ("mask", "cap", "eos", "kept"),
    [
        (101, 100, True, 100),
        (101, 100, False, 101),
        (100, 100, True, 100),
        (50, 100, True, 50),
        (1001, 1000, True, 1001),
    ],
)
def test_one_padding_eos_beyond_a_short_cap_is_no_work(mask: int, cap: int, eos: bool, kept: int) -> None:
    assert kept_tokens(mask, cap=cap, limit=1000, ends_with_eos=eos) == kept
    assert kept_tokens(mask, cap=None, limit=1000, ends_with_eos=eos) == mask


def test_waiting_and_exit_proxy() -> None:
    log = [*window(), *(ev(t, "local_complete", rank) for rank, t in enumerate((80, 30, 60, 20)))]
    log += [ev(35, "detach_start", 1), *leave(1, 38, 40, 90), ev(85, "generation_end")]
    figures = step_figures(one_step(log))
    assert figures.waiting == (85 - 80) + (35 - 30) + (85 - 60) + (85 - 20)
    assert figures.exit_proxy == 85 - 35
    assert step_figures(one_step([e for e in log if e.event != "generation_end"])).waiting is None
    assert step_figures(one_step(window())).exit_proxy is None


def test_abandoned_detach_is_no_exit() -> None:
    log = [*window(), ev(20, "local_complete", 1), ev(30, "detach_start", 1), ev(85, "generation_end")]
    assert step_figures(one_step(log)).waiting == 65
    assert step_figures(one_step(log)).exit_proxy is None
    again = step_figures(one_step([*log, ev(50, "detach_start", 1), *leave(1, 52, 53, 90)]))
    assert (again.waiting, again.exit_proxy) == (30, 35)


def test_transition_is_told_once_with_its_bytes() -> None:
    parts = {"stage": 1, "from_": 4, "to": 2, "survivors": [0, 2]}
    log = [*window(), ev(38, "stage_commit", 0, move=0.5, agree=0.1, moved_bytes=100, **parts)]
    log += [ev(38.1, "stage_commit", 2, move=0.7, moved_bytes=50, **parts)]
    log += [ev(60, "stage_commit", 0, stage=2, from_=2, to=1, survivors=[2])]
    log += [*leave(1, 40, 41), *leave(3, 40, 41), *leave(0, 61, 62)]
    for index, event in enumerate(log):
        if event.event == "sleep_end":
            log[index] = ev(event.t, "sleep_end", event.rank, released_bytes=10 + (event.rank or 0))
    first, second = step_transitions(one_step(log))
    assert (first.seconds, first.total_seconds) == ({"move": 0.7, "agree": 0.1}, pytest.approx(0.8))
    assert (first.moved_bytes, first.released_bytes, second.moved_bytes, second.released_bytes) == (150, 24, None, 10)
    assert [key.rank for key in first.leavers] == [1, 3]


def two_workers() -> list[Event]:
    """Seed section I with numbers: workers of 4 ranks complete at 61 and 91, two ranks of each leave at 40."""
    log = window(world=8)
    for replica, done in ((0, 60), (1, 90)):
        log += [e for rank in (0, 1) for e in leave(rank, 36, 40, 95, replica=replica)]
        log += [ev(done + 1, "sleep_end", rank, replica=replica) for rank in (2, 3)]
        log.append(ev(done, "generation_end", replica=replica))
    return log


def test_worker_level_and_within_worker_time_stay_apart() -> None:
    reuse = step_reuse(one_step(two_workers()))
    assert reuse is not None
    assert reuse.inter == Bounds(4 * 30, 4 * 30)
    assert reuse.intra == Bounds(2 * 21 + 2 * 51, 2 * 21 + 2 * 51)


def test_worker_without_logged_sleep_ends_with_its_generation() -> None:
    quiet = [e for e in two_workers() if e.event != "sleep_end" or e.rank in (0, 1)]
    reuse = step_reuse(one_step(quiet))
    assert reuse is not None
    assert (reuse.inter.lo, reuse.intra.lo) == (120, 2 * 20 + 2 * 50)


def test_reuse_bounds_hold_the_clock() -> None:
    log = [
        ev(e.t, e.event, e.rank, 1.0 if e.event == "sleep_end" else 0.0, replica=e.replica, **e.fields)
        for e in two_workers()
    ]
    reuse = step_reuse(one_step(log))
    assert reuse is not None
    assert (reuse.inter, reuse.intra) == (Bounds(4 * 29, 4 * 31), Bounds(2 * 20 + 2 * 50, 2 * 22 + 2 * 52))


def test_one_replica_has_no_worker_level_time() -> None:
    assert step_reuse(one_step(window())) is None
