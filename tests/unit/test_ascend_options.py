"""Every option that cannot work on Ascend is refused at start, with the line to change (issue 6, line 5)."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml

from flexfloor.config import config_from_mapping
from flexfloor.driver import checks
from flexfloor.driver.checks import ModelFacts, Proposal
from flexfloor.engine.devices import ascend_options
from flexfloor.engine.devices.ascend_options import OPTIONS, engine_problems, live_problems, variable_problems
from flexfloor.errors import RefusedError

GOOD = {
    "enable_sleep_mode": True,
    "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 64]},
    "additional_config": {"weight_nz_mode": 0},
}
EXTRA = {
    "weight_nz_mode": 1,
    "enable_fused_mc2": 1,
    "enable_prefill_mc2": True,
    "mc2_comm_alg": "hierarchy",
    "enable_mc2_hierarchy_comm": True,
    "eplb_config.dynamic_eplb": True,
    "eplb_config.expert_map_path": "map.json",
    "eplb_config.expert_map_record_path": "map.json",
    "eplb_config.num_redundant_experts": 2,
    "enable_force_eplb": True,
    "mix_placement": True,
    "rl_config.sleep_mode_extra_cleanup": True,
    "enable_sleep_mode_extra_cleanup": True,
    "finegrained_tp_config.oproj_tensor_parallel_size": 2,
    "finegrained_tp_config.lmhead_tensor_parallel_size": 2,
    "finegrained_tp_config.embedding_tensor_parallel_size": 2,
    "finegrained_tp_config.mlp_tensor_parallel_size": 2,
    "layer_sharding": ["o_proj"],
    "multistream_overlap_gate": True,
    "scheduler_config.enable_balance_scheduling": True,
    "scheduler_config.dyntra_lb_config.enabled": True,
    "scheduler_config.recompute_scheduler_enable": True,
    "scheduler_config.profiling_chunk_config.enabled": True,
    "enable_balance_scheduling": True,
    "xlite_graph_config.enabled": True,
    "ascend_compilation_config.enable_static_kernel": True,
    "ascend_compilation_config.enable_super_kernel": True,
}


def extra(name, value):
    tree = {"weight_nz_mode": 0}
    at = tree
    *folders, last = name.split(".")
    for key in folders:
        at = at.setdefault(key, {})
    at[last] = value
    return {**GOOD, "additional_config": tree}


def test_what_works_passes():
    assert list(engine_problems(GOOD)) == []
    assert list(variable_problems({"TASK_QUEUE_ENABLE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"})) == []


def test_every_option_has_a_bad_value_here():
    assert set(EXTRA) == {option.name for option in OPTIONS}


@pytest.mark.parametrize("name", EXTRA)
def test_additional_config(name):
    (problem,) = engine_problems(extra(name, EXTRA[name]))
    assert problem.what.startswith(f"additional_config.{name} is {EXTRA[name]!r}: ")
    line = problem.line.removeprefix("engine.vllm: ")
    if line.startswith("remove"):
        assert line == f"remove additional_config.{name}"
        return
    changed = yaml.safe_load(line)["additional_config"]
    assert list(engine_problems({**GOOD, "additional_config": {"weight_nz_mode": 0, **changed}})) == []


def test_the_default_nz_mode_is_refused():
    (problem,) = engine_problems({**GOOD, "additional_config": {}})
    assert "weight_nz_mode is 1" in problem.what
    assert problem.line == "engine.vllm: additional_config: {weight_nz_mode: 0}"
    assert list(engine_problems({**GOOD, "additional_config": {"rl_config": {"enabled": True}}})) == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"enable_sleep_mode": False}, "enable_sleep_mode is False"),
        ({"quantization": "ascend"}, "quantization is 'ascend': W8A8"),
        ({"enable_eplb": True}, "enable_eplb is True"),
        ({"enable_return_routed_experts": True}, "enable_return_routed_experts"),
        ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, "cudagraph_mode is 'PIECEWISE'"),
        ({"compilation_config": {}}, "cudagraph_mode is missing"),
        ({"additional_config": [1]}, "additional_config is no mapping"),
    ],
)
def test_engine_arguments(changes, what):
    problems = list(engine_problems({**GOOD, **changes}))
    assert any(what in problem.what and problem.line for problem in problems)


def test_eager_needs_no_graph_mode():
    assert list(engine_problems({**GOOD, "compilation_config": {}}, eager=True)) == []


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("TASK_QUEUE_ENABLE", "2", "1"),
        ("VLLM_USE_V2_MODEL_RUNNER", "1", "0"),
        ("VLLM_USE_BREAKABLE_CUDAGRAPH", "1", "0"),
        ("ASCEND_LAUNCH_BLOCKING", "1", "0"),
        ("PYTORCH_NPU_ALLOC_CONF", "page_size:1g, expandable_segments:True", "page_size:1g"),
        ("DYNAMIC_EPLB", "true", "false"),
        ("EXPERT_MAP_RECORD", "true", "false"),
        ("VLLM_ASCEND_ENABLE_FLASHCOMM1", "1", "0"),
    ],
)
def test_variables(name, bad, good):
    (problem,) = variable_problems({name: bad})
    assert name in problem.what
    assert name in problem.line
    assert list(variable_problems({name: good})) == []


def resolved(changes=()):
    tree = SimpleNamespace()
    for option in OPTIONS:
        if option.removed:
            continue
        at = tree
        for key in option.path[:-1]:
            at.__dict__.setdefault(key, SimpleNamespace())
            at = at.__dict__[key]
        at.__dict__[option.path[-1]] = dict(changes).get(option.name, option.allowed[0])
    return tree


def test_the_resolved_configuration():
    assert list(live_problems(resolved())) == []
    (problem,) = live_problems(resolved({"eplb_config.dynamic_eplb": True}))
    assert problem.line == "engine.vllm: additional_config: {eplb_config: {dynamic_eplb: false}}"
    del (tree := resolved()).enable_fused_mc2
    (problem,) = live_problems(tree)
    assert problem.what == "vllm-ascend has no option enable_fused_mc2"


# -- in the driver ------------------------------------------------------------------------------


def proposal(**changes):
    data = {
        "world_size": 16,
        "responses_per_prompt": 2,
        "step_prompts": 16,
        "num_experts": 128,
        "hardware": "ascend-a3",
        "floors": {"natural": [4, 8]},
        "engine": {"vllm": GOOD},
        **changes,
    }
    facts = ModelFacts("model", "Qwen3MoeForCausalLM", 128, False, None)
    return Proposal(SimpleNamespace(world_size=16, steps=()), config_from_mapping(data), None, facts, 4, 16, "0.30.0")


def test_the_driver_refuses_with_the_line_to_change():
    checks._ascend(proposal())
    with pytest.raises(RefusedError, match=r"enable_fused_mc2 is 1: .*enable_fused_mc2: 0"):
        checks._ascend(proposal(engine={"vllm": extra("enable_fused_mc2", 1)}))
    with pytest.raises(RefusedError, match=r"set engine.combine: stock"):
        checks._ascend(proposal(engine={"vllm": GOOD, "combine": "invariant"}))
    large = {**GOOD, "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [512]}}
    checks._ascend(proposal(engine={"vllm": large}))
    with pytest.raises(RefusedError, match="takes 256 tokens a rank at most"):
        checks._ascend(proposal(engine={"vllm": large}, hardware="ascend-a2"))


def test_other_platforms_are_left_alone():
    checks._ascend(proposal(hardware=None, engine={"vllm": {}}))


def test_options_need_no_torch():
    code = "import sys, flexfloor.engine.devices.ascend_options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert json.dumps([option.line for option in ascend_options.OPTIONS])
