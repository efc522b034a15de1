"""What a run's responses.jsonl and lengths.jsonl add to the ledger: lengths, finish reasons, cap hits, preemptions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flexfloor.errors import InputError


class ResponseLine(BaseModel):
    """One line of responses.jsonl, as far as the ledger reads it."""

    model_config = ConfigDict(extra="allow", strict=True)

    epoch: int = Field(ge=0)
    step: int = Field(ge=0)
    token_ids: list[int]
    finish_reason: str | None = None
    num_preempted: int = Field(default=0, ge=0)


class LengthsLine(BaseModel):
    """One line of lengths.jsonl: response lengths of one item in one epoch (tokens)."""

    model_config = ConfigDict(extra="allow", strict=True)

    epoch: int = Field(ge=0)
    lengths: list[int]
    censored: list[int] = []


class StepResponses(BaseModel):
    """Responses of one step: lengths (tokens), how many a length limit stopped, how often they were preempted."""

    lengths: list[int] = []
    stopped_by_length: int = 0
    preemptions: int = 0


class RunRecords(BaseModel):
    """What a run folder holds beside its events; None or empty where the file is not there."""

    steps: dict[tuple[int, int], StepResponses] | None = None
    lengths: dict[int, list[int]] = {}
    censored: dict[int, int] | None = None
    problems: list[str] = []


Line = TypeVar("Line", bound=BaseModel)


def read_records(run_dir: str | Path) -> RunRecords:
    """Read RUN_DIR/responses.jsonl and RUN_DIR/lengths.jsonl, or its lengths-seed-*.jsonl, where they exist.

    Raises:
        InputError: a malformed line other than a half-written last one; names file, line and field.
    """
    root, found = Path(run_dir), RunRecords()
    responses, lengths = root / "responses.jsonl", root / "lengths.jsonl"
    files = [lengths] if lengths.is_file() else sorted(root.glob("lengths-seed-*.jsonl"))
    if responses.is_file():
        found.steps = {}
        for line in _read_lines(responses, ResponseLine, found.problems):
            step = found.steps.setdefault((line.epoch, line.step), StepResponses())
            step.lengths.append(len(line.token_ids))
            step.stopped_by_length += line.finish_reason == "length"
            step.preemptions += line.num_preempted
    censored: dict[int, int] = {}
    for file in files:
        for item in _read_lines(file, LengthsLine, found.problems):
            found.lengths.setdefault(item.epoch, []).extend(item.lengths)
            censored[item.epoch] = censored.get(item.epoch, 0) + len(item.censored)
    found.censored = censored if files else None
    return found


def kept_tokens(mask_tokens: int, *, cap: int | None, limit: int, ends_with_eos: bool) -> int:
    """Response tokens of one mask that count as work (seed 001 section 5.1, spec of W).

    One proven padding EOS is not counted: only where a cap below the global limit stopped the response and its mask
    holds the first padding EOS beyond that cap. An EOS that was generated counts.

    Args:
        mask_tokens: ones in the response mask.
        cap: the step's cap (tokens), None for none.
        limit: the global limit (tokens).
        ends_with_eos: whether the last token of the mask is an EOS.
    """
    padded = cap is not None and cap < limit and mask_tokens == cap + 1 and ends_with_eos
    return mask_tokens - 1 if padded else mask_tokens


def _read_lines(path: Path, model: type[Line], problems: list[str]) -> Iterator[Line]:
    lines = path.read_bytes().split(b"\n")
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        try:
            yield model.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors()[0]
            if first["type"] == "json_invalid" and number == len(lines):
                problems.append(f"log: {path}:{number}: half-written last line skipped (the process was killed)")
                continue
            field = ".".join(str(part) for part in first["loc"]) or None
            raise InputError(first["msg"], file=path, line=number, field=field) from None
