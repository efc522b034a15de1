"""verl's task runner with FlexFloor's trainer known to it, and errors that come out as one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray
import yaml
from omegaconf import OmegaConf, open_dict
from ray.exceptions import RayTaskError
from verl.trainer import main_ppo

from flexfloor.driver import reaper
from flexfloor.errors import FlexFloorError, InputError, RefusedError
from verl_integration import agent_loop, upstream
from verl_integration.section import RunSettings
from verl_integration.verl_checks import check_verl


class FlexFloorTaskRunner(main_ppo.TaskRunnerV1.__ray_actor_class__):  # type: ignore[misc]
    """Runs in verl's place as a Ray actor."""

    def run(self, config: Any) -> None:
        """verl's run.

        Raises:
            InputError: the run was refused (what travels through Ray keeps its text alone).
            FlexFloorError: it failed.
        """
        try:
            upstream.check(upstream.RUN)
            import verl_integration.trainer  # noqa: F401 - registers the trainer

            super().run(config)
        except (InputError, RefusedError) as error:
            raise InputError(str(error)) from None
        except FlexFloorError as error:
            raise FlexFloorError(str(error)) from error


def run_training(config: Any, run: RunSettings) -> None:
    """Trains.

    Raises:
        InputError: the run was refused after its start (the dataset does not fit).
        FlexFloorError: it failed.
    """
    check_verl(config)
    with open_dict(config):
        config.actor_rollout_ref.rollout.agent.agent_loop_config_path = str(_agent_loops(run))
    local = not os.environ.get("RAY_ADDRESS")
    watcher = reaper.start(os.getpid()) if local else None
    try:
        main_ppo.run_ppo(config, task_runner_class=ray.remote(FlexFloorTaskRunner))
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, FlexFloorError):
            raise cause from None
        raise
    finally:
        if watcher is not None:
            ray.shutdown()
            watcher.terminate()
            watcher.wait()


def _agent_loops(run: RunSettings) -> Path:
    """The user's agent loops and ours in one file, where verl looks for it."""
    known: list[Any] = []
    if run.agent_loops is not None:
        known = list(OmegaConf.to_container(OmegaConf.load(run.agent_loops)))
    ours = {"name": agent_loop.NAME, "_target_": f"{agent_loop.__name__}.{agent_loop.PlannedAgentLoop.__name__}"}
    file = Path(run.run_dir) / "agent_loops.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump([*known, ours], sort_keys=False), encoding="utf-8")
    return file
