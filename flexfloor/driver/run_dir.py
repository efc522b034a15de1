"""RUN_DIR: what a run leaves on disk (runtime.md, "Files").

Order within a step: responses, then the history's one transaction, then lengths.jsonl. So a run that is cut off holds
in its history every finished step and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from flexfloor.config import FlexFloorConfig
from flexfloor.driver.orders import Response
from flexfloor.errors import InputError
from flexfloor.events import read_events
from flexfloor.history import HistoryStore, Observation, write_lengths
from flexfloor.ledger import load_run, report_json
from flexfloor.plan import EpochPlan


class RunDirectory:
    """The folder of one run; several epochs may follow one another in it.

    Args:
        path: the folder; created when missing.
        config: the configuration.

    Raises:
        InputError: the folder cannot be written.
    """

    def __init__(self, path: str | Path, config: FlexFloorConfig) -> None:
        self.path = Path(path).absolute()
        self._config = config
        try:
            self.events_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot be made ({error.strerror}); name a writable place", file=self.path) from error
        self.history = HistoryStore(self.path / config.history.path)

    @property
    def events_dir(self) -> Path:
        """Folder of the event files."""
        return self.path / "events"

    @property
    def board(self) -> Path:
        """The status board: state and phase of every rank, readable at any time."""
        return self.path / "board"

    @property
    def log(self) -> Path:
        """What the server's processes print."""
        return self.path / "logs" / "server.log"

    @property
    def run_id(self) -> str:
        """Run id of the events."""
        return self.path.name

    def begin(self, plan: EpochPlan, epoch: int) -> None:
        """Writes configuration and plan.

        Raises:
            InputError: the folder holds responses or events of this epoch already.
        """
        if any(seen.epoch == epoch for seen in self.history.observations()) or epoch in self._begun():
            raise InputError(f"holds epoch {epoch} already; name another --out, or a later --epoch", file=self.path)
        text = yaml.safe_dump({"flexfloor": self._config.resolved()}, sort_keys=False, allow_unicode=True)
        (self.path / "config.yaml").write_text(text, encoding="utf-8")
        plan.save(self.path / "plan.json")

    def _begun(self) -> set[int | None]:
        """Epochs of which a step has begun, even where the run ended before it was over."""
        if not any(self.events_dir.glob("*.jsonl")):
            return set()
        return {event.epoch for event in read_events(self.path).events if event.event == "rollout_start"}

    def finish_step(self, epoch: int, step: int, responses: Sequence[Response]) -> None:
        """Writes a finished step's responses, then its history, then lengths.jsonl."""
        lines = [json.dumps(response_json(epoch, step, response), ensure_ascii=False) + "\n" for response in responses]
        with (self.path / "responses.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        last = self.history.last_step
        self.history.record_step(0 if last is None else last + 1, epoch, observations(epoch, responses))
        write_lengths(self.path / "lengths.jsonl", self.history.observations())

    def report(self) -> dict[str, Any]:
        """Writes report.json from the events and returns it."""
        report = report_json(load_run(self.path))
        text = json.dumps(report, indent=1, allow_nan=False) + "\n"
        (self.path / "report.json").write_text(text, encoding="utf-8")
        return report

    def close(self) -> None:
        """Closes the history."""
        self.history.close()


def response_json(epoch: int, step: int, response: Response) -> dict[str, Any]:
    """One line of responses.jsonl."""
    data: dict[str, Any] = {
        "item_id": response.request.item_id,
        "epoch": epoch,
        "step": step,
        "sample": response.request.sample,
        "rank": response.rank,
        "token_ids": list(response.token_ids),
    }
    if response.logprobs is not None:
        data["logprobs"] = list(response.logprobs)
    return {**data, "finish_reason": response.finish_reason, "num_preempted": response.num_preempted}


def observations(epoch: int, responses: Iterable[Response]) -> list[Observation]:
    """What a step's responses tell the history, one observation an item, samples in order."""
    by_item: dict[str, list[Response]] = {}
    for response in responses:
        by_item.setdefault(response.request.item_id, []).append(response)
    found = []
    for item_id, own in by_item.items():
        own.sort(key=lambda response: response.request.sample)
        kept = [response for response in own if response.token_ids]
        if kept:
            found.append(
                Observation(
                    item_id,
                    epoch,
                    kept[0].prompt_tokens,
                    tuple(len(response.token_ids) for response in kept),
                    tuple(index for index, response in enumerate(kept) if response.censored),
                )
            )
    return found
