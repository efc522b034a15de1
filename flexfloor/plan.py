"""The plan of one epoch: all that planner, driver, engine and simulator share.

A plan is immutable. Its JSON (`flexfloor.plan/1`, planner.md section 7) is stable; fields that no reader
knows are refused, so that a typing error cannot be taken for a setting. Times are token positions of the
rollout (a response of 93 tokens completes at 93), areas are token positions times ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from flexfloor.errors import InputError

SCHEMA: Literal["flexfloor.plan/1"] = "flexfloor.plan/1"
Method = Literal["verl", "lengthsort", "ls_tg", "fixed", "minskew", "flex"]
Residency = Literal["natural", "planned"]
Tokens = int | float
"""A number of tokens; whole unless an EMA made it fractional."""

AREA_TOLERANCE = 1e-3
"""Slack for release areas recomputed from JSON floats, in token-ranks."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class RankPlan(_Record):
    """What one rank starts with.

    Attributes:
        rank: index of the rank in the full world.
        items: item ids of its prompts, repeats allowed; empty for a rank that starts without prompts.
        completion: predicted completion M_e in tokens, 0 without prompts.
        peak_tokens: active-token peak A of the group (prompts apart), planner.md section 4.
    """

    rank: int = Field(ge=0)
    items: tuple[str, ...]
    completion: Tokens = Field(ge=0)
    peak_tokens: int = Field(ge=0)


class PredictedStep(_Record):
    """What a step is expected to take, by measured step times; prefill and queueing are not in it.

    Attributes:
        seconds: rollout window T, preparation and restore inside.
        rank_seconds: occupied rank-time H.
        efficiency: predicted response tokens a rank-second, E = W/H.
    """

    seconds: float = Field(ge=0)
    rank_seconds: float = Field(ge=0)
    efficiency: float = Field(ge=0)


class StepPlan(_Record):
    """One rollout step: placement, cap and ladder.

    Attributes:
        step: index of the step in its epoch.
        items: item ids of the step in layout order, repeats allowed.
        cap: response cap of TailGuard in tokens; None where only the global limit holds.
        tail: predicted completion T of the longest group.
        floor: smallest EP size of ``ladder``.
        ladder: EP sizes, strictly decreasing, beginning at the world size.
        quorum_times: tau_s of each stage after the first; ``quorum_times[s-1]`` belongs to ``ladder[s]``.
        release_area: sum of (f_{s-1} - f_s) * (T - tau_s), token-ranks (seed 001, equation 10).
        residency: how survivors come by their expert rows.
        kv_tokens_per_rank: KV budget of the floor; None when the capacity table does not hold the floor.
        capture_sizes: decode batch sizes to capture, ascending.
        kv_safe: whether every group passed the admission of the floor.
        optimality_gap: proven bound on the relative distance of ``release_area`` to the optimum: of all floors, or of
            this floor where another one has more area but less predicted efficiency.
        excluded_floors: floors that were no candidates and why.
        ranks: one entry a rank, by rank.
        notes: what a reader of the plan should know; absent from the JSON when empty.
        predicted: what the step is expected to take; absent from the JSON without a table of step times.
    """

    step: int = Field(ge=0)
    items: tuple[str, ...]
    cap: int | None = Field(ge=1)
    tail: Tokens = Field(ge=0)
    floor: int = Field(ge=1)
    ladder: tuple[int, ...] = Field(min_length=1)
    quorum_times: tuple[Tokens, ...]
    release_area: Tokens = Field(ge=0)
    residency: Residency
    kv_tokens_per_rank: int | None = Field(ge=0)
    capture_sizes: tuple[int, ...]
    kv_safe: bool
    optimality_gap: float = Field(ge=0)
    excluded_floors: dict[str, str]
    ranks: tuple[RankPlan, ...] = Field(min_length=1)
    notes: tuple[str, ...] = ()
    predicted: PredictedStep | None = None

    @property
    def world_size(self) -> int:
        """Ranks of the full world."""
        return self.ladder[0]

    @property
    def admitted_kv_tokens(self) -> int | None:
        """KV tokens a rank that the step's admission counts on; None where it is not safe or no capacity is known."""
        return self.kv_tokens_per_rank if self.kv_safe else None

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the step's canonical JSON: what the ranks agree on before they decide anything."""
        return hashlib.sha256(canonical_json(self.model_dump(mode="json")).encode()).hexdigest()

    def group(self, rank: int) -> RankPlan:
        """The entry of one rank."""
        return self.ranks[rank]

    @model_serializer(mode="wrap")
    def _serialise(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        if not self.notes:
            data.pop("notes", None)
        if self.predicted is None:
            data.pop("predicted", None)
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        pairs = list(zip(self.ladder, self.ladder[1:], strict=False))
        if any(small >= large for large, small in pairs) or self.ladder[-1] < 1:
            raise _fault("ladder", f"must decrease strictly and stay positive, got {list(self.ladder)}")
        if self.floor != self.ladder[-1]:
            raise _fault("floor", f"must be the last size of the ladder ({self.ladder[-1]}), got {self.floor}")
        if len(self.quorum_times) != len(pairs):
            raise _fault("quorum_times", f"needs one time for each of {len(pairs)} stages")
        if list(self.quorum_times) != sorted(self.quorum_times):
            raise _fault("quorum_times", "must not decrease")
        if [entry.rank for entry in self.ranks] != list(range(self.ladder[0])):
            raise _fault("ranks", f"must list the ranks 0 to {self.ladder[0] - 1}, each once, in order")
        placed = Counter(item for entry in self.ranks for item in entry.items)
        if placed != Counter(self.items):
            odd = sorted((placed - Counter(self.items)) + (Counter(self.items) - placed))[0]
            raise _fault("ranks", f"must place every item of `items` once; item {odd!r} is missing or extra")
        if list(self.capture_sizes) != sorted(set(self.capture_sizes)) or any(s < 1 for s in self.capture_sizes):
            raise _fault("capture_sizes", "must be distinct, positive and ascending")
        completions = sorted(entry.completion for entry in self.ranks)
        if completions[-1] != self.tail:
            raise _fault("tail", f"must be the longest completion ({completions[-1]}), got {self.tail}")
        for (_, size), time in zip(pairs, self.quorum_times, strict=True):
            quorum = self.ladder[0] - size
            if completions[quorum - 1] > time:
                raise _fault("quorum_times", f"the quorum of {quorum} ranks is not complete at {time}")
        area = release_area(self.ladder, self.quorum_times, self.tail)
        if abs(area - self.release_area) > AREA_TOLERANCE:
            raise _fault("release_area", f"must be {area} by ladder, quorum_times and tail, got {self.release_area}")
        return self


class EpochPlan(_Record):
    """The steps of one epoch and the configuration they were planned for.

    Attributes:
        schema_version: format name, `flexfloor.plan/1` (JSON key ``schema``).
        epoch: the epoch that is planned.
        world_size: ranks N of the EP group.
        method: planning method.
        config_digest: digest of the configuration the plan was made from.
        steps: in rollout order.
        swaps: repairs: ``[step, item out, item in]``; the item out went to the preceding step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)

    schema_version: Literal["flexfloor.plan/1"] = Field(default=SCHEMA, alias="schema")
    epoch: int = Field(ge=0)
    world_size: int = Field(ge=1)
    method: Method
    config_digest: str
    steps: tuple[StepPlan, ...]
    swaps: tuple[tuple[int, str, str], ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for index, step in enumerate(self.steps):
            if step.step != index:
                raise _fault(f"steps.{index}.step", f"must be {index}, got {step.step}")
            if step.world_size != self.world_size:
                raise _fault(f"steps.{index}.ladder", f"must begin at world_size {self.world_size}")
        return self

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the whole plan's canonical JSON."""
        return hashlib.sha256(canonical_json(self.to_json()).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data, keys as in planner.md section 7."""
        return self.model_dump(mode="json", by_alias=True)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, whole or not at all.

        Raises:
            InputError: the file cannot be written.
        """
        target = Path(path)
        scratch = target.with_name(target.name + ".part")
        try:
            scratch.write_text(json.dumps(self.to_json(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
            scratch.replace(target)
        except OSError as error:
            raise InputError(f"cannot be written ({error.strerror}); name a writable place", file=target) from error

    @classmethod
    def load(cls, path: str | Path) -> EpochPlan:
        """Reads and checks a plan.

        Raises:
            InputError: the file is missing, no JSON, or not a valid plan; names file and field.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise InputError(f"cannot be read ({reason}); name a plan.json", file=path) from error
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            message = f"is no JSON ({error.msg}); write it with `flexfloor plan`"
            raise InputError(message, file=path, line=error.lineno) from error
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise _input_error(error, path) from error


class PlanFaultError(ValueError):
    """A plan that contradicts itself; ``field`` names where, inside the record that was checked."""

    def __init__(self, field: str, what: str) -> None:
        self.field, self.what = field, what
        super().__init__(f"{field}: {what}")


def _fault(field: str, what: str) -> PlanFaultError:
    return PlanFaultError(field, what)


def release_area(ladder: tuple[int, ...], quorum_times: tuple[Tokens, ...], tail: Tokens) -> Tokens:
    """Release area of a schedule in token-ranks (seed 001, equation 10)."""
    stages = zip(ladder, ladder[1:], quorum_times, strict=False)
    return sum((large - small) * (tail - time) for large, small, time in stages)


def canonical_json(data: Any) -> str:
    """JSON with sorted keys and no spaces: equal data has equal text."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _input_error(error: ValidationError, path: str | Path) -> InputError:
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part not in ("int", "float")]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, PlanFaultError):
        return InputError(cause.what, file=path, field=".".join([*where, cause.field]))
    what = {"extra_forbidden": "unknown field; remove it", "missing": "is missing"}.get(first["type"], first["msg"])
    return InputError(what, file=path, field=".".join(where) or None)
