"""Stable identities of dataset rows: what histories are keyed by, never a position, a text or verl's random uid."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flexfloor.errors import InputError, RefusedError

REMEDY = "write a stable id into every row, or name the column that holds one with flexfloor.verl.item_id"


class ItemIndex:
    """Item ids of a dataset, row by row; an id may stand in several rows.

    Args:
        ids: by row.
    """

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = list(ids)
        self._rows: dict[str, list[int]] = defaultdict(list)
        for row, item_id in enumerate(self.ids):
            self._rows[item_id].append(row)

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of(cls, dataset: Any, path: str) -> ItemIndex:
        """Reads the ids of a verl dataset.

        Args:
            dataset: verl's RLHFDataset (or anything with its ``dataframe``, or plain rows).
            path: dotted path of the id in a row.

        Raises:
            InputError: a row without an id; names row and field.
        """
        index = cls([_id(row, path, number) for number, row in enumerate(_columns(dataset, path.split(".")[0]))])
        if not index.ids:
            raise InputError("hold no row; name a dataset", field="data.train_files")
        return index

    def rows(self, steps: Sequence[Sequence[str]]) -> list[list[int]]:
        """The dataset rows of each step's items; an item that stands in several rows takes them in turn."""
        taken: dict[str, int] = defaultdict(int)
        found = []
        for items in steps:
            rows = []
            for item_id in items:
                own = self._rows[item_id]
                rows.append(own[taken[item_id] % len(own)])
                taken[item_id] += 1
            found.append(rows)
        return found


def _columns(dataset: Any, column: str) -> Iterator[Mapping[str, Any]]:
    frame = getattr(dataset, "dataframe", None)
    if frame is None:
        for index in range(len(dataset)):
            yield dataset[index]
        return
    if column not in frame.column_names:
        raise InputError(f"no column {column!r} in the dataset; {REMEDY}", field="flexfloor.verl.item_id")
    for value in frame[column]:
        yield {column: value}


def _id(row: Mapping[str, Any], path: str, number: int) -> str:
    value: Any = row
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if value is None or (isinstance(value, str) and not value) or isinstance(value, bool | float):
        raise InputError(f"row {number} has no {path}; {REMEDY}", field="data.train_files")
    return str(value)


def check_prompt_lengths(lengths: Sequence[int], ids: Sequence[str], limit: int) -> None:
    """Refuse prompts that verl would cut without a word.

    Args:
        lengths: prompt tokens by row, chat template applied.
        ids: item ids by row.
        limit: ``data.max_prompt_length``.

    Raises:
        RefusedError: a prompt is longer.
    """
    longest = max(range(len(lengths)), key=lambda row: lengths[row], default=None)
    if longest is not None and lengths[longest] > limit:
        over = sum(length > limit for length in lengths)
        raise RefusedError(
            f"{over} prompts are above data.max_prompt_length {limit}: item {ids[longest]!r} has {lengths[longest]}",
            remedy=f"set it to {lengths[longest]}, or leave such prompts out with data.filter_overlong_prompts=true",
        )
