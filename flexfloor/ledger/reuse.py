"""Free time between workers and inside of them, for several rollout replicas (seed 001 section I).

With ``r_i`` the release time of rank i, ``B_w = max r_i`` over the ranks of worker w and ``G = max B_w``:
``R_inter = sum_w n_w * (G - B_w)`` is what worker-level reuse exposes; ``R_intra = sum_w sum_i (B_w - r_i)`` over the
ranks that detach before their worker is complete is what elastic expert parallelism adds. The two are disjoint; time
after G and time after a rank's return are in neither.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexfloor.ledger.bounds import ZERO, Bounds
from flexfloor.ledger.figures import generation_end
from flexfloor.ledger.occupancy import RankOccupancy, StepOccupancy
from flexfloor.ledger.windows import RankKey


@dataclass(frozen=True)
class Reuse:
    """Free rank-seconds of one step: between workers, and inside of unfinished workers."""

    inter: Bounds
    intra: Bounds

    def __add__(self, other: Reuse) -> Reuse:
        return Reuse(self.inter + other.inter, self.intra + other.intra)


def step_reuse(step: StepOccupancy) -> Reuse | None:
    """R_inter and R_intra of one step, in rank-seconds.

    A worker is released when the last of its ranks sleeps; where ranks that stay log no sleep, at the worker's
    generation_end.

    Returns:
        None where fewer than two replicas are logged, or where a worker's release or size cannot be told.
    """
    replicas = step.log.replicas
    if len(replicas) < 2 or not step.credited:
        return None
    workers = {replica: [r for key, r in step.ranks.items() if key.replica == replica] for replica in replicas}
    released = {replica: _worker_release(step, replica, ranks) for replica, ranks in workers.items()}
    sizes = {replica: _worker_size(step, replica) for replica in replicas}
    ends = {replica: end for replica, end in released.items() if end is not None}
    if len(ends) < len(replicas) or any(size is None for size in sizes.values()):
        return None
    inter, intra = ZERO, ZERO
    for replica, end in ends.items():
        others = [other for name, other in ends.items() if name != replica]
        gap = Bounds(
            max(0.0, max(other.lo for other in others) - end.hi),
            max(0.0, max(other.hi for other in others) - end.lo),
        )
        inter += gap.scaled(float(sizes[replica] or 0))
        for rank in workers[replica]:
            intra += Bounds(
                sum(max(0.0, min(b, end.lo) - a) for a, b in rank.surely_free),
                sum(max(0.0, min(b, end.hi) - a) for a, b in rank.possibly_free),
            )
    return Reuse(inter, intra)


def _worker_release(step: StepOccupancy, replica: int, ranks: list[RankOccupancy]) -> Bounds | None:
    sleeps = [_last_sleep(rank) for rank in ranks]
    stays = [rank for rank in ranks if not any(cycle.detach for cycle in rank.cycles)]
    silent = [rank for rank in stays if _last_sleep(rank) is None]
    times = [asleep for asleep in sleeps if asleep is not None]
    if silent or len(ranks) < (_worker_size(step, replica) or 0) or not times:
        end = generation_end(step.log, RankKey(replica, -1))
        if end is None:
            return None
        times.append(Bounds.exact(end))
    return Bounds(max(time.lo for time in times), max(time.hi for time in times))


def _last_sleep(rank: RankOccupancy) -> Bounds | None:
    asleep = [cycle.asleep for cycle in rank.cycles if cycle.asleep is not None]
    return asleep[-1] if asleep else None


def _worker_size(step: StepOccupancy, replica: int) -> int | None:
    for event in step.log.named("rollout_end", "rollout_start"):
        if event.replica == replica and "world_size" in event.fields:
            return int(event.fields["world_size"])
    for event in step.log.named("plan_installed"):
        if event.replica == replica and event.fields["ladder"]:
            return int(max(event.fields["ladder"]))
    size, rest = divmod(step.log.world_size, len(step.log.replicas))
    return size if rest == 0 else None
