"""The small vector that every rank all-reduces at a DP sync point.

Each rank fills its own row of an N x len(Row) integer matrix of zeros; the sum over
ranks gives every rank all rows. Decisions are functions of these rows alone.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """What one rank tells the others. All fields are integers; counts are of trajectories."""

    digest: int = 0
    """Low 62 bits of the installed plan's digest, 0 without a plan."""
    unfinished: int = 0
    """Requests in this rank's scheduler that are not finished."""
    received: int = 0
    """Trajectories received since the plan was installed."""
    expected: int = 0
    """Trajectories the plan (with its revisions) sends to this rank."""
    open: int = 0
    """Received trajectories that may still send another turn."""
    closed: int = 0
    """1 when the step may end once everything is complete."""
    kv_free: int = 0
    """Free KV blocks."""
    want_restore: int = 0
    """1 when this rank asks for the full world in mid-rollout."""
    pause: int = 0
    """1 while vLLM's two-phase pause is pending on this rank."""
    capture: int = 0
    """Decode graph that this member lacks and has had use for during some iterations, 0 for none."""
    rows: int = 0
    """Fewest expert rows that had memory on this rank at any time since the last armed step."""
    tokens_left: int = 0
    """Most tokens that an unfinished request of this rank may still give; 0 without a plan."""
    vote: int = 0
    """Vote on a phase, see :mod:`flexfloor.elastic.ballot`; 0 without one."""
    phase: int = 0
    """The phase voted on."""


def decode(flat: list[int], ranks: int) -> list[Row]:
    """Rows of all ranks from the summed matrix, flattened row by row."""
    width = len(Row._fields)
    return [Row(*flat[rank * width : (rank + 1) * width]) for rank in range(ranks)]


def encode(row: Row, rank: int, ranks: int) -> list[int]:
    """This rank's contribution: zeros but for its own row."""
    width = len(Row._fields)
    flat = [0] * (width * ranks)
    flat[rank * width : (rank + 1) * width] = list(row)
    return flat


def digest_number(digest: str) -> int:
    """A positive 62-bit number from a plan's hexadecimal digest."""
    return (int(digest[:16], 16) & ((1 << 62) - 1)) or 1
