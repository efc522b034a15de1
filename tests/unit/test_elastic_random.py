"""Random rollouts: whatever is drawn, every request finishes with its own tokens and every invariant holds."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from elastic_sim import Ask, Call, Engine, Script, Sim
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from flexfloor.elastic.decision import MAX_ATTEMPTS
from flexfloor.elastic.states import RESTORE_PHASES, SHRINK_PHASES


@dataclass(frozen=True)
class Drawn:
    """One test: a world and the rollouts it goes through."""

    size: int
    experts: int
    floor: int
    seed: int
    polls: int
    faults: tuple[str, ...]
    scripts: tuple[Script, ...]
    buckets: tuple[int, ...]


def wish(engine: Engine) -> None:
    engine.session.request_restore()


def pause(engine: Engine) -> None:
    engine.pause = True


def close(engine: Engine) -> None:
    engine.session.trajectories.close()


@st.composite
def scripts(draw: st.DrawFn, size: int, experts: int, floor: int) -> Script:
    sizes = [s for s in range(floor, size) if experts % s == 0]
    fewest = draw(st.sampled_from([0, 1, 1, 1]))
    ladder = (size, *sorted(draw(st.sets(st.sampled_from(sizes), min_size=fewest, max_size=4)), reverse=True))
    gate = draw(st.booleans())
    length = st.one_of(st.integers(1, 3), st.integers(1, 3), st.integers(6, 18))
    asks: list[Ask] = []
    calls: list[Call] = []
    for rank in range(size):
        for index in range(draw(st.sampled_from([0, 1, 1, 2]))):
            at = draw(st.sampled_from([0, 0, 0, 0, 0, 0, 2, 5]))
            abort = draw(st.sampled_from([-1, -1, -1, -1, at + 3]))
            asks.append(Ask(f"r{rank}.{index}", rank, draw(length), at, abort_at=abort))
        if draw(st.integers(0, 8)) == 0:
            asks.append(Ask(f"turn{rank}.1", rank, draw(st.integers(1, 3)), 0, trajectory=f"turns{rank}", more=True))
            asks.append(Ask(f"turn{rank}.2", rank, draw(length), 7, trajectory=f"turns{rank}"))
        if draw(st.integers(0, 5)) == 0:
            calls.append((draw(st.integers(1, 16)), rank, wish))
    if not any(ask.at == 0 for ask in asks):
        asks.append(Ask("first", draw(st.integers(0, size - 1)), draw(length)))
    auto_close = draw(st.booleans())
    for index in range(draw(st.integers(0, 2))):
        late = draw(st.integers(3, 18))
        asks.append(Ask(f"late{index}", draw(st.integers(0, size - 1)), draw(length), late, extra=True))
    if draw(st.integers(0, 4)) == 0:
        calls += [(draw(st.integers(1, 12)), rank, pause) for rank in range(size)]
    if not auto_close:
        calls += [(draw(st.integers(12, 20)), rank, close) for rank in range(size)]
    order = tuple(draw(st.permutations(range(size))))
    predicted = draw(chains(size, ladder)) if draw(st.integers(0, 2)) == 0 else ()
    return Script(
        tuple(asks), ladder, rank_order=order, gate=gate, auto_close=auto_close, calls=tuple(calls), predicted=predicted
    )


@st.composite
def chains(draw: st.DrawFn, size: int, ladder: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Survivors of each stage, each set within the one before."""
    left, sets = list(range(size)), []
    for smaller in ladder[1:]:
        left = sorted(draw(st.permutations(left))[:smaller])
        sets.append(tuple(left))
    return tuple(sets)


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    size = draw(st.sampled_from([2, 3, 4, 4, 6, 8]))
    experts = size * draw(st.integers(1, 2))
    floor = draw(st.sampled_from([s for s in range(1, size) if experts % s == 0]))
    rank, nth = st.integers(0, size - 1), st.integers(1, 3)
    shrinks = st.tuples(st.sampled_from(SHRINK_PHASES), rank, nth)
    restores = st.tuples(st.sampled_from(RESTORE_PHASES), rank, nth)  # fewer than give a restore up
    struck = draw(st.lists(shrinks, max_size=4)) + draw(st.lists(restores, max_size=MAX_ATTEMPTS - 1))
    faults = tuple(f"{phase.label}:{r}:raise:{n}" for phase, r, n in struck)
    rollouts = tuple(draw(st.lists(scripts(size, experts, floor), min_size=1, max_size=2)))
    buckets = draw(st.sampled_from([(), (1, 2, 4)]))
    return Drawn(size, experts, floor, draw(st.integers(0, 9999)), draw(st.integers(0, 6)), faults, rollouts, buckets)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(drawn())
def test_random_rollouts(case: Drawn) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sim = Sim(
            Path(folder),
            case.size,
            case.experts,
            case.floor,
            faults=case.faults,
            seed=case.seed,
            polls=case.polls,
            buckets=case.buckets,
        )
        for script in case.scripts:
            before = len(sim.commits())
            sim.rollout(script)
            assert all(engine.session.step is None for engine in sim.ranks), "the step is over everywhere"
            event(f"transitions in a rollout: {min(len(sim.commits()) - before, 4)}")
        failed = {(e.rank, e.fields["where"]) for e in sim.named("fault") if "injected" in e.fields["what"]}
        assert failed <= {(int(fault.split(":")[1]), fault.split(":")[0]) for fault in case.faults}
        event(f"faults that struck: {min(len(failed), 3)}")
        skipped = [e.fields["stage"] for e in sim.named("plan_skipped")]
        assert bool(skipped) == bool(failed)
        starts, ends = len(sim.named("restore_start")), len(sim.named("restore_end"))
        assert starts - ends == case.size * skipped.count(case.size), "abandoned restores are the only open ones"
        sleeps = len(sim.named("sleep_end"))
        assert sleeps == len(sim.named("sleep_start"))
        assert len(sim.named("detach_end")) == sum(before - after for before, after, _ in sim.commits())
