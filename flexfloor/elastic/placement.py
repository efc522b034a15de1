"""Which rank holds which expert in which row, and the fewest moves to a smaller world.

Every expert is active on exactly one row of the current world. At world size W every
member has exactly E/W active rows, and they are rows 0 .. E/W - 1, so that kernels which
want as many weights as experts can take a prefix. Rows that stay keep their place; a row
that still holds a valid copy from an earlier stage is activated without a move
(paper, section 4.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flexfloor.errors import ProtocolError


class Move(NamedTuple):
    """One expert's rows of every MoE layer, from one rank's row to another's."""

    expert: int
    source: int
    source_row: int
    target: int
    target_row: int


@dataclass
class Placement:
    """Contents of the expert rows of all ranks of the full world.

    Attributes:
        experts: number of logical experts E in a layer.
        capacity: rows a rank has (E / smallest floor of the run).
        active: rank -> {row: expert}; the rows in use in the current world.
        copies: rank -> {row: expert}; every row that holds current weights, active or not.
    """

    experts: int
    capacity: int
    active: dict[int, dict[int, int]]
    copies: dict[int, dict[int, int]] = field(default_factory=dict)

    @classmethod
    def linear(cls, experts: int, ranks: int, capacity: int) -> Placement:
        """VLLM's own placement at load: rank r holds experts r*E/N .. (r+1)*E/N - 1."""
        if experts % ranks:
            raise ProtocolError(f"{experts} experts do not divide over {ranks} ranks")
        per = experts // ranks
        if capacity < per:
            raise ProtocolError(f"{capacity} rows cannot hold {per} experts")
        active = {rank: {row: rank * per + row for row in range(per)} for rank in range(ranks)}
        return cls(experts, capacity, active, {rank: dict(rows) for rank, rows in active.items()})

    def clone(self) -> Placement:
        """An independent copy."""
        return Placement(
            self.experts,
            self.capacity,
            {rank: dict(rows) for rank, rows in self.active.items()},
            {rank: dict(rows) for rank, rows in self.copies.items()},
        )

    def home(self) -> dict[int, tuple[int, int]]:
        """Expert -> (rank, row) of its active row."""
        return {e: (rank, row) for rank, rows in self.active.items() for row, e in rows.items()}

    def expert_map(self, rank: int) -> list[int]:
        """Row of every expert on ``rank``, -1 where it is not active there. Length E."""
        table = [-1] * self.experts
        for row, expert in self.active.get(rank, {}).items():
            table[expert] = row
        return table

    def forget(self, ranks: Iterable[int]) -> None:
        """The memory of ``ranks`` was released: none of their rows holds anything."""
        for rank in ranks:
            self.copies[rank] = {}

    def spoil(self, moves: Iterable[Move]) -> None:
        """A transfer failed: its target rows hold nothing."""
        for move in moves:
            self.copies[move.target].pop(move.target_row, None)

    def trim(self, rows: int) -> None:
        """Rows from ``rows`` on lost their memory on some rank: no copy there counts."""
        self.copies = {
            rank: {row: expert for row, expert in held.items() if row < rows} for rank, held in self.copies.items()
        }

    def forget_spares(self) -> None:
        """New weights were loaded into active rows only: all other copies are stale."""
        self.copies = {rank: dict(rows) for rank, rows in self.active.items()}

    def spares(self) -> dict[int, dict[int, int]]:
        """Rank -> {row: expert} of the copies that are not in use."""
        return {
            rank: {row: expert for row, expert in rows.items() if row not in self.active.get(rank, {})}
            for rank, rows in self.copies.items()
        }

    def check(self) -> None:
        """Raise ProtocolError unless every expert is active exactly once on a valid copy."""
        seen: dict[int, int] = {}
        for rank, rows in self.active.items():
            for row, expert in rows.items():
                if expert in seen:
                    raise ProtocolError(f"expert {expert} is active on ranks {seen[expert]} and {rank}")
                if self.copies.get(rank, {}).get(row) != expert:
                    raise ProtocolError(f"row {row} of rank {rank} does not hold expert {expert}")
                seen[expert] = rank
        if len(seen) != self.experts:
            raise ProtocolError(f"only {len(seen)} of {self.experts} experts are reachable")


SEARCH_LIMIT = 2000
"""Sets of survivors that are looked at beyond the greedy one; the result is a function of its arguments alone."""


def choose_survivors(
    placement: Placement, busy: Sequence[int], idle: Sequence[int], size: int, rank_order: Sequence[int]
) -> list[int]:
    """The ranks that go on: every busy one, filled up by the idle ones that cost the fewest moves.

    An expert moves unless some survivor holds it in a row that the smaller world uses. Ranks are taken greedily by
    what they add, then a bounded search looks for a set that adds more: spare copies can overlap.

    Args:
        placement: the current contents.
        busy: members with unfinished requests.
        idle: members that are complete.
        size: size of the next world.
        rank_order: all ranks, those that should leave first in front; breaks ties.

    Raises:
        ProtocolError: more busy ranks than ``size``, or too few members.
    """
    if len(busy) > size or len(busy) + len(idle) < size:
        raise ProtocolError(f"cannot form a world of {size} from busy {list(busy)} and idle {list(idle)}")
    leaves = {rank: place for place, rank in enumerate(rank_order)}
    per = placement.experts // size
    held = {rank: _held(placement, rank, per) for rank in [*busy, *idle]}
    covered = 0
    for rank in busy:
        covered |= held[rank]
    pool, reached = list(idle), covered
    chosen: list[int] = []
    while len(chosen) < size - len(busy):
        best = max(pool, key=lambda r: ((held[r] & ~reached).bit_count(), leaves.get(r, r)))
        pool.remove(best)
        chosen.append(best)
        reached |= held[best]
    better = _search(held, [*chosen, *pool], covered, len(chosen), reached.bit_count())
    return sorted([*busy, *(better or chosen)])


def _held(placement: Placement, rank: int, per: int) -> int:
    """Experts, as bits, that ``rank`` holds in rows 0 .. per - 1."""
    return sum({1 << expert for row, expert in placement.copies[rank].items() if row < per})


def _search(held: dict[int, int], pool: list[int], covered: int, wanted: int, known: int) -> list[int]:
    """``wanted`` ranks of ``pool`` that cover more than ``known`` experts, empty where none were found.

    Depth first; a branch ends when even the largest additions could not beat the best set so far.
    """
    best: list[int] = []
    branches: list[tuple[int, int, list[int]]] = [(0, covered, [])]
    for _ in range(SEARCH_LIMIT):
        if not branches:
            break
        start, reached, taken = branches.pop()
        left = wanted - len(taken)
        if left == 0:
            if reached.bit_count() > known:
                known, best = reached.bit_count(), taken
            continue
        adds = sorted(((held[rank] & ~reached).bit_count() for rank in pool[start:]), reverse=True)
        if len(adds) < left or reached.bit_count() + sum(adds[:left]) <= known:
            continue
        branches.append((start + 1, reached, taken))
        branches.append((start + 1, reached | held[pool[start]], [*taken, pool[start]]))
    return best


def shrink(placement: Placement, survivors: Sequence[int]) -> tuple[Placement, list[Move]]:
    """The placement of the smaller world and the moves that make it, as few as possible.

    Active rows of survivors stay. Experts of leavers go to rows 0 .. E/W - 1 of survivors:
    first onto survivors that still hold a valid copy there (maximum bipartite matching under
    the free-row counts), the rest onto free rows, fewest-filled survivor first.

    Raises:
        ProtocolError: E is not divisible by the number of survivors or rows do not suffice.
    """
    size = len(survivors)
    if placement.experts % size:
        raise ProtocolError(f"{placement.experts} experts do not divide over {size} ranks")
    per = placement.experts // size
    if per > placement.capacity:
        raise ProtocolError(f"{per} rows are needed on a rank, {placement.capacity} exist")
    home = placement.home()
    target = placement.clone()
    target.active = {rank: dict(placement.active[rank]) for rank in survivors}
    if any(len(rows) > per or any(row >= per for row in rows) for rows in target.active.values()):
        raise ProtocolError("a survivor has more active rows than the smaller world gives it")
    homeless = [e for e in range(placement.experts) if home[e][0] not in target.active]
    for expert, (rank, row) in _resident(placement, target, homeless, per).items():
        target.active[rank][row] = expert
    moves = []
    for expert in homeless:
        if any(expert in rows.values() for rows in target.active.values()):
            continue
        rank = min(survivors, key=lambda r: (len(target.active[r]), r))
        row = next(i for i in range(per) if i not in target.active[rank])
        source, source_row = home[expert]
        moves.append(Move(expert, source, source_row, rank, row))
        target.active[rank][row] = expert
        target.copies[rank][row] = expert
    target.check()
    return target, moves


def _resident(placement: Placement, target: Placement, homeless: Sequence[int], per: int) -> dict[int, tuple[int, int]]:
    """A maximum matching of homeless experts to inactive rows that already hold them."""
    options: dict[int, list[tuple[int, int]]] = {e: [] for e in homeless}
    for rank, active in target.active.items():
        for row, expert in placement.copies[rank].items():
            if row < per and row not in active and expert in options:
                options[expert].append((rank, row))
    # A row holds one expert, so rows never compete: any option of an expert is a maximum matching.
    return {expert: min(rows) for expert, rows in options.items() if rows}


def restore(placement: Placement, base: Placement, awake: Iterable[int]) -> tuple[Placement, list[Move]]:
    """Back to the full world's placement; rows still valid on their old owner do not move.

    Args:
        placement: the contents now (sleepers' copies forgotten).
        base: the full world's placement.
        awake: ranks whose memory is present and may receive rows.
    """
    home = placement.home()
    target = base.clone()
    target.copies = {rank: dict(rows) for rank, rows in placement.copies.items()}
    present = set(awake)
    moves = []
    for rank, rows in base.active.items():
        for row, expert in rows.items():
            if rank in present and placement.copies[rank].get(row) != expert:
                source, source_row = home[expert]
                moves.append(Move(expert, source, source_row, rank, row))
                target.copies[rank][row] = expert
    return target, moves


def replicate(placement: Placement, spares: dict[int, dict[int, int]]) -> tuple[Placement, list[Move]]:
    """Copies of rows in use into spare rows.

    Args:
        placement: the contents now.
        spares: rank -> {row: expert} of the rows to fill; none of them in use.
    """
    home = placement.home()
    target = placement.clone()
    moves = []
    for rank, rows in spares.items():
        for row, expert in rows.items():
            if home[expert][0] != rank:
                moves.append(Move(expert, *home[expert], rank, row))
                target.copies[rank][row] = expert
    return target, moves


def refill(placement: Placement, base: Placement, sleepers: Sequence[int]) -> tuple[Placement, list[Move]]:
    """Rows for ranks whose memory comes back, from any other rank that holds the same weights.

    Raises:
        ProtocolError: no other rank holds an expert any more.
    """
    where = {
        expert: (rank, row)
        for rank, rows in placement.copies.items()
        if rank not in sleepers
        for row, expert in rows.items()
    }
    target = placement.clone()
    moves = []
    for rank in sleepers:
        target.copies[rank] = {}
        for row, expert in base.active[rank].items():
            if expert not in where:
                raise ProtocolError(f"no awake rank holds expert {expert}: load weights instead of waking")
            source, source_row = where[expert]
            moves.append(Move(expert, source, source_row, rank, row))
            target.copies[rank][row] = expert
    return target, moves
