"""verl's vLLM replica with elastic engines behind it."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.replica import RolloutReplicaRegistry

NAME = "vllm"


def register() -> None:
    """Makes this process (the trainer's) start elastic replicas under verl's name ``vllm``."""
    RolloutReplicaRegistry.register(NAME, _load)


def _load() -> type:
    import ray
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

    from verl_integration.server import ElasticHttpServer

    class ElasticReplica(vLLMReplica):  # type: ignore[misc]
        """Rollout replicas are elastic; those of reward and teacher models are verl's own."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if not (self.is_reward_model or self.is_teacher_model):
                self.server_class = ray.remote(ElasticHttpServer)

    return ElasticReplica
