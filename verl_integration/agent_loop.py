"""The agent loop of planned trajectories: verl's own (or the user's) behind a client that knows the plan.

Registered under `NAME` through verl's ``agent_loop_config_path``; the manager puts the name of the loop that the prompt
would have had into the prompt's plan. Works for single-turn and tool loops alike: a loop with several turns keeps its
trajectory open until it returns.
"""

from __future__ import annotations

from typing import Any

import hydra

from verl_integration.client import TrajectoryClient

NAME = "flexfloor"
SINGLE_TURN = ("single_turn_agent",)
"""Loops that send one request; every other loop is taken to send more."""


class PlannedAgentLoop:
    """What verl instantiates for each response; its arguments go on to the loop behind it."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.pop("name", None)
        self._kwargs = {name: value for name, value in kwargs.items() if name != "name"}

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Runs the loop behind this one.

        Args:
            sampling_params: verl's; shared by all sessions of a prompt.
            **kwargs: the prompt's fields; ``flexfloor`` is its plan, ``session_id`` the response's index.
        """
        from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

        place = kwargs["flexfloor"]
        behind = place["agent_name"]
        if behind not in _agent_loop_registry:
            raise ValueError(f"agent loop {behind!r} is not registered; known: {', '.join(_agent_loop_registry)}")
        turns = behind not in SINGLE_TURN
        client = TrajectoryClient(self._kwargs["server_manager"], place, int(kwargs["session_id"]), turns=turns)
        try:
            arguments = {**self._kwargs, "server_manager": client}
            loop = hydra.utils.instantiate(config=_agent_loop_registry[behind], **arguments)
            output = await loop.run(sampling_params, **kwargs)
        except BaseException as error:
            await client.failed(error)
            raise
        await client.finished()
        return output
