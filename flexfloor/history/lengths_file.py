"""lengths.jsonl: one line an item and epoch, the file that `flexfloor plan` reads (planner.md section 7)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flexfloor.errors import InputError
from flexfloor.history.records import Observation

_REMEDY = '{"item_id": "a", "epoch": 0, "prompt_tokens": 12, "lengths": [21, 19]}'

_MOST = 2**31 - 1


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    item_id: str = Field(min_length=1)
    epoch: int = Field(ge=0, le=_MOST)
    prompt_tokens: int = Field(ge=0, le=_MOST)
    lengths: list[Annotated[int, Field(ge=1, le=_MOST)]] = Field(min_length=1)
    censored: list[Annotated[int, Field(ge=0)]] = []


def read_lengths(path: str | Path) -> list[Observation]:
    """Reads all observations of a lengths file, in file order.

    Raises:
        InputError: missing, empty or malformed file, or an (item, epoch) that stands twice; names file, line, field.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(f"cannot be read ({reason}); name a lengths.jsonl", file=path) from error
    first_line: dict[tuple[str, int], int] = {}
    observations = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        seen = _parse(line, path, number)
        key = (seen.item_id, seen.epoch)
        if key in first_line:
            what = f"item {seen.item_id!r} in epoch {seen.epoch} already stands in line {first_line[key]}; keep one"
            raise InputError(what, file=path, line=number, field="item_id")
        first_line[key] = number
        observations.append(seen)
    if not observations:
        raise InputError(f"is empty; give it lines such as {_REMEDY}", file=path)
    return observations


def _parse(line: str, path: str | Path, number: int) -> Observation:
    try:
        data = json.loads(line, object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or str(error)
        raise InputError(f"is no JSON ({reason}); expected {_REMEDY}", file=path, line=number) from error
    if not isinstance(data, dict):
        raise InputError(f"must be a JSON object such as {_REMEDY}", file=path, line=number)
    try:
        parsed = _Line.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        what = {"extra_forbidden": "unknown field; remove it", "missing": "is missing; add it"}.get(first["type"])
        got = str(first["input"])[:60]
        raise InputError(
            what or f"{first['msg'][0].lower()}{first['msg'][1:]}, got {got}",
            file=path,
            line=number,
            field=".".join(map(str, first["loc"])) or None,
        ) from error
    if len(set(parsed.censored)) < len(parsed.censored) or any(i >= len(parsed.lengths) for i in parsed.censored):
        what = f"must hold distinct indices below {len(parsed.lengths)}"
        raise InputError(what, file=path, line=number, field="censored")
    return Observation(
        parsed.item_id, parsed.epoch, parsed.prompt_tokens, tuple(parsed.lengths), tuple(parsed.censored)
    )


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        raise ValueError("a field stands twice")
    return data


def write_lengths(path: str | Path, observations: Iterable[Observation]) -> None:
    """Writes observations as lengths.jsonl, whole or not at all; `censored` only where there is any.

    Raises:
        InputError: the file cannot be written.
    """
    target = Path(path)
    scratch = target.with_name(target.name + ".part")
    lines = []
    for seen in observations:
        data: dict[str, Any] = {
            "item_id": seen.item_id,
            "epoch": seen.epoch,
            "prompt_tokens": seen.prompt_tokens,
            "lengths": list(seen.lengths),
        }
        if seen.censored:
            data["censored"] = list(seen.censored)
        lines.append(json.dumps(data, ensure_ascii=False) + "\n")
    try:
        scratch.write_text("".join(lines), encoding="utf-8")
        scratch.replace(target)
    except OSError as error:
        raise InputError(f"cannot be written ({error.strerror}); name a writable place", file=target) from error
