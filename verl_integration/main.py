"""``python -m verl_integration.main``: verl's own entry point, with FlexFloor where the configuration has its section.

    python -m verl_integration.main --config-name cpu_flexfloor data.train_files=... [verl overrides]
    python -m verl_integration.main --config-dir MY_DIR --config-name my_run --dry-run

``--dry-run`` checks everything, writes the resolved configuration and the first plan, and starts no engine.
Bad input ends with one line and exit code 2.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from flexfloor.errors import FlexFloorError, InputError, RefusedError

HOME = Path(__file__).resolve().parent.parent
DRY_RUN = "--dry-run"
OWN_CONFIGS = HOME / "configs" / "verl"
JOINED = ("RAY_ADDRESS",)
"""Variables that say that a cluster is joined, not started (``ray job submit`` sets them)."""


def main() -> None:
    """Entry point."""
    dry_run = DRY_RUN in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != DRY_RUN]
    os.environ.setdefault("FLEXFLOOR_HOME", str(HOME))
    import hydra

    code = 0

    def run(config: Any) -> None:
        nonlocal code
        code = _reported(config, dry_run)

    folder, name = (str(OWN_CONFIGS), "ppo") if OWN_CONFIGS.is_dir() else ("pkg://verl.trainer.config", "ppo_trainer")
    hydra.main(config_path=folder, config_name=name, version_base=None)(run)()
    sys.exit(code)


def _reported(config: Any, dry_run: bool) -> int:
    try:
        train(config, dry_run=dry_run)
    except (InputError, RefusedError) as error:
        return complain(str(error), 2)
    except FlexFloorError as error:
        return complain(str(error), 1)
    return 0


def complain(message: str, code: int) -> int:
    """One line on standard error."""
    print(f"flexfloor: {message}", file=sys.stderr, flush=True)
    return code


def train(config: Any, *, dry_run: bool = False) -> None:
    """Trains as ``config`` says.

    Raises:
        InputError, RefusedError: the run cannot work; nothing was started.
        FlexFloorError: it failed later.
    """
    from omegaconf import open_dict

    from verl_integration import upstream

    upstream.check_entry_point()
    if config.trainer.device == "cpu":
        _on_cpu(config)
    if config.get("flexfloor") is None:
        if dry_run:
            raise InputError("is missing; a dry run writes its first plan, add the section", field="flexfloor")
        from verl.trainer import main_ppo

        main_ppo.main.__wrapped__(config)
        return
    upstream.check_version()
    import verl  # noqa: F401 - loads the plugins

    from verl_integration import plugin

    if not plugin.LOADED:
        raise RefusedError("verl did not load FlexFloor's plugin", remedy="leave VERL_USE_EXTERNAL_PLUGINS unset")
    from verl_integration.section import resolve

    with open_dict(config):
        run = resolve(config)
    if dry_run:
        from verl_integration.dry_run import write_first_plan

        write_first_plan(config, run)
        return
    from verl_integration.runner import run_training

    run_training(config, run)


def _on_cpu(config: Any) -> None:
    """The CPU's environment and local Ray; a process that has imported verl for another device starts over."""
    from omegaconf import OmegaConf, open_dict

    from verl_integration.cpu import support

    wanted = support.environment()
    if os.environ.get("VERL_PLATFORM") != "cpu" and "verl" in sys.modules:
        os.environ.update({name: value for name, value in wanted.items() if name not in os.environ})
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "verl_integration.main", *sys.argv[1:]])
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    joined = any(os.environ.get(name) for name in JOINED)
    ranks = int(config.trainer.n_gpus_per_node) * int(config.trainer.nnodes)
    with open_dict(config):
        given = OmegaConf.to_container(config.ray_kwargs.get("ray_init", {}) or {}, resolve=True)
        env = {**wanted, **((given.get("runtime_env") or {}).get("env_vars") or {})}
        local = support.local_cluster(ranks)
        given = {name: value for name, value in given.items() if value is not None and not (joined and name in local)}
        config.ray_kwargs.ray_init = {
            **({} if joined else local),
            **given,
            "runtime_env": {**(given.get("runtime_env") or {}), "env_vars": env},
        }
        vllm = config.actor_rollout_ref.rollout.engine_kwargs.setdefault("vllm", {})
        vllm.setdefault("worker_extension_cls", "verl_integration.cpu.reload.CpuWorkerExtension")


if __name__ == "__main__":
    main()
