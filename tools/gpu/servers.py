"""The two sides of a measurement on the same devices: vLLM untouched, and FlexFloor's server."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path

from unplanned import Served, submit_all, untouched

from flexfloor.config import FlexFloorConfig
from flexfloor.driver.checks import ModelFacts
from flexfloor.driver.engines import Engines
from flexfloor.driver.handles import LocalServer
from flexfloor.driver.orders import Request, Response, Sampling, StepOrder, predicted_survivors
from flexfloor.driver.rollout import logged_step
from flexfloor.events import EventWriter
from flexfloor.plan import EpochPlan
from gpu.serving import spec_of
from gpu.sets import Set

SAMPLING = Sampling(temperature=1.0, ignore_eos=True, seeded=False)
"""Dummy weights repeat one token when they are sampled greedily, and repeated tokens share their experts."""


class Stock:
    """vLLM untouched: no settings, no hooks in use, no spare rows."""

    def __init__(self, config: FlexFloorConfig, model: Path, folder: Path) -> None:
        spec = spec_of(config, model, folder)
        self._loop = asyncio.Runner()  # the front end's tasks live in one loop, whatever other servers come and go
        with untouched(spec):
            self._engines = Engines.start(spec)

    def run(self, requests: Sequence[Request], name: str) -> Served:
        """All requests, sent at once."""
        return self._loop.run(submit_all(self._engines, requests, SAMPLING, name))

    def close(self) -> None:
        """End its engines."""
        self._loop.close()
        self._engines.shut_down()


class Ours:
    """FlexFloor's server.

    Args:
        config: the configuration.
        model: the checkpoint's folder.
        folder: runs go below it.
        smallest_floor: see `ServerSpec.of`.
    """

    def __init__(
        self, config: FlexFloorConfig, model: Path, folder: Path, *, smallest_floor: int | None = None
    ) -> None:
        self._folder, self._count = folder, 0
        self.responses: list[Response] = []
        self.server = LocalServer(spec_of(config, model, folder, smallest_floor=smallest_floor))
        self.statuses = self.server.start()
        self.facts = ModelFacts.read(model)

    def plain(self, requests: Sequence[Request], name: str) -> Served:
        """As `Stock.run`, on this server without a plan."""
        engines = self.server.server._engines
        if engines is None:
            raise RuntimeError("the server is not started")
        return self.server.wait(submit_all(engines, requests, SAMPLING, name))

    def arm(self, chosen: Set, plan: EpochPlan, name: str) -> Path:
        """Runs a plan; its run folder. The responses are kept until the next."""
        folder = self._folder / "runs" / f"{self._count:03d}-{chosen.name.replace(' ', '-')}-{name}"
        (folder / "events").mkdir(parents=True)
        events = EventWriter(folder / "events" / "driver.jsonl", run=folder.name)
        self.responses = []
        for step in plan.steps:
            self._count += 1
            order = StepOrder(
                digest=hashlib.sha256(f"{self._count}{folder.name}".encode()).hexdigest(),
                epoch=plan.epoch,
                step=step.step,
                ladder=step.ladder,
                rank_order=chosen.config.leave_order,
                requests=chosen.requests(step, self.facts.vocabulary or 0),
                sampling=SAMPLING,
                run=folder.name,
                events_dir=str(folder / "events"),
                predicted=predicted_survivors(step, step.ladder, chosen.config.leave_order),
                timed=True,
            )
            self.responses += logged_step(order, self.server, events, lambda _: None)
        events.close()
        return folder
