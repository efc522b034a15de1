"""Doors: what happens before anything starts, with the section and without it. No engine, no Ray."""

import subprocess
import sys

import pytest
from composed import ROOT, verl_config
from omegaconf import open_dict

from flexfloor.engine.upstream import Symbol
from flexfloor.errors import InputError, RefusedError, UpstreamChangedError
from flexfloor.plan import EpochPlan
from verl_integration import main, upstream
from verl_integration.dry_run import write_first_plan
from verl_integration.section import resolve

sys.path.insert(0, str(ROOT / "recipes"))


@pytest.fixture
def files(tmp_path):
    import train_cpu_task

    return train_cpu_task.write(tmp_path / "data", train_cpu_task.rows())


def dry(tmp_path, files, *overrides):
    config = verl_config("cpu_flexfloor", *overrides, folder=tmp_path)
    with open_dict(config):
        config.data.train_files = str(files[0])
        run = resolve(config)
    return write_first_plan(config, run)


def test_a_dry_run_writes_configuration_and_first_plan_and_starts_nothing(tmp_path, files):
    import ray

    written = dry(tmp_path, files, "flexfloor.floors.natural=[1, 4]")
    assert [path.name for path in written] == ["config.yaml", "verl.yaml", "epoch-0.json"]
    plan = EpochPlan.load(written[-1])
    assert sorted(item for step in plan.steps for item in step.items) == [f"p{i:03}" for i in range(32)]
    assert all(step.ladder == (4,) for step in plan.steps)
    assert "trainer_mode: flexfloor" in written[1].read_text()
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["data.train_batch_size=12", "actor_rollout_ref.actor.ppo_mini_batch_size=12"], [12, 12, 8]),
        (["data.train_batch_size=6", "actor_rollout_ref.actor.ppo_mini_batch_size=6"], [6, 6, 6, 6, 6, 2]),
        (["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"], [2] * 16),
        (["actor_rollout_ref.rollout.n=1"], [8] * 4),
        (["actor_rollout_ref.rollout.n=5"], [8] * 4),
        (["actor_rollout_ref.rollout.n=7"], [8] * 4),
        (["data.shuffle=true", "data.seed=3"], [8] * 4),
    ],
)
def test_shapes_that_users_bring_are_planned(tmp_path, files, overrides, steps):
    plan = EpochPlan.load(dry(tmp_path, files, *overrides)[-1])
    assert [len(step.items) for step in plan.steps] == steps


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["data.train_batch_size=3", "actor_rollout_ref.actor.ppo_mini_batch_size=3"], "as a multiple of 4"),
        (["data.max_prompt_length=14"], "set it to 15, or leave such prompts out"),
        (["flexfloor.verl.item_id=extra_info.uuid"], "row 0 has no extra_info.uuid"),
        (["flexfloor.verl.item_id=uuid"], "no column 'uuid' in the dataset"),
        (["actor_rollout_ref.rollout.n=9"], "raise it to 18"),
        (["algorithm.adv_estimator=gae"], "set algorithm.adv_estimator=grpo"),
        (["critic.enable=true"], "leave critic.enable out"),
    ],
)
def test_shapes_that_cannot_work_are_refused_with_the_remedy(tmp_path, files, overrides, text):
    with pytest.raises((InputError, RefusedError)) as caught:
        dry(tmp_path, files, *overrides)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_prompt_at_the_limit_passes(tmp_path, files):
    assert dry(tmp_path, files, "data.max_prompt_length=15")
    assert dry(tmp_path, files, "data.max_prompt_length=16")


def test_without_the_section_verls_own_entry_point_runs(monkeypatch):
    from verl.trainer import main_ppo

    given = []
    monkeypatch.setattr(main_ppo.main, "__wrapped__", given.append)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    config = verl_config("cpu")
    main.train(config)
    assert given == [config]
    assert config.trainer.v1.trainer_mode == "sync"
    assert not config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class")
    assert not config.actor_rollout_ref.rollout.get("custom")


def test_a_cluster_that_is_joined_gets_no_arguments_of_a_local_one(monkeypatch):
    from verl.trainer import main_ppo

    monkeypatch.setattr(main_ppo.main, "__wrapped__", lambda _: None)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    found = []
    for address in ("", "127.0.0.1:6379"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        config = verl_config("cpu")
        main.train(config)
        found.append(set(config.ray_kwargs.ray_init))
    assert found[0] - found[1] == {"num_gpus", "num_cpus", "include_dashboard", "object_store_memory"}


def test_every_symbol_that_is_relied_on_is_there():
    upstream.check_version()
    upstream.check_entry_point()
    upstream.check(upstream.RUN)
    upstream.check(upstream.CPU)


def test_a_symbol_that_is_gone_is_named_with_the_tested_version():
    gone = Symbol("verl.trainer.main_ppo", "TaskRunnerV1.run_all", ("self",), "subclassed")
    with pytest.raises(UpstreamChangedError, match=r"TaskRunnerV1.run_all is gone .* tested with verl 0.9.1"):
        upstream.check((gone,))
    changed = Symbol("verl.trainer.main_ppo", "run_ppo", ("config", "ray"), "called")
    with pytest.raises(UpstreamChangedError, match=r"lost the parameters \['ray'\]"):
        upstream.check((changed,))


def test_another_verl_is_refused(monkeypatch):
    monkeypatch.setattr(upstream, "version", lambda _: "0.10.0")
    with pytest.raises(UpstreamChangedError, match=r"version 0.10.0 was not tested; .* verl 0.9.1"):
        upstream.check_version()


def test_the_plugin_changes_nothing_unless_the_cpu_platform_is_asked_for():
    code = (
        "import torch.distributed as d; before = d.init_process_group; import verl; "
        "from verl.plugin.platform import PlatformRegistry as p; import verl_integration.plugin as f; import sys; "
        "print(f.LOADED, p.get('cpu'), d.init_process_group is before, 'verl_integration.trainer' in sys.modules)"
    )
    import os

    env = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.splitlines()[-1] == "True None True False", done.stderr[-2000:]


def test_bad_input_is_one_line_and_exit_code_2(tmp_path):
    command = [sys.executable, "-m", "verl_integration.main", "--config-name", "cpu_flexfloor", "--dry-run"]
    more = ["+flexfloor.wolrd_size=4", f"hydra.run.dir={tmp_path}", f"trainer.default_local_dir={tmp_path}"]
    done = subprocess.run([*command, *more], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("flexfloor: flexfloor.wolrd_size: unknown key; known here: ")
    assert "Traceback" not in done.stderr
