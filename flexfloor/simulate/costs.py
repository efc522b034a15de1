"""What things cost in a simulated rollout: decode steps, prefill, transitions, sleep, restore.

The defaults are figures measured on two H200 with the Qwen3-30B-A3B shape (48 layers, 128 experts, 256-token prompts,
vLLM 0.26 and 0.30): decode at EP 1 and EP 2; the parts of a live EP 2 -> EP 1 -> EP 2. `prefill_tokens_per_s` is an
assumption. A costs file (YAML, section ``costs:``) replaces any of them; `flexfloor simulate --calibrate` writes one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flexfloor.config import FlexFloorConfig
from flexfloor.errors import InputError
from flexfloor.step_times import Row, StepTimes

SECTION = "costs"
Load = Literal["largest", "mean"]
Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]

H200_MS: Mapping[tuple[int, bool], Mapping[int, float]] = {
    (1, False): {1: 4.15, 8: 9.16, 32: 15.7, 64: 18.0, 128: 19.1, 256: 22.4},
    (2, False): {1: 5.27, 8: 8.10, 32: 12.0, 64: 13.4, 128: 14.9, 256: 18.0},
    (2, True): {1: 5.66, 8: 8.54, 64: 13.8, 256: 18.0},
}
"""Decode step in milliseconds by (EP size, a rank idle) and batch a rank: 2 x H200, vLLM 0.26, FULL_DECODE_ONLY."""

H200_NOTE = (
    "step times: 2 x H200, Qwen3-30B-A3B shape, dummy bf16 weights, 256-token prompts, EP 1 and EP 2, one run; "
    "context beyond that is not in the table"
)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ShrinkCosts(_Record):
    """One shrink of one residency, by part, seconds unless said otherwise; decoding stands still for their sum.

    Attributes:
        agree, prepare, channel, groups, switch, trial: as in the ``stage_commit`` event.
        move: fixed part of the row transfer; ``expert_bytes`` and ``link_bytes_per_s`` add what the moved rows take.
        capture: fixed part of the capture.
        capture_bucket: capture of one decode bucket more; only buckets that the survivors can still reach are captured.
        move_rows: whether rows are moved at all (planned residency holds them already).
        first_step_extra: how much longer the first step in the new world takes.
    """

    agree: Seconds = 0.0
    prepare: Seconds = 0.0
    channel: Seconds = 0.0
    move: Seconds = 0.0
    groups: Seconds = 0.0
    switch: Seconds = 0.0
    capture: Seconds = 0.0
    capture_bucket: Seconds = 0.0
    trial: Seconds = 0.0
    first_step_extra: Seconds = 0.0
    move_rows: bool = Field(default=True, strict=True)


class ResidencyCosts(_Record):
    """Costs of one residency.

    Attributes:
        prepare_s: from rollout_start to the first step: rows and graphs that are made beforehand; charged only where
            the step may shrink.
        shrink: one shrink.
    """

    prepare_s: Seconds = 0.0
    shrink: ShrinkCosts = ShrinkCosts()


class Costs(_Record):
    """All costs but the decode table.

    Attributes:
        load: which batch of the world a decode step is charged for: ``largest`` of its ranks (each has a device of its
            own and waits for the slowest), or the ``mean`` over its members (ranks that share the cores of one host).
        step_scale: factor on every decode step time.
        prefill_tokens_per_s: prompt tokens that one rank computes a second.
        prefill_step_s: shortest step with a prefill or a recomputation in it: such steps leave the decode graphs.
        pad_to_captures: whether a batch pays for the next larger captured batch size.
        start_s: from rollout_start to the first step, every method.
        finish_s: from the end of generation (and of the restore) to rollout_end, every method.
        sleep_s: from detach to the moment that a leaver's memory is free; decoding goes on meanwhile.
        wake_s: a leaver's memory comes back; while the survivors decode their last tokens, where it left before.
        restore_s: the full world's return without what ``wake_s`` says: rows, groups, graphs.
        expert_bytes: one expert's weights over all layers.
        link_bytes_per_s: transfer rate into or out of one rank.
        natural, planned: by residency.
        notes: what a reader should know about these figures.
    """

    load: Load = "largest"
    step_scale: Rate = 1.0
    prefill_tokens_per_s: Rate = 20_000.0
    prefill_step_s: Seconds = 0.0
    pad_to_captures: bool = Field(default=True, strict=True)
    start_s: Seconds = 0.0
    finish_s: Seconds = 0.0
    sleep_s: Seconds = 0.0
    wake_s: Seconds = 0.0
    restore_s: Seconds = 0.0
    expert_bytes: Annotated[int, Field(strict=True, ge=0)] = 0
    link_bytes_per_s: Rate = 359e9
    natural: ResidencyCosts = ResidencyCosts()
    planned: ResidencyCosts = ResidencyCosts()
    notes: tuple[str, ...] = ()

    def of(self, residency: str) -> ResidencyCosts:
        """Costs of one residency."""
        return self.planned if residency == "planned" else self.natural


FREE = Costs(prefill_tokens_per_s=1e12)
"""Nothing but decode steps takes time."""

H200 = Costs(
    prefill_step_s=0.111,
    sleep_s=0.10,
    restore_s=0.45,
    expert_bytes=48 * 3 * 2048 * 768 * 2,
    natural=ResidencyCosts(
        shrink=ShrinkCosts(agree=0.0015, switch=0.0007, capture_bucket=0.065, first_step_extra=0.005)
    ),
    planned=ResidencyCosts(
        prepare_s=1.6,
        shrink=ShrinkCosts(agree=0.0013, switch=0.0008, first_step_extra=0.005, move_rows=False),
    ),
    notes=(
        "transitions: parts of a live EP 2 -> EP 1 -> EP 2 on 2 x H200 with kept groups and graphs (sleep 0.10 s, "
        "restore 0.45 s, capture 0.065 s a bucket, rows at 359 GB/s); other EP sizes are assumed to cost the same",
        "prefill at 20,000 tokens/s a rank is an assumption; a step with a prefill lasts at least 0.111 s (eager EP 2)",
    ),
)


def h200_table() -> StepTimes:
    """The measured H200 decode table."""
    rows = [Row(ep, b, ms / 1e3, idle) for (ep, idle), by in H200_MS.items() for b, ms in by.items()]
    return StepTimes(rows, "the built-in H200 table")


def default_costs(config: FlexFloorConfig) -> Costs:
    """The H200 figures, with what the configuration's ``rate`` section says in their place."""
    # The planner's own cost figures, where its configuration has them.
    rate: Any = getattr(config, "rate", None)
    changed: dict[str, Any] = {}
    if rate is not None and rate.transition_s > 0:
        shrink = ShrinkCosts(switch=rate.transition_s)
        changed = {
            "natural": H200.natural.model_copy(update={"shrink": shrink}),
            "planned": H200.planned.model_copy(update={"shrink": shrink.model_copy(update={"move_rows": False})}),
            "expert_bytes": 0,
        }
        before = getattr(getattr(rate, "transitions", None), "prepare_s", 0.0)
        changed[config.residency] = changed[config.residency].model_copy(update={"prepare_s": before})
    for name, source in (("sleep_s", "release_s"), ("restore_s", "restore_s")):
        if getattr(rate, source, 0.0) > 0:
            changed[name] = getattr(rate, source)
    if config.engine.enforce_eager:
        changed |= {"pad_to_captures": False, "prefill_step_s": 0.0}
    if not changed:
        return H200
    note = f"from the configuration: {', '.join(sorted(changed))}"
    return H200.model_copy(update={**changed, "notes": (*H200.notes, note)})


def load_costs(path: str | Path, base: Costs = H200) -> Costs:
    """Reads a costs file; what it leaves out is taken from ``base``.

    Raises:
        InputError: missing or malformed file; names file, line and field.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(
            f"cannot be read ({reason}); name a YAML file with a `{SECTION}:` section", file=path
        ) from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else None
        raise InputError(f"is no YAML ({getattr(error, 'problem', error)})", file=path, line=line) from error
    section = data.get(SECTION) if isinstance(data, dict) else None
    if not isinstance(section, dict) or root is None:
        raise InputError(f"has no `{SECTION}:` section with settings; add it at the top level", file=path)
    try:
        return Costs.model_validate(_merged(base.model_dump(), {"notes": [f"costs: {Path(path).name}"], **section}))
    except ValidationError as error:
        first = error.errors()[0]
        where = [str(part) for part in first["loc"]]
        what = {"extra_forbidden": "unknown key; remove it"}.get(first["type"])
        message = what or f"{first['msg'][0].lower()}{first['msg'][1:]}, got {first['input']!r:.40}"
        line = _line_of(root, [SECTION, *where])
        raise InputError(message, file=path, line=line, field=".".join([SECTION, *where])) from error


def save_costs(costs: Costs, path: str | Path) -> None:
    """Writes a costs file that `load_costs` reads back.

    Raises:
        InputError: the file cannot be written.
    """
    text = yaml.safe_dump({SECTION: costs.model_dump(mode="json")}, sort_keys=False)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written ({error.strerror}); name a writable place", file=path) from error


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _line_of(node: yaml.Node, where: Sequence[str]) -> int:
    line: int = node.start_mark.line + 1
    for part in where:
        if not isinstance(node, yaml.MappingNode):
            return line
        pair = next(((key, value) for key, value in node.value if str(key.value) == part), None)
        if pair is None:
            return line
        line, node = pair[0].start_mark.line + 1, pair[1]
    return line
