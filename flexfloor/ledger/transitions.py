"""What each transition of a step did: from and to, survivors, seconds by part, bytes moved and released."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from flexfloor.events import PARTS, Event
from flexfloor.ledger.occupancy import StepOccupancy
from flexfloor.ledger.windows import RankKey, StepKey


@dataclass
class Transition:
    """One committed shrink of one replica.

    Attributes:
        key: its step.
        replica: its replica, None where the log names none.
        stage: index of the stage in the ladder, None where not logged.
        before: ranks of the world before.
        after: ranks of the world after.
        survivors: ranks of the world after, where logged.
        at: seconds from rollout_start to the commit.
        seconds: seconds by part; where several ranks state the same commit, the longest.
        moved_bytes: bytes of expert rows moved, summed over the ranks that state them; None where not logged.
        leavers: ranks that left here, where survivors are logged.
        released_bytes: bytes that the leavers gave back, as measured; None where not logged.
    """

    key: StepKey
    replica: int | None
    stage: int | None
    before: int
    after: int
    survivors: tuple[int, ...] | None
    at: float
    seconds: dict[str, float] = field(default_factory=dict)
    moved_bytes: int | None = None
    leavers: tuple[RankKey, ...] = ()
    released_bytes: int | None = None
    fresh: bool = False
    stated_by: set[int | None] = field(default_factory=set)

    @property
    def total_seconds(self) -> float | None:
        """Sum of the parts; None where none is logged."""
        return sum(self.seconds.values()) if self.seconds else None

    def to_json(self) -> dict[str, Any]:
        """One entry of the report's ``transitions``."""
        return {
            "seed": self.key.seed,
            "epoch": self.key.epoch,
            "step": self.key.step,
            "replica": self.replica,
            "stage": self.stage,
            "from": self.before,
            "to": self.after,
            "survivors": list(self.survivors) if self.survivors is not None else None,
            "at": self.at,
            "seconds": {**self.seconds, "total": self.total_seconds},
            "moved_bytes": self.moved_bytes,
            "released_bytes": self.released_bytes,
        }


def step_transitions(step: StepOccupancy) -> list[Transition]:
    """The transitions of one step in order of time, replicas one after the other."""
    commits: dict[int | None, list[Event]] = defaultdict(list)
    for event in step.log.named("stage_commit", "restore_end"):
        commits[event.replica if step.log.several_replicas else None].append(event)
    found = [_of_replica(step, replica, own) for replica, own in commits.items()]
    return [transition for own in found for transition in own]


def _of_replica(step: StepOccupancy, replica: int | None, events: list[Event]) -> list[Transition]:
    found: list[Transition] = []
    restored = True
    for event in events:
        if event.event == "restore_end":
            restored = True
            continue
        present = _transition(step, replica, event)
        present.fresh = restored
        restored = False
        if found and _same(found[-1], present, event.rank):
            present = found[-1]
        else:
            found.append(present)
        present.stated_by.add(event.rank)
        for part in PARTS:
            if part in event.fields:
                present.seconds[part] = max(present.seconds.get(part, 0.0), float(event.fields[part]))
        if "moved_bytes" in event.fields:
            present.moved_bytes = (present.moved_bytes or 0) + int(event.fields["moved_bytes"])
    _add_leavers(step, replica, found)
    return found


def _transition(step: StepOccupancy, replica: int | None, event: Event) -> Transition:
    survivors = event.fields.get("survivors")
    return Transition(
        key=step.log.key,
        replica=replica,
        stage=event.fields.get("stage"),
        before=int(event.fields["from"]),
        after=int(event.fields["to"]),
        survivors=tuple(sorted(survivors)) if survivors is not None else None,
        at=event.t - step.log.start,
    )


def _same(one: Transition, two: Transition, rank: int | None) -> bool:
    told = (one.stage, one.before, one.after, one.survivors) == (two.stage, two.before, two.after, two.survivors)
    return told and not two.fresh and rank not in one.stated_by


def _add_leavers(step: StepOccupancy, replica: int | None, found: list[Transition]) -> None:
    """Match the n-th leave of a rank with its n-th release, and sum what was given back."""
    left: dict[RankKey, int] = defaultdict(int)
    world: set[int] | None = None
    for transition in found:
        if transition.survivors is None:
            world = None
            continue
        if transition.fresh or world is None:
            world = set(range(transition.before)) if transition.fresh else None
        if world is not None:
            transition.leavers = tuple(RankKey(replica, rank) for rank in sorted(world - set(transition.survivors)))
        given: list[int] = []
        for key in transition.leavers:
            cycles = [cycle for cycle in step.ranks[key].cycles if cycle.release] if key in step.ranks else []
            if left[key] < len(cycles):
                given.append(cycles[left[key]].released_bytes)
            left[key] += 1
        transition.released_bytes = sum(given) if given else None
        world = set(transition.survivors)
