"""What is generated: prompts.jsonl, the responses a prompt asks for, and their seeds.

A line is ``{"item_id": "a", "prompt": "text"}`` or ``{"item_id": "a", "prompt_token_ids": [1, 2]}``, with optional
``max_tokens``, ``n`` and ``seed``. With ``ignore_eos`` in the configuration ``max_tokens`` is the length itself: a
workload of constructed lengths is written so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flexfloor.errors import InputError

_REMEDY = '{"item_id": "a", "prompt": "text"}'
_SEED_BITS = 62


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        item_id: stable identity of the dataset row.
        content: the text, or its token ids.
        max_tokens: own response limit, tokens; None leaves the run's.
        n: own number of responses; None leaves the run's.
        seed: own seed of its first response; None derives seeds from item, epoch and sample.
    """

    item_id: str
    content: str | tuple[int, ...]
    max_tokens: int | None = None
    n: int | None = None
    seed: int | None = None

    def response_seed(self, epoch: int, sample: int, base: int = 0) -> int:
        """Seed of one response: own seed plus ``sample``, else `response_seed` of (item_id, epoch, sample)."""
        if self.seed is not None:
            return self.seed + sample
        return response_seed(self.item_id, epoch, sample, base)


class Workload(Mapping[str, Prompt]):
    """The prompts of a file by item id, in file order.

    Args:
        prompts: the prompts, item ids distinct.
        file: where they came from, for messages.
    """

    def __init__(self, prompts: Sequence[Prompt], file: str | Path | None = None) -> None:
        self._prompts = {prompt.item_id: prompt for prompt in prompts}
        self.file = file

    def __getitem__(self, item_id: str) -> Prompt:
        return self._prompts[item_id]

    def __iter__(self) -> Any:
        return iter(self._prompts)

    def __len__(self) -> int:
        return len(self._prompts)


def response_seed(item_id: str, epoch: int, sample: int, base: int = 0) -> int:
    """A seed of at most 62 bits, the same on every machine and in every run.

    Args:
        item_id: stable identity of the dataset row.
        epoch: the epoch.
        sample: index of the response among all of the item in that epoch.
        base: the run's base seed.
    """
    text = json.dumps([base, item_id, epoch, sample], ensure_ascii=False)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - _SEED_BITS)


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    item_id: str = Field(min_length=1)
    prompt: str | None = Field(default=None, min_length=1)
    prompt_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=0, lt=1 << _SEED_BITS)

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.prompt is None) == (self.prompt_token_ids is None):
            raise ValueError("give either `prompt` or `prompt_token_ids`")
        return self


def read_prompts(path: str | Path) -> Workload:
    """Reads prompts.jsonl.

    Raises:
        InputError: missing, empty or malformed file, or an item that stands twice; names file, line and field.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(f"cannot be read ({reason}); name a prompts.jsonl", file=path) from error
    prompts: list[Prompt] = []
    first_line: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        prompt = _parse(line, path, number)
        if prompt.item_id in first_line:
            what = f"{prompt.item_id!r} already stands in line {first_line[prompt.item_id]}; keep one"
            raise InputError(what, file=path, line=number, field="item_id")
        first_line[prompt.item_id] = number
        prompts.append(prompt)
    if not prompts:
        raise InputError(f"is empty; give it lines such as {_REMEDY}", file=path)
    return Workload(prompts, path)


def _parse(line: str, path: str | Path, number: int) -> Prompt:
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
        raise _input_error(error, path, number) from error
    content = parsed.prompt if parsed.prompt is not None else tuple(parsed.prompt_token_ids or ())
    return Prompt(parsed.item_id, content, parsed.max_tokens, parsed.n, parsed.seed)


def _input_error(error: ValidationError, path: str | Path, number: int) -> InputError:
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if cause is not None:
        return InputError(str(cause), file=path, line=number, field="prompt")
    what = {"extra_forbidden": "unknown field; remove it", "missing": "is missing; add it"}.get(first["type"])
    got = str(first["input"])[:60]
    return InputError(
        what or f"{first['msg'][0].lower()}{first['msg'][1:]}, got {got}",
        file=path,
        line=number,
        field=".".join(map(str, first["loc"])) or None,
    )


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        raise ValueError("a field stands twice")
    return data
