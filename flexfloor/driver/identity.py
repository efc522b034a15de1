"""Are two runs the same, token by token and logprob by logprob?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexfloor.errors import InputError

Key = tuple[str, int, int]


@dataclass(frozen=True)
class Identity:
    """The comparison of two runs.

    Attributes:
        identical: responses with equal tokens, logprobs and finish reason.
        total: responses of the first run and of the second that have no partner.
        preemptions_equal: whether every response was preempted as often in both.
        first_difference: what differs in the first response that does; None when all are identical.
    """

    identical: int
    total: int
    preemptions_equal: bool
    first_difference: str | None = None

    @property
    def whole(self) -> bool:
        """Every response of both runs is identical."""
        return self.identical == self.total and self.total > 0

    def __str__(self) -> str:
        return f"{self.identical} of {self.total} requests identical"


def compare_runs(first: str | Path, second: str | Path) -> Identity:
    """Compares the responses of two run folders exactly.

    Raises:
        InputError: a folder holds no responses, or a malformed line.
    """
    ours, theirs = (read_responses(Path(run) / "responses.jsonl") for run in (first, second))
    identical, preempted, difference = 0, True, None
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        what = _difference(ours.get(key), theirs.get(key))
        if what is None:
            identical += 1
            preempted &= ours[key].get("num_preempted") == theirs[key].get("num_preempted")
        elif difference is None:
            difference = f"item {key[0]!r}, epoch {key[1]}, sample {key[2]}: {what}"
    return Identity(identical, len({*ours, *theirs}), preempted, difference)


def read_responses(path: Path) -> dict[Key, dict[str, Any]]:
    """The lines of responses.jsonl by (item_id, epoch, sample)."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror}); name a run folder", file=path) from error
    found: dict[Key, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            data = json.loads(line)
            found[data["item_id"], data["epoch"], data["sample"]] = data
        except (ValueError, KeyError, TypeError) as error:
            raise InputError("is no response", file=path, line=number) from error
    return found


def _difference(ours: dict[str, Any] | None, theirs: dict[str, Any] | None) -> str | None:
    if ours is None or theirs is None:
        return f"only in the {'second' if ours is None else 'first'} run"
    for field in ("token_ids", "logprobs", "finish_reason"):
        one, other = ours.get(field), theirs.get(field)
        if one != other:
            if isinstance(one, list) and isinstance(other, list):
                place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
                return f"{field} differ " + (f"from place {place}" if place is not None else "in length")
            return f"{field} {one!r} and {other!r}"
    return None
