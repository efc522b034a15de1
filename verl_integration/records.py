"""What a training run leaves on disk: history, plans, events. Beside the checkpoints, by default.

RUN_DIR/history.sqlite        one transaction a finished rollout step, numbered by the trainer's global step
RUN_DIR/plans/epoch-E.json    the plan of an epoch (``epoch-E-replica-R.json`` where there are several)
RUN_DIR/events/*.jsonl        what `flexfloor report RUN_DIR` reads
RUN_DIR/responses.jsonl       with ``flexfloor.verl.responses: true``
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from flexfloor.config import FlexFloorConfig
from flexfloor.errors import InputError
from flexfloor.events import EventWriter
from flexfloor.history import HistoryStore, LengthHistory, Observation, write_lengths
from flexfloor.plan import EpochPlan
from verl_integration.section import RunSettings


class RunRecords:
    """The run directory of one training run.

    Args:
        run: the run.

    Raises:
        InputError: it cannot be written.
    """

    def __init__(self, run: RunSettings) -> None:
        self.path = Path(run.run_dir)
        self._config: FlexFloorConfig = run.config
        try:
            run.events_dir.mkdir(parents=True, exist_ok=True)
            (self.path / "plans").mkdir(exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot be made ({error.strerror}); name a writable place", file=self.path) from error
        text = yaml.safe_dump({"flexfloor": run.config.resolved()}, sort_keys=False, allow_unicode=True)
        (self.path / "config.yaml").write_text(text, encoding="utf-8")
        self.history = HistoryStore(self.path / run.config.history.path)
        self.events = EventWriter(run.events_dir / "driver.jsonl", run=run.run)

    def resume(self, global_step: int) -> int:
        """Goes back to what was known at checkpoint ``global_step``; returns the steps forgotten."""
        return self.history.rewind(global_step)

    def known(self, global_step: int) -> LengthHistory:
        """Length history as of a global step."""
        return self.history.view(self._config.alpha, as_of=global_step)

    def save_plans(self, plans: Sequence[EpochPlan]) -> None:
        """Writes an epoch's plans."""
        for replica, plan in enumerate(plans):
            plan.save(plan_file(self.path, plan.epoch, replica if len(plans) > 1 else None))

    def record(self, global_step: int, epoch: int, observed: Sequence[Observation]) -> None:
        """A finished rollout step, in one transaction; then lengths.jsonl, which `flexfloor plan` reads."""
        self.history.record_step(global_step, epoch, observed)
        write_lengths(self.path / "lengths.jsonl", self.history.observations())

    def save_responses(self, lines: Iterable[dict[str, Any]]) -> None:
        """Appends to responses.jsonl (the format of `flexfloor rollout`)."""
        with (self.path / "responses.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)

    def close(self) -> None:
        """Closes history and events."""
        self.history.close()
        self.events.close()


def plan_file(run_dir: str | Path, epoch: int, replica: int | None = None) -> Path:
    """Where an epoch's plan lies."""
    return (
        Path(run_dir)
        / "plans"
        / (f"epoch-{epoch}.json" if replica is None else f"epoch-{epoch}-replica-{replica}.json")
    )
