"""verl's agent-loop manager, with every training prompt told its place in the plan."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.utils import tensordict_utils as tu

from verl_integration import agent_loop

PLAN = "flexfloor"
"""Batch field with the plan of each prompt."""


class PlannedAgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """``rollout.agent.agent_loop_manager_class``."""

    def generate_sequences(self, prompts: Any) -> None:
        """Dispatches the batch without waiting; batches without a plan (validation) go verl's own way."""
        if PLAN in prompts:
            names = [str(name) for name in _values(prompts, "agent_name", self._default_loop(), len(prompts))]
            plans = [dict(plan) for plan in _values(prompts, PLAN, None, len(prompts))]
            for plan, name in zip(plans, names, strict=True):
                plan["agent_name"] = name
            for field, values in ((PLAN, plans), ("agent_name", [agent_loop.NAME] * len(plans))):
                prompts.pop(field, None)
                tu.assign_non_tensor_stack(prompts, field, values)
        super().generate_sequences(prompts)

    def _default_loop(self) -> str:
        return str(self.rollout_config.agent.default_agent_loop)


def _values(prompts: Any, field: str, default: Any, count: int) -> list[Any]:
    if field not in prompts:
        return [default] * count
    values = prompts[field]
    if isinstance(values, str | dict):
        return [values] * count
    return [getattr(value, "data", value) for value in values]
