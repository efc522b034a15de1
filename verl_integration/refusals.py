"""verl set-ups that FlexFloor does not run in, each refused before anything starts, with the remedy."""

from __future__ import annotations

import math
from typing import Any

from flexfloor.config import FlexFloorConfig


def unfitting(config: Any, section: FlexFloorConfig) -> list[tuple[bool, str, str]]:
    """What FlexFloor does not run in: (whether it is so, what, remedy)."""
    rollout, trainer, data = config.actor_rollout_ref.rollout, config.trainer, config.data
    mode = trainer.v1.trainer_mode
    ranks = int(trainer.n_gpus_per_node) * int(trainer.nnodes)
    size, most = section.world_size, section.engine.max_num_seqs
    replicas = max(1, ranks // size)
    share = math.ceil(section.step_prompts / replicas)
    load = math.ceil(share / size) * section.responses_per_prompt
    engine = (rollout.get("engine_kwargs", None) or {}).get("vllm", None) or {}
    extension = engine.get("worker_extension_cls")
    sampler = trainer.v1.sampler
    filters = config.algorithm.get("filter_groups", None) or {}
    model = config.actor_rollout_ref.model
    lora = max(int((model.get("lora", None) or {}).get("rank", 0) or 0), int(model.get("lora_rank", 0) or 0))
    name = "actor_rollout_ref.rollout"
    return [
        (
            not trainer.get("use_v1", True),
            "trainer.use_v1 is false: the v0 trainer plans nothing",
            "set trainer.use_v1=true",
        ),
        (
            mode not in ("sync", "flexfloor"),
            f"trainer.v1.trainer_mode is {mode!r}: an asynchronous trainer mixes steps",
            "set it to sync",
        ),
        (rollout.name != "vllm", f"{name}.name is {rollout.name!r}", "set it to vllm"),
        (
            int(rollout.tensor_model_parallel_size) != 1,
            f"{name}.tensor_model_parallel_size is {rollout.tensor_model_parallel_size}",
            "set it to 1 (every rank holds whole attention layers)",
        ),
        (
            int(rollout.get("pipeline_model_parallel_size", 1) or 1) != 1,
            f"{name}.pipeline_model_parallel_size is not 1",
            "set it to 1",
        ),
        (
            size < 2,
            f"{name}.data_parallel_size is {size}: a world of one rank has nothing to shrink",
            "set it to 2 or more",
        ),
        (
            int(rollout.expert_parallel_size) != size,
            f"{name}.expert_parallel_size is {rollout.expert_parallel_size}, data_parallel_size is {size}",
            f"set expert_parallel_size={size}",
        ),
        (
            ranks % size != 0,
            f"{ranks} devices (trainer.n_gpus_per_node x nnodes) are not a multiple of {size} ranks",
            "change data_parallel_size or the devices",
        ),
        (
            int(trainer.n_gpus_per_node) != size,
            f"a replica of {size} ranks must fill a node of {trainer.n_gpus_per_node} devices (verl's rule for DP)",
            "set trainer.n_gpus_per_node to data_parallel_size and add nodes for more replicas",
        ),
        (
            most is not None and load > int(most),
            f"a step gives one rank {load} responses at once, {name}.max_num_seqs is {most}",
            f"raise it to {load}",
        ),
        (
            section.residency == "planned" and not set(section.floors.planned) & set(section.capacity),
            "flexfloor.residency is planned, but no floor of flexfloor.floors.planned has a measured capacity",
            "name floors.planned and, for each, kv.capacity.planned; or leave residency out (natural)",
        ),
        (
            data.get("gen_batch_size", None) not in (None, section.step_prompts),
            "data.gen_batch_size differs from data.train_batch_size",
            "leave it out: a step is planned whole",
        ),
        (
            bool(filters.get("enable", False)),
            "algorithm.filter_groups.enable is true: refilled groups are in no plan",
            "switch it off",
        ),
        (
            bool(sampler.get("sync_refill_failed_groups", False)),
            "trainer.v1.sampler.sync_refill_failed_groups is true: refilled groups are in no plan",
            "switch it off",
        ),
        (
            str(config.algorithm.adv_estimator) == "remax",
            "algorithm.adv_estimator is remax: its greedy baselines are in no plan",
            "use another estimator",
        ),
        (
            bool(rollout.get("full_determinism", False)),
            f"{name}.full_determinism gives every request one seed: all responses of a prompt would be equal",
            "switch it off; flexfloor.verl.seeds: item seeds each response by itself",
        ),
        (
            bool(rollout.agent.get("agent_loop_manager_class", None)),
            f"{name}.agent.agent_loop_manager_class is set",
            "leave it out: FlexFloor brings the manager",
        ),
        (
            bool(rollout.get("router_config_path", None)),
            f"{name}.router_config_path is set",
            "leave it out: the plan says the replica",
        ),
        (
            bool(extension) and not str(extension).startswith("verl_integration."),
            f"{name}.engine_kwargs.vllm.worker_extension_cls is {extension}",
            "leave it out: FlexFloor brings the extension",
        ),
        (lora > 0, "LoRA is not supported yet", "set actor_rollout_ref.model.lora_rank=0"),
        (
            rollout.get("quantization", None) is not None,
            f"{name}.quantization is set: quantised experts are not supported yet",
            "leave it out",
        ),
        (
            bool((rollout.get("mtp", None) or {}).get("enable_rollout", False)),
            "speculative decoding (mtp) is not supported yet",
            "switch it off",
        ),
        (
            bool((rollout.get("disaggregation", None) or {}).get("enabled", False)),
            f"{name}.disaggregation is not supported",
            "switch it off",
        ),
        (
            bool(rollout.get("enable_rollout_routing_replay", False)),
            f"{name}.enable_rollout_routing_replay was not tested",
            "switch it off",
        ),
        (
            rollout.checkpoint_engine.get("backend", "naive") != "naive",
            f"{name}.checkpoint_engine.backend is {rollout.checkpoint_engine.get('backend')}",
            "set it to naive (trainer and rollout share their devices)",
        ),
        (
            bool(engine.get("enable_eplb", False)),
            f"{name}.engine_kwargs.vllm.enable_eplb moves expert rows behind the plan's back",
            "switch it off",
        ),
    ]
