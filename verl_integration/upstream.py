"""Every symbol of verl (and torch, for verl's sake) that is patched or relied on beyond its documented doors.

Checked before a run starts, so that another version is refused with the symbol's name instead of failing in a step.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, entry_points, version

from flexfloor.engine.upstream import Symbol
from flexfloor.engine.upstream import check as check_symbols
from flexfloor.errors import RefusedError, UpstreamChangedError

VERL_TESTED = ("0.9.1",)
PLUGIN = "verl_integration.plugin"
EXTRA = "pip install 'flexfloor[verl]'"

_TRAINER = "verl.trainer.ppo.v1.trainer_base"
_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
_WORKER = "verl.workers.rollout.vllm_rollout.utils"

CPU: tuple[Symbol, ...] = (
    Symbol(
        "torch.distributed",
        "init_process_group",
        ("backend",),
        "patched on CPU: verl names the backend cpu:gloo twice",
    ),
)

RUN: tuple[Symbol, ...] = (
    Symbol("verl.trainer.main_ppo", "run_ppo", ("config", "task_runner_class"), "called: starts Ray and the runner"),
    Symbol("verl.trainer.main_ppo", "TaskRunnerV1.run", ("self", "config"), "subclassed: errors become one line"),
    Symbol(_TRAINER, "PPOTrainer._init_dataloader", ("self",), "extended: the last partial step of an epoch counts"),
    Symbol(_TRAINER, "PPOTrainer._next_train_batch", ("self", "num_prompts"), "replaced: the plan says the prompts"),
    Symbol(_TRAINER, "PPOTrainer._submit_batch_to_rollout", ("self", "batch"), "extended: the plan is installed first"),
    Symbol(
        _TRAINER,
        "PPOTrainer._step_once",
        ("self", "metrics", "timing_raw", "sample_batch_size"),
        "extended: prompts of this step",
    ),
    Symbol(_TRAINER, "PPOTrainer._balance_batch", ("self", "batch", "metrics"), "extended: lengths are harvested"),
    Symbol(_TRAINER, "PPOTrainer._load_checkpoint", ("self",), "extended: the history goes back with it"),
    Symbol(_TRAINER, "PPOTrainer._build_replay_buffer", ("self",), "extended: polled more often"),
    Symbol(_TRAINER, "PPOTrainer._compute_metrics", ("self", "batch", "metrics"), "extended: FlexFloor's figures"),
    Symbol("verl.trainer.ppo.v1.trainer_sync", "PPOTrainerSync.on_sample_end", ("self",), "extended: full world first"),
    Symbol("verl.workers.rollout.replica", "RolloutReplicaRegistry.register", ("name", "loader"), "called"),
    Symbol(_SERVER, "vLLMReplica.launch_servers", ("self",), "its server class is replaced"),
    Symbol(_SERVER, "vLLMHttpServer.run_server", ("self", "args"), "extended: engines start with FlexFloor's settings"),
    Symbol(
        _SERVER,
        "vLLMHttpServer.generate",
        ("self", "prompt_ids", "sampling_params", "request_id"),
        "extended: a request knows its rank",
    ),
    Symbol(_SERVER, "vLLMHttpServer._preprocess_engine_kwargs", ("self", "engine_kwargs"), "extended"),
    Symbol(_SERVER, "vLLMHttpServer._get_worker_extension_cls", ("self",), "replaced"),
    Symbol(_SERVER, "vLLMHttpServer.set_global_steps", ("self", "global_steps"), "extended: weights have arrived"),
    Symbol(_WORKER, "vLLMColocateWorkerExtension.update_weights_from_ipc", ("self", "use_shm"), "extended"),
    Symbol(_WORKER, "vLLMColocateWorkerExtension._get_zmq_handle", ("self",), "called on CPU"),
    Symbol(
        "verl.workers.rollout.llm_server",
        "LLMServerClient._acquire_server",
        ("self", "request_id"),
        "replaced: the plan says the replica",
    ),
    Symbol(
        "verl.trainer.ppo.v1.agent_loop_tq",
        "AgentLoopManagerTQ.generate_sequences",
        ("self", "prompts"),
        "extended: trajectories know their place",
    ),
    Symbol("verl.experimental.agent_loop.agent_loop", "_agent_loop_registry", (), "read: the agent loop behind ours"),
    Symbol(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.add_request",
        ("self", "request_id", "prompt", "params", "data_parallel_rank"),
        "wrapped on the server's own engine: rank and order of a request",
    ),
)


def check(symbols: tuple[Symbol, ...]) -> None:
    """See `flexfloor.engine.upstream.check`; names verl's tested versions.

    Raises:
        UpstreamChangedError: a symbol is gone or has other parameters.
    """
    check_symbols(symbols, ", ".join(VERL_TESTED))


def installed_verl() -> str:
    """Version of the installed verl.

    Raises:
        RefusedError: there is none.
    """
    try:
        return version("verl")
    except PackageNotFoundError as error:
        raise RefusedError("verl is not installed", remedy=f"run {EXTRA} (verl {', '.join(VERL_TESTED)})") from error


def check_version() -> None:
    """Refuse a verl that was not tested.

    Raises:
        RefusedError: there is no verl.
        UpstreamChangedError: another version.
    """
    found = installed_verl()
    if found not in VERL_TESTED:
        raise UpstreamChangedError("verl", f"version {found}", "was not tested", ", ".join(VERL_TESTED))


def check_entry_point() -> None:
    """verl swallows what goes wrong with a plugin, a missing one included: look for it here.

    Raises:
        RefusedError: this installation does not name the plugin.
    """
    if not any(point.value == PLUGIN for point in entry_points(group="verl.plugins")):
        raise RefusedError(
            "verl's plugin of FlexFloor is not installed (or an old flexfloor.egg-info lies in this folder)",
            remedy="run pip install again",
        )
