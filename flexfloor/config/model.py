"""The `flexfloor:` section as one typed, frozen object.

verl reads the same section, so a key means the same in both places. Contradictions between keys are refused here,
with the remedy; the reader in `yaml_file` adds file and line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from flexfloor.config.sections import (
    CaptureConfig,
    Count,
    EngineConfig,
    ExactDecimal,
    FloorsConfig,
    HistoryConfig,
    KvConfig,
    Natural,
    RateConfig,
    Real,
    RepairConfig,
    RolloutConfig,
    Section,
    SolverConfig,
    TailGuardConfig,
    VerlConfig,
)
from flexfloor.exchange import Hardware, refused
from flexfloor.plan import Method, Residency, canonical_json

ADMISSION_METHODS: tuple[Method, ...] = ("fixed", "minskew", "flex")
"""Methods that admit groups by KV capacity and may shrink; the others keep the full world."""


class ContradictionError(ValueError):
    """Two settings that cannot both hold; ``field`` is the one to change."""

    def __init__(self, field: str, what: str) -> None:
        self.field, self.what = field, what
        super().__init__(f"{field}: {what}")


def _named_solver(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class FlexFloorConfig(Section):
    """All settings of planner, driver and engine.

    Attributes:
        world_size: ranks N of one EP group.
        responses_per_prompt: responses n of a prompt.
        step_prompts: prompts b of a step.
        floors: supported EP sizes by residency.
        residency: residency policy that is planned for.
        alpha: EMA weight of the old prediction, planner.md section 2.
        mu: safety factor on historical lengths, an exact decimal.
        kv, tail_guard, repair, capture, rate, solver, history, engine, rollout, verl: sections.
        method: planning method, planner.md section 7.
        fixed_floor: floor of method ``fixed``.
        rank_order: physical ranks in the order they leave; None is 0, 1, 2 and so on.
        num_experts: experts of a layer; every floor must divide it when given.
        hardware: device generation whose operators limit the EP sizes (``ascend-a2``, ``ascend-a3``); None: none does.
    """

    world_size: Count
    responses_per_prompt: Count
    step_prompts: Count
    floors: FloorsConfig = FloorsConfig()
    residency: Residency = "natural"
    alpha: Real = Field(default=0.3, ge=0, lt=1)
    mu: ExactDecimal = Field(default=1.16, validate_default=True, ge=1)
    kv: KvConfig = KvConfig()
    tail_guard: TailGuardConfig = TailGuardConfig()
    repair: RepairConfig = RepairConfig()
    capture: CaptureConfig = CaptureConfig()
    rate: RateConfig = RateConfig()
    method: Method = "flex"
    fixed_floor: Count | None = None
    rank_order: tuple[Natural, ...] | None = None
    num_experts: Count | None = None
    hardware: Hardware | None = None
    solver: Annotated[SolverConfig, BeforeValidator(_named_solver)] = SolverConfig()
    history: HistoryConfig = HistoryConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    verl: VerlConfig = VerlConfig()

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        for contradiction in self._contradictions():
            raise contradiction
        return self

    def _contradictions(self) -> Iterator[ContradictionError]:
        for residency, sizes in (("natural", self.floors.natural), ("planned", self.floors.planned)):
            for floor in sizes:
                if floor > self.world_size:
                    what = f"floor {floor} is above world_size {self.world_size}; remove it or raise world_size"
                    yield ContradictionError(f"floors.{residency}", what)
                if self.num_experts is not None and self.num_experts % floor:
                    what = f"floor {floor} does not divide num_experts {self.num_experts}; remove it"
                    yield ContradictionError(f"floors.{residency}", what)
        if self.num_experts is not None and self.num_experts % self.world_size:
            yield ContradictionError("world_size", f"must divide num_experts {self.num_experts}")
        yield from self._exchange_contradictions()
        if self.method == "fixed" and self.fixed_floor is None:
            yield ContradictionError("fixed_floor", "method 'fixed' needs it; name one of `floors`")
        if self.fixed_floor is not None and self.fixed_floor not in self.admissible_sizes:
            sizes_text = ", ".join(map(str, self.admissible_sizes))
            yield ContradictionError("fixed_floor", f"must be one of the {self.residency} floors ({sizes_text})")
        if self.rank_order is not None and sorted(self.rank_order) != list(range(self.world_size)):
            yield ContradictionError("rank_order", f"must hold each rank from 0 to {self.world_size - 1} once")
        if self.rate.enabled is True and self.rate.table is None:
            yield ContradictionError("rate.table", "is missing, but rate.enabled is true; name a CSV of step times")
        limit = self.rollout.max_tokens
        if limit is not None and limit != self.tail_guard.l_max:
            what = f"is {limit}, but tail_guard.l_max is {self.tail_guard.l_max}; make them equal or leave it out"
            yield ContradictionError("rollout.max_tokens", what)

    def _exchange_contradictions(self) -> Iterator[ContradictionError]:
        if self.hardware is None:
            return
        if self.num_experts is None:
            yield ContradictionError("num_experts", f"is missing, but hardware is {self.hardware}; name it")
            return
        for size in self.admissible_sizes:
            reason = refused(self.hardware, size, self.num_experts)
            if reason is not None:
                field = "world_size" if size == self.world_size else f"floors.{self.residency}"
                yield ContradictionError(field, f"{reason}; choose another size")

    @property
    def admissible_sizes(self) -> tuple[int, ...]:
        """EP sizes of the chosen residency, descending, the world size first."""
        return tuple(sorted({self.world_size, *getattr(self.floors, self.residency)}, reverse=True))

    @property
    def capacity(self) -> dict[int, int]:
        """KV tokens a rank by EP size, for the chosen residency; sizes without capacity are absent."""
        table: dict[int, int | None] = getattr(self.kv.capacity, self.residency)
        return {size: tokens for size, tokens in table.items() if tokens is not None}

    @property
    def leave_order(self) -> tuple[int, ...]:
        """Physical ranks in the order they leave."""
        return self.rank_order if self.rank_order is not None else tuple(range(self.world_size))

    def resolved(self) -> dict[str, Any]:
        """All settings, defaults filled in, as plain data that `load_config` reads back under `flexfloor:`."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """SHA-256 (hex) of all settings, defaults filled in."""
        return hashlib.sha256(canonical_json(self.resolved()).encode()).hexdigest()
