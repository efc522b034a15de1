"""The configuration: one section, two readers, no contradiction (planner.md section 7)."""

from decimal import Decimal
from pathlib import Path

import pytest
import yaml

from flexfloor.config import FlexFloorConfig, config_from_mapping, load_config
from flexfloor.errors import InputError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
LEAST = {"world_size": 4, "responses_per_prompt": 2, "step_prompts": 8}


def test_defaults_of_the_specification():
    config = config_from_mapping(LEAST)
    guard = config.tail_guard
    assert (config.alpha, config.mu, config.method, config.residency) == (0.3, Decimal("1.16"), "flex", "natural")
    assert (guard.q, guard.window, guard.eps, guard.enabled, guard.initial_rho) == (0.95, 3, 1e-6, True, None)
    assert (guard.c_min, guard.rounding, guard.l_max) == (4096, 512, 16384)
    assert (config.kv.prompt_sharing, config.capture.max_sizes) == (True, 8)
    assert config.leave_order == (0, 1, 2, 3)
    assert config.admissible_sizes == (4,)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_load_and_resolve_to_themselves(path, tmp_path):
    config = load_config(path)
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump({"flexfloor": config.resolved()}))
    again = load_config(tmp_path / "resolved.yaml")
    assert again == config
    assert again.digest() == config.digest()


def test_cpu_configuration():
    config = load_config(Path(__file__).parents[2] / "configs" / "cpu.yaml")
    assert config.admissible_sizes == (4, 2, 1)
    assert set(config.capacity) == {1, 2, 4}


def test_capacity_keys_may_be_digit_strings_and_null_excludes():
    kv = {"capacity": {"natural": {"2": 5, 4: 7, "1": None}}}
    config = config_from_mapping({**LEAST, "kv": kv, "floors": {"natural": [4, 1, 2]}})
    assert config.capacity == {2: 5, 4: 7}
    assert config.admissible_sizes == (4, 2, 1)


def test_solver_may_be_named_by_a_word():
    assert config_from_mapping({**LEAST, "solver": "cbc"}).solver.name == "cbc"


def test_digest_sees_every_setting():
    base = config_from_mapping(LEAST).digest()
    assert config_from_mapping({**LEAST, "mu": 1.17}).digest() != base
    assert config_from_mapping({**LEAST, "engine": {"combine": "invariant"}}).digest() != base
    assert config_from_mapping({**LEAST, "alpha": 0.3}).digest() == base


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank_order": [0, 1, 1, 3]}, "flexfloor.rank_order: must hold each rank from 0 to 3 once"),
        ({"rollout": {"max_tokens": 9}}, "flexfloor.rollout.max_tokens: is 9, but tail_guard.l_max is 16384"),
        ({"rollout": {"top_k": 0}}, "flexfloor.rollout.top_k: must be -1"),
        ({"fixed_floor": 2}, "flexfloor.fixed_floor: must be one of the natural floors"),
        ({"engine": {"combine": "fast"}}, "flexfloor.engine.combine"),
        ({"alpha": 1.0}, "flexfloor.alpha"),
        ({"mu": True}, "flexfloor.mu"),
        ({"mu": "NaN"}, "flexfloor.mu"),
        ({"step_prompts": 8.0}, "flexfloor.step_prompts"),
        ({"world_size": True}, "flexfloor.world_size"),
        ({"tail_guard": {"enabled": 1}}, "flexfloor.tail_guard.enabled"),
        ({"kv": {"capacities": {}}}, "flexfloor.kv.capacities: unknown key; known here: block_tokens, capacity"),
        ({"num_experts": 6}, "flexfloor.world_size: must divide num_experts 6"),
    ],
)
def test_contradictions(change, message):
    with pytest.raises(InputError) as caught:
        config_from_mapping({**LEAST, **change})
    assert str(caught.value).startswith(message)


def test_settings_are_frozen():
    config = config_from_mapping(LEAST)
    with pytest.raises(ValueError, match="frozen"):
        config.alpha = 0.5
    assert isinstance(config, FlexFloorConfig)
