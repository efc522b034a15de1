"""The `flexfloor:` section inside of verl's configuration: filled in from verl's own settings, checked against them.

verl's settings are the authority. What the section leaves out is taken from them; what it repeats must agree.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexfloor.config import FlexFloorConfig, config_from_mapping
from flexfloor.driver.at_hand import installed_vllm
from flexfloor.driver.checks import ModelFacts, Proposal, refuse
from flexfloor.errors import InputError, RefusedError
from flexfloor.plan import EpochPlan
from flexfloor.workload import Workload
from verl_integration.refusals import unfitting

CUSTOM = "flexfloor"
"""Key below ``actor_rollout_ref.rollout.custom`` (verl's own place for such things) that carries the settings."""


@dataclass(frozen=True)
class RunSettings:
    """One training run.

    Attributes:
        config: the section, filled in.
        replicas: rollout replicas; each is an EP group of ``config.world_size`` ranks.
        run_dir: folder of plans, events and history.
        run: run id of the events.
        agent_loops: YAML of agent loops that the user has registered, or None.
    """

    config: FlexFloorConfig
    replicas: int
    run_dir: str
    run: str
    agent_loops: str | None = None

    @property
    def events_dir(self) -> Path:
        """Folder of the event files."""
        return Path(self.run_dir) / "events"

    def board(self, replica: int) -> Path:
        """Status board of one replica."""
        return Path(self.run_dir) / f"board-{replica}"

    def dump(self) -> str:
        """Text that `load` reads back."""
        own = {name: getattr(self, name) for name in ("replicas", "run_dir", "run", "agent_loops")}
        return json.dumps({**own, "config": self.config.resolved()})

    @classmethod
    def load(cls, text: str) -> RunSettings:
        """Reads `dump`."""
        data = json.loads(text)
        return cls(config=config_from_mapping(data.pop("config")), **data)

    @classmethod
    def of_rollout(cls, rollout: Any) -> RunSettings | None:
        """The settings that a rollout configuration carries; None without any."""
        custom = rollout.get("custom", None) or {}
        return cls.load(custom[CUSTOM]) if CUSTOM in custom else None


def resolve(config: Any) -> RunSettings:
    """Checks and fills in the section, and puts the settings where verl's processes find them.

    Args:
        config: verl's whole configuration (OmegaConf), changed in place.

    Raises:
        InputError: the section is wrong or contradicts verl's settings.
        RefusedError: verl is set up in a way that FlexFloor does not run in.
    """
    from omegaconf import OmegaConf

    data = OmegaConf.to_container(config.flexfloor, resolve=True)
    if not isinstance(data, dict):
        raise InputError("must be a mapping of settings", field="flexfloor")
    model = Path(str(config.actor_rollout_ref.model.path)).expanduser()
    facts = ModelFacts.read(model) if model.is_dir() else None
    section = config_from_mapping(fill(data, config, facts))
    for unfit, what, remedy in [*unfitting(config, section), _foreign_history(config, section)]:
        if unfit:
            raise RefusedError(what, remedy=remedy)
    if facts is not None:
        _refuse_engine(section, facts)
    run = _settings(config, section)
    _install(config, run)
    return run


def fill(data: dict[str, Any], config: Any, facts: ModelFacts | None = None) -> dict[str, Any]:
    """The section with everything that verl's settings decide.

    Raises:
        InputError: a value contradicts verl's.
    """
    rollout = config.actor_rollout_ref.rollout
    engine = (rollout.get("engine_kwargs", None) or {}).get("vllm", None) or {}
    verls: list[tuple[str, Any, str]] = [
        ("world_size", rollout.data_parallel_size, "actor_rollout_ref.rollout.data_parallel_size"),
        ("responses_per_prompt", rollout.n, "actor_rollout_ref.rollout.n"),
        ("step_prompts", config.data.train_batch_size, "data.train_batch_size"),
        ("num_experts", (facts.experts or None) if facts else None, "the model's config.json"),
        ("tail_guard.l_max", config.data.max_response_length, "data.max_response_length"),
        ("rollout.temperature", float(rollout.temperature), "actor_rollout_ref.rollout.temperature"),
        ("rollout.top_p", float(rollout.top_p), "actor_rollout_ref.rollout.top_p"),
        ("rollout.top_k", rollout.top_k, "actor_rollout_ref.rollout.top_k"),
        ("engine.max_num_seqs", rollout.max_num_seqs, "actor_rollout_ref.rollout.max_num_seqs"),
        ("engine.max_model_len", rollout.max_model_len, "actor_rollout_ref.rollout.max_model_len"),
        ("engine.dtype", rollout.dtype, "actor_rollout_ref.rollout.dtype"),
        ("engine.enforce_eager", bool(rollout.enforce_eager), "actor_rollout_ref.rollout.enforce_eager"),
        (
            "engine.kv_cache_bytes",
            engine.get("kv_cache_memory_bytes"),
            "rollout.engine_kwargs.vllm.kv_cache_memory_bytes",
        ),
        ("engine.block_size", engine.get("block_size"), "rollout.engine_kwargs.vllm.block_size"),
    ]
    filled = copy.deepcopy(data)
    for name, value, source in verls:
        if value is None:
            continue
        *path, key = name.split(".")
        place = filled
        for part in path:
            place = place.setdefault(part, {}) if isinstance(place, dict) else {}
        if not isinstance(place, dict):
            continue
        given = place.get(key)
        if given is not None and given != value:
            what = f"is {given!r}, but {source} is {value!r}; make them equal, or leave it out here"
            raise InputError(what, field=f"flexfloor.{name}")
        place[key] = value
    return filled


def _run_dir(config: Any, section: FlexFloorConfig) -> Path:
    own = section.verl.run_dir
    return (Path(own) if own else Path(str(config.trainer.default_local_dir)) / "flexfloor").expanduser().absolute()


def _foreign_history(config: Any, section: FlexFloorConfig) -> tuple[bool, str, str]:
    folder = _run_dir(config, section)
    return (
        config.trainer.resume_mode == "disable" and (folder / section.history.path).exists(),
        f"{folder} holds the history of an earlier run, trainer.resume_mode is disable",
        "name another trainer.default_local_dir, or resume with trainer.resume_mode=auto",
    )


def _refuse_engine(section: FlexFloorConfig, facts: ModelFacts) -> None:
    nothing = EpochPlan(
        epoch=0, world_size=section.world_size, method=section.method, config_digest=section.digest(), steps=()
    )
    smallest = min(section.admissible_sizes)
    refuse(Proposal(nothing, section, Workload([]), facts, smallest, None, installed_vllm()))


def _settings(config: Any, section: FlexFloorConfig) -> RunSettings:
    ranks = int(config.trainer.n_gpus_per_node) * int(config.trainer.nnodes)
    loops = config.actor_rollout_ref.rollout.agent.get("agent_loop_config_path", None)
    return RunSettings(
        config=section,
        replicas=ranks // section.world_size,
        run_dir=str(_run_dir(config, section)),
        run=str(config.trainer.experiment_name),
        agent_loops=str(loops) if loops else None,
    )


def _install(config: Any, run: RunSettings) -> None:
    """verl's doors, opened: trainer, manager and what its processes must know."""
    rollout = config.actor_rollout_ref.rollout
    config.trainer.v1.trainer_mode = "flexfloor"
    rollout.agent.agent_loop_manager_class = "verl_integration.manager.PlannedAgentLoopManager"
    rollout.custom = {**(rollout.get("custom", None) or {}), CUSTOM: run.dump()}
