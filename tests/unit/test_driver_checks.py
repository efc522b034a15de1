"""What is refused before anything starts."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from flexfloor.config import config_from_mapping
from flexfloor.driver.at_hand import installed_vllm
from flexfloor.driver.checks import ModelFacts, Proposal, refuse
from flexfloor.errors import InputError, RefusedError
from flexfloor.plan import EpochPlan, RankPlan, StepPlan
from flexfloor.workload import Prompt, Workload

QWEN = {"architectures": ["Qwen3MoeForCausalLM"], "num_local_experts": 16, "max_position_embeddings": 1024}


def checkpoint(tmp_path, **changes):
    data = {key: value for key, value in {**QWEN, **changes}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(data))
    return tmp_path


def plan(world=4, ladder=(4, 2), items=("a", "b")):
    ranks = tuple(
        RankPlan(rank=r, items=(items[r],) if r < len(items) else (), completion=r, peak_tokens=0) for r in range(world)
    )
    times = tuple(world - size - 1 for size in ladder[1:])
    area = sum((large - small) * (world - 1 - t) for large, small, t in zip(ladder, ladder[1:], times, strict=False))
    step = StepPlan(
        step=0,
        items=tuple(items),
        cap=None,
        tail=world - 1,
        floor=ladder[-1],
        ladder=ladder,
        quorum_times=times,
        release_area=area,
        residency="natural",
        kv_tokens_per_rank=None,
        capture_sizes=(),
        kv_safe=True,
        optimality_gap=0.0,
        excluded_floors={},
        ranks=ranks,
    )
    return EpochPlan(epoch=1, world_size=world, method="flex", config_digest="", steps=(step,))


def config(**changes):
    data = {"world_size": 4, "responses_per_prompt": 2, "step_prompts": 2, "floors": {"natural": [1, 2]}}
    return config_from_mapping({**data, **changes})


@pytest.fixture
def proposal(tmp_path):
    return Proposal(
        plan=plan(),
        config=config(),
        workload=Workload([Prompt("a", "x"), Prompt("b", "y")], "prompts.jsonl"),
        model=ModelFacts.read(checkpoint(tmp_path)),
        smallest_floor=1,
        slots=None,
        vllm_version="0.30.0",
        plan_file="plan.json",
    )


def test_a_run_that_can_work_passes(proposal):
    refuse(proposal)
    refuse(replace(proposal, slots=4))


def test_model_facts(tmp_path):
    facts = ModelFacts.read(checkpoint(tmp_path, quantization_config={"bits": 4}))
    assert (facts.architecture, facts.experts, facts.quantised, facts.positions) == (
        QWEN["architectures"][0],
        16,
        True,
        1024,
    )


@pytest.mark.parametrize(
    ("changes", "what", "remedy"),
    [
        ({"num_local_experts": None}, "dense model", "mixture-of-experts"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "not tested", "Qwen3MoeForCausalLM"),
        ({"quantization_config": {"bits": 4}}, "quantised", "bfloat16"),
        ({"num_local_experts": 6}, "EP size 4 does not divide the model's 6 experts", "plan again"),
    ],
)
def test_models_that_cannot_work(proposal, tmp_path, changes, what, remedy):
    with pytest.raises(RefusedError, match=what) as caught:
        refuse(replace(proposal, model=ModelFacts.read(checkpoint(tmp_path, **changes))))
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "what", "remedy"),
    [
        ({"vllm_version": None}, "not installed", "install"),
        ({"vllm_version": "0.29.1"}, "vLLM 0.29.1 was not tested", "0.30.0"),
        ({"slots": 3}, "4 ranks need 4 slots, 3", "smaller world_size"),
        (
            {"plan": plan(ladder=(4, 1)), "smallest_floor": 2},
            "floor 1 .16 expert rows a rank., 8 rows",
            "floors.natural",
        ),
        ({"config": config(engine={"vllm": {"tensor_parallel_size": 2}})}, "tensor_parallel_size is 2", "TP 1"),
        ({"config": config(engine={"vllm": {"pipeline_parallel_size": 2}})}, "pipeline_parallel_size is 2", "PP 1"),
        ({"config": config(engine={"vllm": {"enable_lora": True}})}, "enable_lora", "LoRA"),
        ({"config": config(engine={"vllm": {"data_parallel_size": 4}})}, "data_parallel_size", "remove it"),
        ({"config": config(engine={"vllm": {"data_parallel_size_local": 2}})}, "data_parallel_size_local", "remove it"),
        ({"config": config(engine={"vllm": {"max_num_seqs": 2}})}, "vllm.max_num_seqs is 2", "`engine.max_num_seqs`"),
        ({"config": config(engine={"vllm": {"seed": 1}})}, "vllm.seed is 1", "`rollout.seed`"),
        ({"slots": 3, "on_cpu": True}, "4 ranks need 4 slots, 3", "give --slots more"),
        ({"config": config(engine={"max_num_seqs": 1})}, "rank 0 2 responses at once", "raise it to 2"),
        (
            {"plan": plan(world=1, ladder=(1,), items=("a",)), "config": config(world_size=1, floors={})},
            "one rank",
            "2 or more",
        ),
    ],
)
def test_runs_that_cannot_work(proposal, changes, what, remedy):
    with pytest.raises(RefusedError, match=what) as caught:
        refuse(replace(proposal, **changes))
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_that_are_nobody_elses_business_pass(proposal):
    refuse(
        replace(proposal, config=config(engine={"vllm": {"max_num_batched_tokens": 512, "tensor_parallel_size": 1}}))
    )


def test_plan_configuration_and_prompts_must_fit_one_another(proposal):
    with pytest.raises(InputError, match=r"plan.json: world_size: is planned for 4 ranks, the configuration says 2"):
        refuse(replace(proposal, config=config(world_size=2)))
    with pytest.raises(InputError, match=r"plan.json: steps.0.items: item 'b' is not in prompts.jsonl"):
        refuse(replace(proposal, workload=Workload([Prompt("a", "x")], "prompts.jsonl")))
    long = Workload([Prompt("a", tuple(range(1024))), Prompt("b", "y")], "prompts.jsonl")
    with pytest.raises(InputError, match=r"item 'a' has 1024 tokens, the engine takes 1024"):
        refuse(replace(proposal, workload=long))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "no JSON"),
        ("[]", "architectures: is missing"),
        ('{"architectures": []}', "architectures: is missing"),
    ],
)
def test_folders_that_hold_no_model(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=message):
        ModelFacts.read(tmp_path)
    with pytest.raises(InputError, match="is no folder"):
        ModelFacts.read(tmp_path / "none")


def test_the_version_of_the_first_distribution_that_is_installed():
    assert installed_vllm(["no-such-distribution"]) is None
    assert installed_vllm(["no-such-distribution", "pytest"]) == pytest.__version__


def test_refusing_needs_neither_vllm_nor_torch_nor_ray():
    code = "import sys, flexfloor.cli.rollout; print([m for m in ('vllm', 'torch', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_tokens_that_the_model_does_not_have(proposal, tmp_path):
    known = replace(proposal.model, vocabulary=632)
    refuse(replace(proposal, model=known, workload=Workload([Prompt("a", (0, 631)), Prompt("b", "y")], "p.jsonl")))
    unknown = Workload([Prompt("a", "x"), Prompt("b", (5, 632))], "p.jsonl")
    with pytest.raises(InputError, match=r"p.jsonl.*item 'b' has token 632, the model's end at 631"):
        refuse(replace(proposal, model=known, workload=unknown))


def test_sleep_mode_needs_devices(proposal):
    sleeping = replace(proposal, config=config(engine={"vllm": {"enable_sleep_mode": True}}))
    refuse(sleeping)
    with pytest.raises(RefusedError, match=r"share the CPU.*run on devices, or remove it"):
        refuse(replace(sleeping, on_cpu=True))
