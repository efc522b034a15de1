"""What is refused before anything starts: everything that can be known from files.

Nothing here imports vllm or torch, so that a refusal takes no longer than reading the files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexfloor import exchange
from flexfloor.config import FlexFloorConfig
from flexfloor.driver.at_hand import device_slots, installed_vllm, ranks_share_cpu
from flexfloor.engine.devices import ascend_options
from flexfloor.engine.devices.accelerators import ACCELERATORS
from flexfloor.engine.upstream import VLLM_TESTED
from flexfloor.errors import InputError, RefusedError
from flexfloor.plan import EpochPlan
from flexfloor.workload import Workload

TESTED_ARCHITECTURES = ("Qwen3MoeForCausalLM",)

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_OWNED = "FlexFloor sets it; remove it from `engine.vllm`"
_UNTESTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tensor_parallel_size": ((None, 1), "remove it: every rank holds whole attention layers (TP 1)"),
    "pipeline_parallel_size": ((None, 1), "remove it: every rank holds all layers (PP 1)"),
    "speculative_config": ((None,), "remove it: speculative decoding is not supported yet"),
    "enable_lora": ((None, False), "remove it: LoRA is not supported yet"),
    "kv_transfer_config": ((None,), "remove it: KV connectors are not supported yet"),
    "quantization": ((None,), "remove it: quantised experts are not supported yet"),
    "enable_eplb": ((None, False), "remove it: expert rebalancing moves rows behind the plan's back"),
    "data_parallel_size": ((None,), _OWNED),
    "enable_expert_parallel": ((None, True), _OWNED),
    "worker_extension_cls": ((None,), _OWNED),
    "distributed_executor_backend": ((None,), _OWNED),
    "worker_cls": ((None,), _OWNED),
    "decode_context_parallel_size": ((None, 1), "remove it: every rank holds the whole KV of its requests"),
    "model": ((None,), _OWNED),
    **{
        name: ((None,), f"write it as `{own}`, which all of FlexFloor reads")
        for name, own in {
            "max_num_seqs": "engine.max_num_seqs",
            "max_model_len": "engine.max_model_len",
            "block_size": "engine.block_size",
            "kv_cache_memory_bytes": "engine.kv_cache_bytes",
            "dtype": "engine.dtype",
            "enforce_eager": "engine.enforce_eager",
            "seed": "rollout.seed",
        }.items()
    },
}
_OWNED_PREFIXES = ("data_parallel_", "api_process_")


@dataclass(frozen=True)
class ModelFacts:
    """What config.json says.

    Attributes:
        path: the model folder.
        architecture: name of the model class.
        experts: routed experts of a layer; 0 for a dense model.
        quantised: whether weights are stored quantised.
        positions: longest sequence, tokens; None when not said.
        vocabulary: token ids of the model; None when not said.
    """

    path: Path
    architecture: str
    experts: int
    quantised: bool
    positions: int | None
    vocabulary: int | None = None

    @classmethod
    def read(cls, model: str | Path) -> ModelFacts:
        """Reads DIR/config.json.

        Raises:
            InputError: the folder or the file is missing or no model configuration.
        """
        folder = Path(model)
        if not folder.is_dir():
            raise InputError("is no folder; name a checkpoint in Hugging Face format", file=folder)
        file = folder / "config.json"
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"cannot be read ({error.strerror}); name a whole checkpoint", file=file) from error
        except ValueError as error:
            raise InputError("is no JSON; name a whole checkpoint", file=file) from error
        names = data.get("architectures") if isinstance(data, dict) else None
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise InputError("is missing; name a whole checkpoint", file=file, field="architectures")
        experts = next((data[key] for key in _EXPERT_KEYS if isinstance(data.get(key), int)), 0)
        positions, vocabulary = (data.get(key) for key in ("max_position_embeddings", "vocab_size"))
        return cls(
            folder,
            names[0],
            experts,
            bool(data.get("quantization_config")),
            positions if isinstance(positions, int) else None,
            vocabulary if isinstance(vocabulary, int) else None,
        )


@dataclass(frozen=True)
class Proposal:
    """A run as it is proposed.

    Attributes:
        plan: the plan.
        config: the configuration.
        workload: the prompts.
        model: the model's facts.
        smallest_floor: smallest EP size that expert rows are allocated for.
        slots: devices (or CPU slots) at hand; None: as many as ranks.
        vllm_version: the installed vLLM; None when there is none.
        plan_file: where the plan came from, for messages.
        on_cpu: whether the ranks share this machine's CPU.
    """

    plan: EpochPlan
    config: FlexFloorConfig
    workload: Workload
    model: ModelFacts
    smallest_floor: int
    slots: int | None
    vllm_version: str | None
    plan_file: str | Path | None = None
    on_cpu: bool = False

    @classmethod
    def here(
        cls,
        plan: EpochPlan,
        config: FlexFloorConfig,
        workload: Workload,
        model: ModelFacts,
        *,
        slots: int | None,
        plan_file: str | Path | None = None,
    ) -> Proposal:
        """On this machine, with rows for the configuration's smallest floor; ``slots`` None: what is at hand."""
        at_hand = slots if slots is not None else device_slots()
        smallest = min(config.admissible_sizes)
        return cls(
            plan, config, workload, model, smallest, at_hand, installed_vllm(), plan_file, on_cpu=ranks_share_cpu()
        )


def refuse(proposal: Proposal) -> None:
    """Refuses a run that cannot work.

    Raises:
        RefusedError: with the remedy.
        InputError: plan, configuration and prompts contradict one another.
    """
    for check in CHECKS:
        check(proposal)


def _vllm(run: Proposal) -> None:
    tested = ", ".join(VLLM_TESTED)
    if run.vllm_version is None:
        raise RefusedError("vLLM is not installed", remedy=f"install FlexFloor's extra for your device (vLLM {tested})")
    if run.vllm_version not in VLLM_TESTED:
        raise RefusedError(f"vLLM {run.vllm_version} was not tested", remedy=f"install vLLM {tested}")


def _model(run: Proposal) -> None:
    model = run.model
    if model.experts < 1:
        raise RefusedError(
            f"{model.path} is a dense model ({model.architecture}): there are no experts to shrink onto fewer ranks",
            remedy="name a mixture-of-experts checkpoint",
        )
    if model.architecture not in TESTED_ARCHITECTURES:
        raise RefusedError(
            f"architecture {model.architecture} was not tested", remedy=f"use {', '.join(TESTED_ARCHITECTURES)}"
        )
    if model.quantised:
        raise RefusedError(f"{model.path} has quantised weights", remedy="name the bfloat16 checkpoint")


def _world(run: Proposal) -> None:
    wanted, given = run.plan.world_size, run.config.world_size
    if wanted != given:
        what = f"is planned for {wanted} ranks, the configuration says {given}; plan again or change world_size"
        raise InputError(what, file=run.plan_file, field="world_size")
    if wanted < 2:
        raise RefusedError("a world of one rank has nothing to shrink", remedy="set world_size to 2 or more")
    if run.slots is not None and run.slots < wanted:
        listed = " or ".join(kind.variable for kind in ACCELERATORS.values())
        more = "give --slots more" if run.on_cpu else f"add devices, or name more of them in {listed} or --slots"
        smaller = ", or plan for a smaller world_size" if wanted > 2 else ""
        raise RefusedError(f"{wanted} ranks need {wanted} slots, {run.slots} are at hand", remedy=more + smaller)


def _sizes(run: Proposal) -> None:
    planned = {size for step in run.plan.steps for size in step.ladder}
    for size in sorted({*planned, *run.config.admissible_sizes}, reverse=True):
        if run.model.experts % size:
            raise RefusedError(
                f"EP size {size} does not divide the model's {run.model.experts} experts",
                remedy="choose world_size and floors that do, and plan again",
            )
    smallest = min(planned, default=run.plan.world_size)
    if smallest < run.smallest_floor:
        rows = run.model.experts // run.smallest_floor
        raise RefusedError(
            f"the plan asks for floor {smallest} ({run.model.experts // smallest} expert rows a rank), "
            f"{rows} rows are allocated",
            remedy=f"add {smallest} to floors.{run.config.residency}, or plan with floors of {run.smallest_floor} up",
        )


def _options(run: Proposal) -> None:
    for name, value in run.config.engine.vllm.items():
        allowed, remedy = _UNTESTED.get(name, ((value,), ""))
        if name.startswith(_OWNED_PREFIXES):
            allowed, remedy = (None,), _OWNED
        if value not in allowed:
            raise RefusedError(f"engine.vllm.{name} is {value!r}", remedy=remedy)
    if run.on_cpu and run.config.engine.vllm.get("enable_sleep_mode"):
        raise RefusedError(
            "engine.vllm.enable_sleep_mode is set, and the ranks here share the CPU, where vLLM has no such mode",
            remedy="run on devices, or remove it",
        )


def _ascend(run: Proposal) -> None:
    config = run.config
    if config.hardware is None:
        if not run.on_cpu and any(Path("/dev").glob(ACCELERATORS["ascend"].files)):
            raise RefusedError(
                "this machine has Ascend devices, and the configuration does not say which",
                remedy="set hardware: ascend-a2 or hardware: ascend-a3",
            )
        return
    if config.engine.combine != "stock":
        raise RefusedError("there is no EP-invariant combine on Ascend", remedy="set engine.combine: stock")
    problems = [
        *ascend_options.engine_problems(config.engine.vllm, eager=config.engine.enforce_eager),
        *ascend_options.variable_problems(os.environ),
    ]
    for problem in problems:
        raise RefusedError(problem.what, remedy=problem.line)
    captured = config.engine.capture_sizes or (1,)
    for size in config.admissible_sizes:
        reason = exchange.refused(config.hardware, size, run.model.experts, max(captured))
        if reason is not None:
            raise RefusedError(reason, remedy="choose other floors or smaller cudagraph_capture_sizes")


def _items(run: Proposal) -> None:
    for step in run.plan.steps:
        for item_id in step.items:
            if item_id not in run.workload:
                what = f"item {item_id!r} is not in {run.workload.file}; plan for these prompts, or name theirs"
                raise InputError(what, file=run.plan_file, field=f"steps.{step.step}.items")


def _sequences(run: Proposal) -> None:
    most = run.config.engine.max_num_seqs
    for step in run.plan.steps:
        for group in step.ranks:
            load = sum(run.workload[item].n or run.config.responses_per_prompt for item in group.items)
            if most is not None and load > most:
                raise RefusedError(
                    f"step {step.step} gives rank {group.rank} {load} responses at once, engine.max_num_seqs is {most}",
                    remedy=f"raise it to {load}",
                )


def _tokens(run: Proposal) -> None:
    longest = run.config.engine.max_model_len or run.model.positions
    for prompt in run.workload.values():
        if isinstance(prompt.content, str):
            continue
        if longest is not None and len(prompt.content) >= longest:
            what = f"item {prompt.item_id!r} has {len(prompt.content)} tokens, the engine takes {longest}; shorten it"
            raise InputError(what, file=run.workload.file, field="prompt_token_ids")
        highest = max(prompt.content)
        if run.model.vocabulary is not None and highest >= run.model.vocabulary:
            what = f"item {prompt.item_id!r} has token {highest}, the model's end at {run.model.vocabulary - 1}"
            raise InputError(f"{what}; tokenise it for this model", file=run.workload.file, field="prompt_token_ids")


CHECKS: tuple[Callable[[Proposal], None], ...] = (
    _vllm,
    _model,
    _world,
    _sizes,
    _options,
    _ascend,
    _items,
    _sequences,
    _tokens,
)
