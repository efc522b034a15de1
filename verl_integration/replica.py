"""verl's vLLM replica with elastic engines behind it."""

from __future__ import annotations

import math
from typing import Any

from verl.workers.rollout.replica import RolloutReplicaRegistry

from verl_integration.section import RunSettings

NAME = "vllm"
CONTROL_CALLS = 64


def register() -> None:
    """Makes this process (the trainer's) start elastic replicas under verl's name ``vllm``."""
    RolloutReplicaRegistry.register(NAME, _load)


def requests_at_once(run: RunSettings) -> int:
    """Most requests of one step on one replica."""
    return math.ceil(run.config.step_prompts / run.replicas) * run.config.responses_per_prompt


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

        @property
        def max_concurrency(self) -> int:
            """All requests of a step wait in the server at once: for their turn, and for the last one to come."""
            run = RunSettings.of_rollout(self.config)
            return max(int(super().max_concurrency), 0 if run is None else requests_at_once(run) + CONTROL_CALLS)

    return ElasticReplica
