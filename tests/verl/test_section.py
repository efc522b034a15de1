"""The section inside of verl's configuration: filled in, checked, refused with the remedy. No engine, no Ray."""

from pathlib import Path

import pytest
from composed import verl_config
from omegaconf import OmegaConf, open_dict

from flexfloor.config import load_config
from flexfloor.errors import InputError, RefusedError
from verl_integration.section import RunSettings, resolve


def resolved(*overrides, folder=None, name="cpu_flexfloor"):
    config = verl_config(name, *overrides, folder=folder)
    with open_dict(config):
        return config, resolve(config)


def test_the_section_is_filled_from_verls_settings(tmp_path):
    config, run = resolved(folder=tmp_path)
    section = run.config
    assert (section.world_size, section.responses_per_prompt, section.step_prompts) == (4, 2, 8)
    assert section.tail_guard.l_max == config.data.max_response_length == 208
    assert section.num_experts == 16
    assert (section.engine.max_num_seqs, section.engine.kv_cache_bytes, section.engine.block_size) == (16, 12632064, 32)
    assert run.replicas == 1
    assert Path(run.run_dir) == tmp_path / "flexfloor"
    assert config.trainer.v1.trainer_mode == "flexfloor"
    assert RunSettings.of_rollout(config.actor_rollout_ref.rollout) == run


def test_the_settings_survive_verls_way_to_its_processes(tmp_path):
    from verl.utils.config import omega_conf_to_dataclass

    config, run = resolved(folder=tmp_path)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert RunSettings.of_rollout(rollout) == run


@pytest.mark.parametrize(
    ("override", "field", "text"),
    [
        ("+flexfloor.wolrd_size=4", "flexfloor.wolrd_size", "unknown key; known here: alpha"),
        (
            "+flexfloor.world_size=8",
            "flexfloor.world_size",
            "is 8, but actor_rollout_ref.rollout.data_parallel_size is 4",
        ),
        ("+flexfloor.tail_guard.l_max=100", "flexfloor.tail_guard.l_max", "but data.max_response_length is 208"),
        ("+flexfloor.responses_per_prompt=4", "flexfloor.responses_per_prompt", "rollout.n is 2"),
        ("+flexfloor.rollout.temperature=0.5", "flexfloor.rollout.temperature", "rollout.temperature is 1.0"),
        ("flexfloor.floors.natural=[1,8]", "flexfloor.floors.natural", "floor 8 is above world_size 4"),
        ("+flexfloor.verl.seeds=none", "flexfloor.verl.seeds", "'item' or 'stock'"),
        ("flexfloor.method=fixed", "flexfloor.fixed_floor", "method 'fixed' needs it"),
    ],
)
def test_a_wrong_section_is_refused_with_field_and_remedy(override, field, text, tmp_path):
    with pytest.raises(InputError) as caught:
        resolved(override, folder=tmp_path)
    assert caught.value.field == field
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("trainer.v1.trainer_mode=separate_async", "trainer.v1.trainer_mode is 'separate_async'"),
        ("trainer.use_v1=false", "set trainer.use_v1=true"),
        ("actor_rollout_ref.rollout.full_determinism=true", "all responses of a prompt would be equal"),
        ("actor_rollout_ref.rollout.name=sglang", "set it to vllm"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "set it to 1"),
        ("actor_rollout_ref.rollout.expert_parallel_size=1", "set expert_parallel_size=4"),
        ("actor_rollout_ref.rollout.max_num_seqs=3", "raise it to 4"),
        ("trainer.n_gpus_per_node=8", "must fill a node of 8 devices"),
        ("trainer.n_gpus_per_node=6", "are not a multiple of 4 ranks"),
        ("algorithm.filter_groups.enable=true", "refilled groups are in no plan"),
        ("algorithm.adv_estimator=remax", "use another estimator"),
        ("data.gen_batch_size=4", "a step is planned whole"),
        ("actor_rollout_ref.model.lora_rank=8", "lora_rank=0"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.enable_eplb=true", "switch it off"),
        ("actor_rollout_ref.rollout.agent.agent_loop_manager_class=a.b.C", "FlexFloor brings the manager"),
        ("flexfloor.floors.natural=[3,4]", "3"),
        ("flexfloor.residency=planned", "name floors.planned and, for each, kv.capacity.planned"),
    ],
)
def test_what_flexfloor_does_not_run_in_is_refused_with_the_remedy(override, text, tmp_path):
    with pytest.raises((RefusedError, InputError)) as caught:
        resolved(override, folder=tmp_path)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_dense_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"], "hidden_size": 8}')
    config = verl_config(folder=tmp_path)
    config.actor_rollout_ref.model.path = str(tmp_path)
    with pytest.raises(RefusedError, match="dense model"), open_dict(config):
        resolve(config)


def test_starting_over_an_earlier_run_is_refused(tmp_path):
    (tmp_path / "flexfloor").mkdir()
    (tmp_path / "flexfloor" / "history.sqlite").touch()
    with pytest.raises(RefusedError, match=r"trainer\.resume_mode=auto"):
        resolved("trainer.resume_mode=disable", folder=tmp_path)
    resolved("trainer.resume_mode=auto", folder=tmp_path)


def test_the_resolved_section_is_one_that_flexfloor_plan_reads(tmp_path):
    _, run = resolved(folder=tmp_path)
    file = tmp_path / "config.yaml"
    OmegaConf.save({"flexfloor": run.config.resolved()}, file)
    assert load_config(file) == run.config


def test_a_server_takes_all_requests_of_a_step_at_once(tmp_path):
    from verl_integration.replica import requests_at_once

    sizes = ("data.train_batch_size=400", "actor_rollout_ref.actor.ppo_mini_batch_size=400")
    more = ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.max_num_seqs=1024")
    _, run = resolved(*sizes, *more, folder=tmp_path)
    assert requests_at_once(run) == 3200
