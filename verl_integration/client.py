"""The LLM client of one planned trajectory: it goes to the planned replica and carries seed, cap and turn."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import ray
from verl.workers.rollout.llm_server import LLMServerClient

from verl_integration.orders import SERVER_NAME, Turn

_handles: dict[int, Any] = {}


def server_of(replica: int) -> Any:
    """Ray handle of a replica's server."""
    if replica not in _handles:
        _handles[replica] = ray.get_actor(SERVER_NAME.format(replica=replica))
    return _handles[replica]


class TrajectoryClient(LLMServerClient):  # type: ignore[misc]
    """Stands in for verl's client inside one agent loop.

    Args:
        stock: verl's client.
        place: `epochs.Placement` of the prompt as plain data, and ``sample`` of the response.
        session: index of the response among the prompt's.
        turns: whether the agent loop may send more than one request.
    """

    def __init__(self, stock: LLMServerClient, place: dict[str, Any], session: int, *, turns: bool) -> None:
        self.__dict__.update(stock.__dict__)
        self._place, self._session, self._turns = place, session, turns
        self._sent = 0
        self._tokens = 0
        self.trajectory = f"{place['item_id']}:{place['samples'][session]}"

    async def _acquire_server(self, request_id: str, **_: Any) -> tuple[str, Any]:
        replica = int(self._place["replica"])
        return str(replica), server_of(replica)

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        return None

    async def generate(self, request_id: str, *, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """See verl's client; the sampling parameters are copied, since a prompt's sessions share them."""
        params = dict(sampling_params)
        if self._place["seeds"] is not None:
            params["seed"] = int(self._place["seeds"][self._session]) + self._sent
        if self._place["cap"] is not None:
            left = max(1, int(self._place["cap"]) - self._tokens)
            params["max_tokens"] = min(int(params.get("max_tokens") or left), left)
        first = self._sent == 0
        self._sent += 1
        turn = Turn(
            trajectory=self.trajectory,
            rank=int(self._place["rank"]),
            place=int(self._place["places"][self._session]) if first else None,
            more=self._turns,
        )
        output = await super().generate(
            request_id, sampling_params=params, flexfloor=dataclasses.asdict(turn), **kwargs
        )
        self._tokens += len(output.token_ids)
        return output

    async def finished(self) -> None:
        """The agent loop is through."""
        await self._settle("its agent loop sent no request")

    async def failed(self, error: BaseException) -> None:
        """The agent loop raised."""
        why = f"{self.trajectory}: {type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # the cause is what is told, not what follows from it
            await self._settle(why)
        if self._sent:
            await server_of(int(self._place["replica"])).flexfloor_note.remote(why)

    async def _settle(self, why: str) -> None:
        server, rank = server_of(int(self._place["replica"])), int(self._place["rank"])
        if self._sent == 0:
            place = int(self._place["places"][self._session])
            await server.flexfloor_lost.remote(place, rank, why)
        elif self._turns:
            await server.flexfloor_close_trajectory.remote(self.trajectory, rank)
