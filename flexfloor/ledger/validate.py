"""Checks of a log against the protocol that the accounting relies on (seed 001 appendix C).

A check that fails is a problem of the run, not of the input: the report still stands and says so. What the log holds
no evidence for reads "not checked".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from flexfloor.events import Event
from flexfloor.ledger.occupancy import Cycle, StepOccupancy, began, strangers
from flexfloor.ledger.records import StepResponses
from flexfloor.ledger.transitions import Transition, step_transitions
from flexfloor.ledger.windows import RankKey, StepKey

Status = Literal["ok", "failed", "not checked"]


@dataclass(frozen=True)
class Outcome:
    """What one check found in one step: its failures, and why it could not look, if so."""

    failures: tuple[str, ...] = ()
    unchecked: str = ""

    @property
    def status(self) -> Status:
        """``failed`` before ``not checked`` before ``ok``."""
        return "failed" if self.failures else "not checked" if self.unchecked else "ok"


@dataclass(frozen=True)
class Finding:
    """Outcome of a named check in one step."""

    check: str
    key: StepKey
    outcome: Outcome

    @property
    def problems(self) -> list[str]:
        """One line a failure."""
        return [f"{self.check}: {self.key}: {failure}" for failure in self.outcome.failures]


@dataclass(frozen=True)
class Case:
    """What the checks look at: one step and what the run folder says of its responses."""

    step: StepOccupancy
    transitions: list[Transition]
    responses: StepResponses | None


def check_step(step: StepOccupancy, responses: StepResponses | None = None) -> list[Finding]:
    """Run every check of ``CHECKS`` on one step."""
    case = Case(step, step_transitions(step), responses)
    return [Finding(name, step.log.key, check(case)) for name, (check, _) in CHECKS.items()]


def _one_release_per_detach(case: Case) -> Outcome:
    failures: list[str] = []
    seen = False
    cycles = _cycles(case.step)
    for index, (key, cycle) in enumerate(cycles):
        if cycle.detach is None:
            continue
        seen = True
        tags = [sleep.fields.get("tag") for sleep in cycle.sleeps]
        slept_late = any(k == key and c.detach is None and c.sleeps for k, c in cycles[index + 1 : index + 2])
        if not tags and not slept_late:
            failures.append(f"{key}: detach at {_at(case, cycle.detach)} has no sleep after it; charged")
        elif len(tags) > len(set(tags)):
            failures.append(f"{key}: detach at {_at(case, cycle.detach)} has {len(tags)} releases")
        if cycle.reopened_by is not None:
            failures.append(f"{key}: detached again at {_at(case, cycle.reopened_by)} with no return logged in between")
    return Outcome(tuple(failures), "" if seen else "no rank detached")


def _no_decode_while_free(case: Case) -> Outcome:
    audits = [e for e in case.step.log.named("decode_audit") if e.rank is not None]
    failures = [
        f"{key}: decode audit at {_at(case, audit)} inside of a credited free interval"
        for key, rank in case.step.ranks.items()
        for audit in audits
        if audit.rank == key.rank and (key.replica is None or audit.replica == key.replica)
        if audit.fields["full"] + audit.fields["eager"] > 0
        if any(low < audit.t and audit.end < high for low, high in rank.surely_free)
    ]
    return Outcome(tuple(failures), "" if audits else "no decode audit")


def _no_eager_fallback(case: Case) -> Outcome:
    audits = [e for e in case.step.log.named("decode_audit") if e.fields.get("graphs")]
    failures = [
        f"{audit.fields['eager']} decode steps of rank {audit.rank} before {_at(case, audit)} replayed no graph"
        for audit in audits
        if audit.fields["eager"]
    ]
    return Outcome(tuple(failures), "" if audits else "no audit tells of captured decode graphs")


def _occupied_time_positive(case: Case) -> Outcome:
    if case.step.log.seconds <= 0:
        return Outcome((f"the window lasts {case.step.log.seconds:g} s",))
    return Outcome(
        tuple(
            f"{key}: occupied time {rank.occupied.text(3)} s is not surely positive"
            for key, rank in case.step.ranks.items()
            if rank.occupied.lo <= 0
        )
    )


def _every_rank_accounted(case: Case) -> Outcome:
    log = case.step.log
    failures = [f"{key} is not of the world of {log.world_size}; nothing is credited" for key in strangers(log)]
    if log.several_replicas:
        nameless = sorted({key.rank for key in log.ranks if key.replica is None})
        failures += [f"rank {rank} names no replica, others do" for rank in nameless]
    gone = {key for transition in case.transitions for key in transition.leavers}
    failures += [
        f"{key} left in a stage_commit but logs no detach; charged whole"
        for key in sorted(gone, key=str)
        if key not in case.step.ranks or not any(cycle.detach for cycle in case.step.ranks[key].cycles)
    ]
    silent = log.world_size - len(log.ranks)
    return Outcome(tuple(failures), f"{silent} ranks without events are charged whole" if silent > 0 else "")


def _stages_from_ladder(case: Case) -> Outcome:
    failures: list[str] = []
    unchecked = "" if case.transitions else "no transition"
    before: dict[int | None, Transition] = {}
    for transition in case.transitions:
        name = f"{transition.before} -> {transition.after}"
        if transition.after >= transition.before:
            failures.append(f"stage {name} does not shrink")
        last = before.get(transition.replica)
        if last is not None and not transition.fresh and transition.before != last.after:
            failures.append(f"stage {name} follows {last.before} -> {last.after} with no restore in between")
        if transition.survivors is not None and len(transition.survivors) != transition.after:
            failures.append(f"stage {name} names {len(transition.survivors)} survivors")
        ladder = _ladder(case.step, transition)
        if ladder is None:
            unchecked = "no plan installed"
        elif transition.after not in ladder:
            failures.append(f"stage {name} is not of the installed ladder {ladder}")
        before[transition.replica] = transition
    return Outcome(tuple(failures), unchecked)


def _restore_inside_window(case: Case) -> Outcome:
    log = case.step.log
    failures: list[str] = []
    unchecked = [] if any(cycle.release for _, cycle in _cycles(case.step)) else ["nothing was released"]
    for key, cycle in _cycles(case.step):
        if cycle.release is None:
            continue
        if not cycle.closers and cycle.reopened_by is None:
            unchecked.append(f"{key} logs no return; free until rollout_end")
        failures += [f"{key}: {e.event} at {_at(case, e)} tells no start and no duration" for e in cycle.startless]
        restores = [closer for closer in cycle.closers if closer.event.startswith("restore")]
        for closer in restores or cycle.closers:
            start = began(closer)
            if closer.t > log.end or (start is not None and start.hi < log.start):
                failures.append(f"{key}: {closer.event} at {_at(case, closer)} lies outside of the window")
    return Outcome(tuple(failures), "; ".join(unchecked))


def _ack_before_restore(case: Case) -> Outcome:
    failures: list[str] = []
    leases = case.step.log.named("sidecar_start", "sidecar_ack")
    for key, cycle in _cycles(case.step):
        if cycle.release is None:
            continue
        back = cycle.reacquired
        begin, end = cycle.release.lo, case.step.log.end if back is None else back.hi
        own = [e for e in leases if _speaks_of(e, key)]
        lent = [e for e in own if e.event == "sidecar_start" and begin <= e.end and e.t <= end]
        acks = [e for e in own if e.event == "sidecar_ack" and lent and e.t >= lent[-1].t]
        if lent and back is not None and not any(ack.t <= end for ack in acks):
            late = f"came at {_at(case, acks[0])}, after" if acks else "is missing before"
            failures.append(f"{key}: sidecar_ack {late} the restore at {back.hi - case.step.log.start:.6g} s")
    return Outcome(tuple(failures), "" if any(e.event == "sidecar_start" for e in leases) else "no sidecar lease")


def _responses_as_planned(case: Case) -> Outcome:
    planned, got = planned_responses(case.step), response_count(case.step, case.responses)
    if planned is None:
        return Outcome(unchecked="no plan with expected responses")
    if got is None:
        return Outcome(unchecked="responses are not counted")
    return Outcome((f"{got} responses where {planned} were planned",) if planned != got else ())


def _tokens_as_saved(case: Case) -> Outcome:
    if case.responses is None:
        return Outcome(unchecked="no saved responses that name this step alone")
    saved, told = sum(case.responses.lengths), case.step.log.response_tokens
    return Outcome(
        (f"rollout_end tells {told} response tokens, responses.jsonl holds {saved}",) if saved != told else ()
    )


Check = Callable[[Case], Outcome]

CHECKS: Mapping[str, tuple[Check, str]] = {
    "one_release_per_detach": (_one_release_per_detach, "One release per detach"),
    "no_decode_while_free": (_no_decode_while_free, "No decode while credited as free"),
    "no_eager_fallback": (_no_eager_fallback, "No eager decode beside captured graphs"),
    "occupied_time_positive": (_occupied_time_positive, "Occupied time positive"),
    "every_rank_accounted": (_every_rank_accounted, "Every rank accounted for"),
    "stages_from_ladder": (_stages_from_ladder, "Stages shrink and come from the ladder"),
    "restore_inside_window": (_restore_inside_window, "Restore inside the window"),
    "ack_before_restore": (_ack_before_restore, "Sidecar ack before restore"),
    "responses_as_planned": (_responses_as_planned, "Response count as planned"),
    "tokens_as_saved": (_tokens_as_saved, "Response tokens as saved"),
}


def planned_responses(step: StepOccupancy) -> int | None:
    """Responses that the installed plan expects over all ranks; None where no plan tells them all.

    ``expected`` is the whole vector of a replica (a list or a map; the last one installed counts), or one rank's count.
    """
    whole: dict[int | None, int] = {}
    single: dict[tuple[int | None, int | None], int] = {}
    for event in step.log.named("plan_installed"):
        expected = event.fields.get("expected")
        if isinstance(expected, Mapping):
            whole[event.replica] = sum(expected.values())
        elif isinstance(expected, list):
            whole[event.replica] = sum(expected)
        elif expected is not None:
            single[event.replica, event.rank] = expected
    if None in whole and not step.log.several_replicas:
        return whole[None]
    if whole:
        return sum(whole.values())
    return sum(single.values()) if single and len(single) == step.log.world_size else None


def response_count(step: StepOccupancy, responses: StepResponses | None) -> int | None:
    """Responses of the step by rollout_end, else by responses.jsonl, else None."""
    if step.log.responses is not None:
        return step.log.responses
    return len(responses.lengths) if responses is not None else None


def _cycles(step: StepOccupancy) -> list[tuple[RankKey, Cycle]]:
    return [(key, cycle) for key, rank in step.ranks.items() for cycle in rank.cycles]


def _ladder(step: StepOccupancy, transition: Transition) -> list[int] | None:
    plans = [
        e for e in step.log.named("plan_installed") if transition.replica is None or e.replica == transition.replica
    ]
    plans = plans or [e for e in step.log.named("plan_installed") if e.replica is None]
    return list(plans[-1].fields["ladder"]) if plans else None


def _speaks_of(event: Event, key: RankKey) -> bool:
    if event.rank is not None and event.rank != key.rank:
        return False
    return event.replica is None or key.replica is None or event.replica == key.replica


def _at(case: Case, event: Event) -> str:
    return f"{event.t - case.step.log.start:.6g} s"
