"""Sections of the `flexfloor:` configuration, one model a section.

Every model is frozen and refuses unknown keys. Numbers are strict: a quoted number or a boolean is a mistake.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

Count = Annotated[int, Field(strict=True, ge=1)]
Natural = Annotated[int, Field(strict=True, ge=0)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]


def _exact_decimal(value: Any) -> Decimal:
    """The decimal as written: 1.16 is 116/100, not the nearest binary fraction."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        raise ValueError("must be a decimal number such as 1.16")  # noqa: TRY004 (pydantic reports ValueError)
    try:
        number = Decimal(str(value))
    except InvalidOperation as error:
        raise ValueError(f"must be a decimal number such as 1.16, got {value!r}") from error
    if not number.is_finite():
        raise ValueError("must be finite")
    return number


ExactDecimal = Annotated[Decimal, BeforeValidator(_exact_decimal)]


def _capacity_keys(value: Any) -> Any:
    """Floors as integers: YAML gives them as integers, OmegaConf and JSON as digit strings."""
    if not isinstance(value, dict):
        return value
    table: dict[int, Any] = {}
    for key, tokens in value.items():
        digits = str(key)
        if isinstance(key, bool) or not digits.isascii() or not digits.isdigit() or int(digits) < 1:
            raise ValueError(f"floor {key!r} must be a positive integer")
        if int(digits) in table:
            raise ValueError(f"floor {digits} stands twice; keep one")
        table[int(digits)] = tokens
    return table


CapacityTable = Annotated[dict[int, Natural | None], BeforeValidator(_capacity_keys)]


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class FloorsConfig(Section):
    """Floors the runtime supports, by residency. The world size is implied.

    Attributes:
        natural: EP sizes for residency ``natural``, any order.
        planned: EP sizes for residency ``planned``.
    """

    natural: tuple[Count, ...] = ()
    planned: tuple[Count, ...] = ()


class CapacityConfig(Section):
    """Usable KV tokens a rank, measured, by residency and floor. A missing or null floor is excluded."""

    natural: CapacityTable = {}
    planned: CapacityTable = {}


class KvConfig(Section):
    """KV accounting of planner.md section 4.

    Attributes:
        block_tokens: tokens of a KV block; 1 accounts single tokens, as the paper does.
        prompt_sharing: whether the responses of a prompt share its full blocks.
        capacity: the measured table.
    """

    block_tokens: Count = 1
    prompt_sharing: bool = Field(default=True, strict=True)
    capacity: CapacityConfig = CapacityConfig()


class TailGuardConfig(Section):
    """TailGuard of planner.md section 3 (seed 001, equation 7).

    Attributes:
        enabled: whether steps get a cap below the global limit.
        q: quantile of the one-sided ratios.
        window: number K of epoch transitions the ratios come from.
        c_min: smallest cap in tokens.
        rounding: caps are multiples of it, in tokens.
        l_max: global response limit in tokens.
        eps: added to a prediction before it divides.
        initial_rho: ratio used before the first transition; None leaves steps without a cap.
    """

    enabled: bool = Field(default=True, strict=True)
    q: Real = Field(default=0.95, gt=0, le=1)
    window: Count = 3
    c_min: Count = 4096
    rounding: Count = 512
    l_max: Count = 16384
    eps: Real = Field(default=1e-6, gt=0)
    initial_rho: Annotated[Real, Field(ge=1)] | None = None


class RepairConfig(Section):
    """Bounded repair of planner.md section 5.

    Attributes:
        max_swaps: most prompts that may change places with the preceding step; 0 switches repair off.
        max_layouts: most layouts examined for one step before it falls back.
    """

    max_swaps: Natural = 2
    max_layouts: Count = 256


class CaptureConfig(Section):
    """Decode capture buckets of planner.md section 6.

    Attributes:
        max_sizes: most capture sizes a step may have.
    """

    max_sizes: Count = 8


class SolverConfig(Section):
    """The integer solver behind PuLP.

    Attributes:
        name: ``highs`` runs in this process; ``cbc`` starts a process a solve.
        time_limit_s: limit of one solve; a step that meets it reports its proven gap.
        max_columns: largest number of candidate groups that is given to the exact model.
    """

    name: Literal["highs", "cbc"] = "highs"
    time_limit_s: Real = Field(default=20.0, gt=0)
    max_columns: Count = 10000


def _auto_or_switch(value: Any) -> Any:
    if value == "auto" or isinstance(value, bool):
        return value
    raise ValueError(f"must be auto, true or false, got {value!r}")


class TransitionsConfig(Section):
    """Measured seconds of a shrink and of what follows it, for the residency that is planned for.

    Attributes:
        prepare_s: before the first decode step, where the step may shrink at all.
        shrink_s: decoding stands still for it, each shrink.
        release_s: from a shrink until the memory of its leavers is free; decoding goes on meanwhile.
        restore_s: return of the full world at the end of a step that shrank.
    """

    prepare_s: Real = Field(default=0.0, ge=0)
    shrink_s: Real = Field(default=0.0, ge=0)
    release_s: Real = Field(default=0.0, ge=0)
    restore_s: Real = Field(default=0.0, ge=0)


class RateConfig(Section):
    """Rate-aware planning: which floor pays at the measured speed of each EP size.

    Attributes:
        table: CSV of measured decode step times (`flexfloor.step_times`); relative paths start at the working
            directory.
        enabled: whether predictions are made; ``auto`` makes them where a table is given.
        eps: a plan may take this part longer than the fastest candidate.
        objective: ``efficiency`` chooses by predicted tokens a rank-second; ``release_area`` chooses as without a
            table and only reports the prediction.
        transitions: what shrinking costs.
        extrapolate: whether EP sizes and batches outside of the table are answered by a fitted model.
        explain: whether the notes of a step say what its candidates were predicted to take.
    """

    table: Annotated[str, Field(min_length=1)] | None = None
    enabled: Annotated[Literal["auto", True, False], BeforeValidator(_auto_or_switch)] = "auto"
    eps: Real = Field(default=0.02, ge=0)
    objective: Literal["efficiency", "release_area"] = "efficiency"
    transitions: TransitionsConfig = TransitionsConfig()
    extrapolate: bool = Field(default=False, strict=True)
    explain: bool = Field(default=False, strict=True)

    @property
    def is_on(self) -> bool:
        """Whether the planner predicts."""
        return self.table is not None and self.enabled is not False

    @property
    def transition_s(self) -> float:
        """Seconds that decoding stands still for one shrink."""
        return self.transitions.shrink_s

    @property
    def release_s(self) -> float:
        """Seconds from a shrink until its leavers' memory is free."""
        return self.transitions.release_s

    @property
    def restore_s(self) -> float:
        """Seconds of the full world's return."""
        return self.transitions.restore_s


class HistoryConfig(Section):
    """Length history of planner.md section 2.

    Attributes:
        path: SQLite file; relative paths start at the run directory.
        unseen: ``bootstrap`` plans a step with an item never observed without shrinking; ``quantile`` predicts
            such an item by a quantile of the known tails.
        unseen_quantile: that quantile.
    """

    path: str = "history.sqlite"
    unseen: Literal["bootstrap", "quantile"] = "bootstrap"
    unseen_quantile: Real = Field(default=0.9, gt=0, le=1)


class EngineConfig(Section):
    """What the engine of one rank is started with. None leaves vLLM's own default.

    Attributes:
        combine: ``stock``, or ``invariant`` for verification: bit-identical for every EP size, at a higher price of
            combine and shrinks.
        deadline_s: seconds a transition may take before it is abandoned.
        trial_step: whether leavers keep their memory until the survivors' first step has succeeded.
        kv_cache_bytes: KV cache a rank, bytes.
        max_num_seqs: most running sequences a rank.
        max_model_len: longest sequence, prompt and response, tokens.
        block_size: tokens of a KV block.
        dtype: model dtype.
        enforce_eager: switch decode graphs off.
        vllm: further vLLM engine arguments, passed on as they are.
    """

    combine: Literal["stock", "invariant"] = "stock"
    deadline_s: Real = Field(default=30.0, gt=0)
    trial_step: bool = Field(default=True, strict=True)
    kv_cache_bytes: Count | None = None
    max_num_seqs: Count | None = None
    max_model_len: Count | None = None
    block_size: Count | None = None
    dtype: str = "auto"
    enforce_eager: bool = Field(default=False, strict=True)
    vllm: dict[str, Any] = {}

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """Decode batch sizes that vLLM is told to capture, ascending; empty where the choice is left to it."""
        told = self.vllm.get("compilation_config")
        sizes = told.get("cudagraph_capture_sizes") if isinstance(told, dict) else None
        whole = isinstance(sizes, list) and all(isinstance(size, int) for size in sizes)
        return tuple(sorted(sizes)) if sizes and whole else ()


class RolloutConfig(Section):
    """Sampling of a rollout.

    Attributes:
        temperature, top_p, top_k: sampling; top_k -1 keeps all tokens.
        max_tokens: global response limit; None takes ``tail_guard.l_max``.
        seed: base of the responses' seeds.
        seeded: whether each response is drawn with a seed of its own. A rollout can then be repeated, but vLLM's
            sampler draws response by response.
        ignore_eos: generate to the cap, for constructed lengths.
        logprobs: whether logprobs are kept with the responses.
    """

    temperature: Real = Field(default=1.0, ge=0)
    top_p: Real = Field(default=1.0, gt=0, le=1)
    top_k: Annotated[int, Field(strict=True, ge=-1)] = -1
    max_tokens: Count | None = None
    seed: Natural = 0
    seeded: bool = Field(default=True, strict=True)
    ignore_eos: bool = Field(default=False, strict=True)
    logprobs: bool = Field(default=False, strict=True)

    @field_validator("top_k")
    @classmethod
    def _top_k(cls, value: int) -> int:
        if value == 0:
            raise ValueError("must be -1 (all tokens) or positive")
        return value


class VerlConfig(Section):
    """What only the verl integration reads.

    Attributes:
        run_dir: folder of plans, events and history; None: ``flexfloor`` below ``trainer.default_local_dir``.
        item_id: dotted path of the dataset column that identifies a row for ever.
        seeds: ``item`` seeds each response from (item, epoch, sample); ``stock`` leaves vLLM's own chance.
        gate: whether a step begins when the first requests of all its trajectories have arrived.
        shrink: False runs every plan without shrinking and leaves all else as planned.
        responses: whether responses are written to RUN_DIR/responses.jsonl (tokens and logprobs; large).
    """

    run_dir: str | None = None
    item_id: Annotated[str, Field(min_length=1)] = "extra_info.item_id"
    seeds: Literal["item", "stock"] = "item"
    gate: bool = Field(default=True, strict=True)
    shrink: bool = Field(default=True, strict=True)
    responses: bool = Field(default=False, strict=True)
