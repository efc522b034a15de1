"""The recipes for 16 x 64 GiB: one for each of the paper's eight methods, refused by nothing (issue 6, line 6)."""

import subprocess
from pathlib import Path

import pytest

from flexfloor.config import load_config
from flexfloor.engine.devices.ascend_options import engine_problems, variable_problems
from flexfloor.exchange import mc2_buffer_bytes, refused

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "ascend"
METHODS = ("verl_baseline", "lengthsort", "ls_tg", "fixed_f4", "minskew", "flex_n2", "flex_n4", "flex_p4")
KV_BYTES_A_TOKEN = 48 * 2 * 4 * 128 * 2
ROW_BYTES = 48 * 3 * 2048 * 768 * 2
DENSE_BYTES = 4 << 30
OTHER_BYTES = 10 << 30
"""HCCL buffers, graphs and activations: assumed."""


def test_all_eight_are_there():
    assert {path.stem for path in RECIPES.glob("*.yaml")} == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_recipe(name):
    config, paper = load_config(RECIPES / f"{name}.yaml"), load_config(ROOT / "configs" / f"{name}.yaml")
    for key in ("world_size", "method", "fixed_floor", "residency", "tail_guard", "mu", "step_prompts", "num_experts"):
        assert getattr(config, key) == getattr(paper, key), key
    assert list(engine_problems(config.engine.vllm)) == []
    captured = config.engine.vllm["compilation_config"]["cudagraph_capture_sizes"]
    for hardware in ("ascend-a2", "ascend-a3"):
        assert all(refused(hardware, size, 128, max(captured)) is None for size in config.admissible_sizes)
    (tokens,) = set(config.capacity.values())
    assert tokens == paper.capacity[min(config.admissible_sizes)]
    assert config.engine.kv_cache_bytes == tokens * KV_BYTES_A_TOKEN
    rows = 128 // min(config.admissible_sizes) * ROW_BYTES
    assert rows + DENSE_BYTES + config.engine.kv_cache_bytes + OTHER_BYTES < 64 << 30
    assert mc2_buffer_bytes(2048, 128, 8, max(captured)) < 200 << 20
    assert max(captured) >= config.engine.max_num_seqs


def test_the_environment_has_no_variable_that_cannot_work(tmp_path):
    toolkit = tmp_path / "set_env.sh"
    toolkit.write_text("export ASCEND_HOME_PATH=/here\n")
    script = f"set -eu; export ASCEND_TOOLKIT={tmp_path} TASK_QUEUE_ENABLE=2 DYNAMIC_EPLB=1; . {RECIPES}/env.sh; env"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    said = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert said["ASCEND_HOME_PATH"] == "/here"
    assert list(variable_problems(said)) == []


def test_the_run_needs_four_arguments():
    done = subprocess.run(["bash", str(RECIPES / "run.sh")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage" in done.stderr
