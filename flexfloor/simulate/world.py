"""One rollout step of a world: the ranks' iterations in lock step, with the protocol's own decisions in between.

    rollout_start -- start, prepare -- [iterations -- sync point] ... -- restore -- finish -- rollout_end

Every iteration lasts as long as the table says for the largest batch of the world at its EP size; members without
requests run dummy steps, counted and timed. A sync point is looked at where a rank becomes complete: nothing else
changes a decision of `elastic.decision.decide`. (A live rank that ends before its token limits is seen up to
`elastic.cadence.STRIDE` - 1 iterations later.) Survivors and moved rows come from `elastic.placement`. As in the
engine, leavers detach after the survivors' first iteration in the new world, sleep off the loop, wake in time for the
last token where they can, and are back with the full restore when the step is complete.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from flexfloor.elastic import placement as rows_of
from flexfloor.elastic.decision import Action, Decision, World, decide
from flexfloor.elastic.placement import Placement
from flexfloor.elastic.vector import Row
from flexfloor.simulate.batching import run_rank
from flexfloor.simulate.costs import Costs
from flexfloor.simulate.lockstep import Batches, Change, changes_of, sampled
from flexfloor.simulate.records import Mark, StepInput, StepOutcome
from flexfloor.step_times import Curve


@dataclass
class _Pending:
    """A shrink that waits for the survivors' first iteration."""

    leavers: tuple[int, ...]
    commit: dict[str, Any]
    speaker: int
    switched: float


class _Step:
    def __init__(self, given: StepInput, costs: Costs, curves: Mapping[int, Curve]) -> None:
        self.given, self.costs, self.curves = given, costs, curves
        size = len(given.groups)
        self.residency = costs.of(given.residency)
        self.traces = [run_rank(group, given.limits) for group in given.groups]
        self.world = World(size, list(range(size)), list(given.ladder), armed=True)
        self.rows = [
            Row(unfinished=len(group), received=len(group), expected=len(group), closed=1) for group in given.groups
        ]
        self.placement = Placement.linear(given.experts, size, given.capacity)
        self.now = costs.start_s + (self.residency.prepare_s if len(given.ladder) > 1 else 0.0)
        self.clock = 0
        self.busy = sum(bool(group) for group in given.groups)
        self.decode, self.prefill = Batches(size), Batches(size)
        self.by_context = any(len(curve.contexts) > 1 for curve in curves.values())
        self.context = np.zeros(size)
        self.marks: list[Mark] = []
        self.pending: _Pending | None = None
        self.asleep: dict[int, float] = {}
        self.idle_since: dict[int, tuple[int, float]] = {}
        self.dummy: dict[int, tuple[int, float]] = dict.fromkeys(range(size), (0, 0.0))
        self.stepping = 0.0
        self.eager_at: list[int] = []
        self.commits: list[tuple[int, int, tuple[int, ...], int]] = []
        self.extra = 0.0

    # -- time --------------------------------------------------------------------------------

    def run(self) -> StepOutcome:
        given = self.given
        self._mark("rollout_start", None, world_size=len(given.groups), t=0.0)
        for rank, group in enumerate(given.groups):
            self._mark("plan_installed", rank, t=0.0, ladder=list(given.ladder), expected=len(group))
        changes = changes_of(self.traces)
        ends: dict[int, list[int]] = {}
        for rank, trace in enumerate(self.traces):
            ends.setdefault(trace.end, []).append(rank)
        stops = sorted({*changes, *ends})
        self._sync(ends.get(0, []))
        for start, stop in pairwise(stops):
            self._change(changes.get(start, ()))
            self._advance(start, stop)
            self._sync(ends.get(stop, ()))
        return self._outcome()

    def _change(self, changes: Sequence[Change]) -> None:
        for rank, decode, prefill, context, preempted in changes:
            self.decode.put(rank, decode)
            self.prefill.put(rank, prefill)
            self.context[rank] = context
            for at in range(preempted, len(self.traces[rank].preemptions)):
                lost = self.traces[rank].preemptions[at]
                if lost.iteration != self.clock:
                    break
                self._mark("preemption", rank, request=f"{rank}.{lost.request}", recomputed_tokens=lost.tokens)

    def _advance(self, start: int, stop: int) -> None:
        """Iterations ``start`` to ``stop``; the first one alone where a shrink waits for it."""
        if self.pending is not None and stop - start > 1:
            self._iterate(start, 1)
            self._first_step_done()
            start += 1
        self._iterate(start, stop - start)

    def _iterate(self, start: int, count: int) -> None:
        batch, prefill = self.decode.largest(), self.prefill.largest()
        seconds = self._lasting(batch, prefill, count) + self.extra
        self.extra = 0.0
        if prefill:
            self.eager_at.append(start)
        self.now += seconds
        self.stepping += seconds
        self.clock = start + count

    def _lasting(self, batch: int, prefill: int, count: int) -> float:
        members = self.world.members
        idle = len(members) > self.busy
        seconds = 0.0
        if batch:
            padded: float = batch if self.costs.load == "largest" else self.decode.total / len(members)
            if self.costs.pad_to_captures and self.given.capture_sizes:
                at = bisect_left(self.given.capture_sizes, padded)
                padded = self.given.capture_sizes[at] if at < len(self.given.capture_sizes) else padded
            curve = self.curves[len(members)]
            if len(curve.contexts) > 1:
                steps = np.arange(count)
                totals = self.context[:, None] + np.array(self.decode.of)[:, None] * steps
                seconds = float(curve.seconds_over(padded, totals.max(axis=0) / batch, idle=idle).sum())
            else:
                seconds = curve.seconds(padded, idle=idle) * count
        seconds *= self.costs.step_scale
        if prefill:
            seconds = max(seconds + prefill / self.costs.prefill_tokens_per_s, self.costs.prefill_step_s)
        if self.by_context:
            self.context += np.array(self.decode.of) * count
        return seconds

    # -- sync points ---------------------------------------------------------------------------

    def _sync(self, completed: Sequence[int]) -> None:
        if self.pending is not None and self.clock > self.pending.commit["began"]:
            self._first_step_done()
        for rank in completed:
            self.rows[rank] = self.rows[rank]._replace(unfinished=0)
            self.busy -= bool(self.given.groups[rank])
            self._change([Change(rank, 0, 0, 0, len(self.traces[rank].preemptions))])
            self.idle_since[rank] = (self.clock, self.stepping)
        if not completed:
            return
        decision = decide(self.world, self.rows)
        for rank in completed:
            self._mark("local_complete", rank)
        if decision.action is Action.SHRINK:
            self._shrink(decision)
        elif decision.action is Action.FINISH:
            self._finish()

    def _shrink(self, decision: Decision) -> None:
        before = tuple(self.world.members)
        survivors = rows_of.choose_survivors(
            self.placement, decision.busy, decision.idle, decision.target, self.given.rank_order
        )
        self.placement, moves = rows_of.shrink(self.placement, survivors)
        leavers = tuple(rank for rank in before if rank not in survivors)
        for rank in leavers:
            self._mark("detach_start", rank)
        parts = self._parts(moves)
        self.now += math.fsum(parts.values())
        self.world.members = list(survivors)
        self.extra = self.residency.shrink.first_step_extra
        commit = {
            "stage": self.world.ladder.index(len(survivors)),
            "from": len(before),
            "to": len(survivors),
            "survivors": list(survivors),
            **parts,
            "moved_rows": len(moves) if self.residency.shrink.move_rows else 0,
            "moved_bytes": len(moves) * self.costs.expert_bytes if self.residency.shrink.move_rows else 0,
            "began": self.clock,
        }
        self.commits.append((len(before), len(survivors), tuple(survivors), self.clock))
        self.pending = _Pending(leavers, commit, survivors[0], self.now)

    def _parts(self, moves: Sequence[rows_of.Move]) -> dict[str, float]:
        """Seconds by part; rows take as long as on the rank that sends or receives most."""
        shrink = self.residency.shrink
        move = shrink.move
        if shrink.move_rows and moves:
            most = max(
                max(Counter(m.target for m in moves).values()),
                max(Counter(m.source for m in moves).values()),
            )
            move += most * self.costs.expert_bytes / self.costs.link_bytes_per_s
        parts = {
            "agree": shrink.agree,
            "prepare": shrink.prepare,
            "channel": shrink.channel,
            "move": move,
            "groups": shrink.groups,
            "switch": shrink.switch,
            "capture": shrink.capture + shrink.capture_bucket * self._reachable_captures(),
            "trial": shrink.trial,
        }
        return {name: seconds for name, seconds in parts.items() if seconds or name == "agree"}

    def _reachable_captures(self) -> int:
        """Captured sizes that batches from here on can still meet: up to the one that holds the present batch."""
        sizes = self.given.capture_sizes
        return min(len(sizes), bisect_left(sizes, max(1, self.decode.largest())) + 1)

    def _first_step_done(self) -> None:
        done = self.pending
        if done is None:
            return
        self.pending = None
        fields = {name: value for name, value in done.commit.items() if name != "began"}
        self._mark("stage_commit", done.speaker, **fields, first_step=self.now - done.switched)
        for rank in done.leavers:
            since, stepped = self.idle_since[rank]
            # The leaver left at the switch: the survivors' first iteration is not its own.
            count, lasted = done.commit["began"] - since, self.stepping - (self.now - done.switched) - stepped
            self._add_dummies(rank, count, lasted)
            self._audit(rank, done.commit["began"])
            self._mark("detach_end", rank)
            self._mark("sleep_start", rank)
            self.asleep[rank] = self.now + self.costs.sleep_s
            self._mark("sleep_end", rank, t=self.asleep[rank])

    def _add_dummies(self, rank: int, count: int, seconds: float) -> None:
        self.dummy[rank] = (self.dummy[rank][0] + count, self.dummy[rank][1] + max(0.0, seconds))

    def _audit(self, rank: int, iterations: int) -> None:
        eager = bisect_left(self.eager_at, iterations)
        self._mark("decode_audit", rank, full=iterations - eager, eager=eager)

    # -- the end ---------------------------------------------------------------------------------

    def _finish(self) -> None:
        size, members = self.world.size, set(self.world.members)
        for rank in range(size):
            self._mark("generation_end", rank)
        if len(members) != size:
            self._restore()
        for rank in range(size):
            if rank in members:
                since, stepped = self.idle_since[rank]
                self._add_dummies(rank, self.clock - since, self.stepping - stepped)
                self._audit(rank, self.clock)
            count, seconds = self.dummy[rank]
            self._mark("dummy_steps", rank, count=count, seconds=seconds)
            self._mark("active_batch", rank, sizes=sampled(self.traces[rank]))
        self.now += self.costs.finish_s

    def _restore(self) -> None:
        """Every leaver wakes in time for the last token, or as soon as its memory is given back; then all restore."""
        began = self.now
        for rank in range(self.world.size):
            self._mark("restore_start", rank, kind="full", reason="the step is complete")
        settled = max([began, *self.asleep.values()])
        self.now = settled
        for rank, asleep in self.asleep.items():
            woken = max(asleep, began - self.costs.wake_s)
            self._mark("wake_start", rank, t=woken)
            self.now = max(self.now, woken + self.costs.wake_s)
        waited = self.now - settled
        self.now += self.costs.restore_s
        for rank in self.asleep:
            self._mark("wake_end", rank)
        for rank in range(self.world.size):
            self._mark("restore_end", rank, duration=self.now - began, duration_res=0.0, restore_wake=waited)

    def _mark(self, event: str, rank: int | None, *, t: float | None = None, **fields: Any) -> None:
        self.marks.append(Mark(self.now if t is None else t, event, rank, fields))

    def _outcome(self) -> StepOutcome:
        tokens = sum(request.length for group in self.given.groups for request in group)
        return StepOutcome(
            seconds=self.now,
            tokens=tokens,
            iterations=self.clock,
            commits=tuple(self.commits),
            marks=tuple(sorted(self.marks, key=lambda mark: mark.t)),
            traces=tuple(self.traces),
            dummy_steps=sum(count for count, _ in self.dummy.values()),
            dummy_seconds=math.fsum(seconds for _, seconds in self.dummy.values()),
        )


def simulate_step(given: StepInput, costs: Costs, curves: Mapping[int, Curve]) -> StepOutcome:
    """Simulates one step.

    Args:
        given: the step; at least one request.
        costs: what things cost.
        curves: decode step times of every size of the ladder.

    Raises:
        InputError: a response never fits into a rank's KV, or the step times do not answer for a batch.
    """
    return _Step(given, costs, curves).run()
