"""The presets: each composes with verl's own configuration and passes every check that needs no device."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import open_dict

from flexfloor.config import load_config
from verl_integration.section import resolve

ROOT = Path(__file__).parents[2]
METHODS = ("verl_baseline", "lengthsort", "ls_tg", "fixed_f4", "minskew", "flex_n4", "flex_n2", "flex_p4")


@pytest.mark.parametrize("name", METHODS)
def test_preset(name, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXFLOOR_HOME", str(ROOT))
    with initialize_config_dir(str(ROOT / "configs" / "verl"), version_base=None):
        config = compose(name, ["actor_rollout_ref.model.path=/nowhere/qwen3", f"trainer.default_local_dir={tmp_path}"])
    with open_dict(config):
        run = resolve(config)
    plain = load_config(ROOT / "configs" / f"{name}.yaml")
    assert (run.config.method, run.config.floors, run.config.kv) == (plain.method, plain.floors, plain.kv)
    assert run.config.rollout.temperature == config.actor_rollout_ref.rollout.temperature == 0.9
    assert (run.replicas, run.config.world_size, run.config.responses_per_prompt) == (1, 16, 16)


def test_cpu_preset_without_the_section_is_stock_verl():
    with initialize_config_dir(str(ROOT / "configs" / "verl"), version_base=None):
        config = compose("cpu")
    assert "flexfloor" not in config
    assert config.trainer.v1.trainer_mode == "sync"
