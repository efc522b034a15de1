"""The length history on disk: SQLite beside the run's checkpoints, one transaction a finished rollout step.

Invariants: a rollout step is stored whole or not at all; a stored step is never changed; what is known as of
checkpoint step k is a function of the steps up to k alone.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from flexfloor.errors import InputError
from flexfloor.history.records import LengthHistory, Observation, replay

_SCHEMA_VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS steps (
    global_step INTEGER PRIMARY KEY,
    epoch INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS observations (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    global_step INTEGER NOT NULL REFERENCES steps(global_step) ON DELETE CASCADE,
    item_id TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    lengths TEXT NOT NULL,
    censored TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_step ON observations(global_step);
"""


class HistoryStore:
    """Observations of a run, by finished rollout step.

    Args:
        path: the SQLite file; created with its folder when missing.

    Raises:
        InputError: the file is no history or cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self.path, timeout=30.0, isolation_level=None)
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _SCHEMA_VERSION):
                what = f"has history format {version}, this version reads {_SCHEMA_VERSION}; start a new history"
                raise InputError(what, file=path)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA foreign_keys = ON")
            self._db.executescript(_TABLES)
            self._db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        except (OSError, sqlite3.Error) as error:
            raise InputError(f"is no usable history ({error}); name another file", file=path) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; the store cannot be used afterwards."""
        self._db.close()

    @property
    def last_step(self) -> int | None:
        """The latest finished step, None when there is none."""
        step: int | None = self._db.execute("SELECT MAX(global_step) FROM steps").fetchone()[0]
        return step

    def record_step(self, global_step: int, epoch: int, observations: Iterable[Observation]) -> None:
        """Stores a finished rollout step in one transaction.

        Args:
            global_step: the trainer's step, above every stored one.
            epoch: the epoch of the step.
            observations: what was generated; an item that stands twice becomes one multiset.

        Raises:
            InputError: the step is not after the last stored one, or an observation is of another epoch.
        """
        seen = list(observations)
        for one in seen:
            if one.epoch != epoch:
                what = f"item {one.item_id!r} is of epoch {one.epoch}, the step of epoch {epoch}"
                raise InputError(what, file=self.path, field="epoch")
        self._store(global_step, epoch, seen)

    def import_observations(self, global_step: int, observations: Iterable[Observation]) -> None:
        """Stores foreign observations (a lengths.jsonl) as one step; their epochs may differ.

        Raises:
            InputError: the step is not after the last stored one.
        """
        seen = list(observations)
        self._store(global_step, max((one.epoch for one in seen), default=0), seen)

    def _store(self, global_step: int, epoch: int, observations: list[Observation]) -> None:
        last = self.last_step
        if last is not None and global_step <= last:
            what = f"holds step {last} already, step {global_step} cannot follow; resume with `rewind` first"
            raise InputError(what, file=self.path, field="global_step")
        empty = next((o.item_id for o in observations if not o.lengths), None)
        if empty is not None:
            raise InputError(f"item {empty!r} has no responses; leave it out", file=self.path, field="lengths")
        rows = [
            (global_step, o.item_id, o.epoch, o.prompt_tokens, json.dumps(o.lengths), json.dumps(o.censored))
            for o in observations
        ]
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.execute("INSERT INTO steps VALUES (?, ?)", (global_step, epoch))
            self._db.executemany(
                "INSERT INTO observations (global_step, item_id, epoch, prompt_tokens, lengths, censored)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                rows,
            )
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise

    def observations(self, as_of: int | None = None) -> list[Observation]:
        """All observations, one an item and epoch, in order of first appearance.

        Args:
            as_of: checkpoint step k: only what was known when step k had finished. None is everything.
        """
        limit = as_of if as_of is not None else (1 << 62)
        merged: dict[tuple[str, int], Observation] = {}
        for item_id, epoch, prompt_tokens, lengths, censored in self._db.execute(
            "SELECT item_id, epoch, prompt_tokens, lengths, censored FROM observations"
            " WHERE global_step <= ? ORDER BY id",
            (limit,),
        ):
            seen = Observation(item_id, epoch, prompt_tokens, tuple(json.loads(lengths)), tuple(json.loads(censored)))
            before = merged.get((item_id, epoch))
            merged[item_id, epoch] = before.merged(seen) if before else seen
        return list(merged.values())

    def view(self, alpha: float, as_of: int | None = None) -> LengthHistory:
        """Predictions as of a checkpoint step; see `observations` and `records.replay`."""
        return replay(self.observations(as_of), alpha)

    def rewind(self, global_step: int | None) -> int:
        """Forgets every step after ``global_step`` (None: all), so that a resumed run goes on from there.

        Returns:
            The number of steps forgotten.
        """
        floor = global_step if global_step is not None else -(1 << 62)
        return self._db.execute("DELETE FROM steps WHERE global_step > ?", (floor,)).rowcount
