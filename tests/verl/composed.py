"""verl configurations for tests, composed once and copied."""

import copy
import functools
import subprocess
from pathlib import Path

import yaml
from omegaconf import OmegaConf, open_dict

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "recipes" / "data" / "tiny-moe"


@functools.cache
def composed(name):
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(ROOT / "configs" / "verl"), version_base=None):
        return compose(name)


def verl_config(name="cpu_flexfloor", *overrides, folder=None):
    """A preset with the shipped model; overrides as on the command line (plain values)."""
    config = copy.deepcopy(composed(name))
    with open_dict(config):
        for override in overrides:
            key, value = override.lstrip("+").split("=")
            OmegaConf.update(config, key, yaml.safe_load(value), force_add=True)
        config.actor_rollout_ref.model.path = str(MODEL)
        if folder is not None:
            config.trainer.default_local_dir = str(folder)
    return config


def finished(command, folder, env):
    """Runs verl to its end in a process of its own; everything it prints is kept in ``folder``."""
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=560)
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
