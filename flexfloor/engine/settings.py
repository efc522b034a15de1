"""What an engine process must know before the model is loaded.

It travels in one environment variable, because vLLM offers no door for plugin settings
that every platform accepts (``additional_config`` is closed on Ascend) and because the
expert-row capacity is needed inside ``load_model``. The variable's absence is the off
switch: without it the plugin changes nothing.
"""

from __future__ import annotations

import json
import os
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flexfloor.errors import InputError

ENV = "FLEXFLOOR_ENGINE"
EXTENSION = "flexfloor.engine.worker.ElasticWorkerExtension"


class EngineSettings(BaseModel):
    """Settings of one EP group, equal on all its ranks.

    Attributes:
        world_size: ranks N of the full world.
        smallest_floor: smallest EP size of the run; E / smallest_floor rows are allocated a rank.
        combine: ``stock`` is vLLM's own. ``invariant`` is verification mode: sums of expert outputs that do not depend
            on the EP size (4 times the combine traffic on CUDA, top-k times on CPU), and batches padded as in the full
            world, for which a shrink captures all decode graphs within reach.
        deadline_s: longest wait inside a transition, seconds.
        trial_step: run one dummy step in the next world before leavers are let go.
        keep_groups: how many survivor sets keep their process groups for reuse.
        poison: fill released and spare rows with NaN (tests: a stale read cannot pass).
        faults: faults to inject, see :mod:`flexfloor.elastic.faults`.
        events_dir: directory for ``rank-<r>.jsonl``.
        board: path of the status board.
        run: run id written with every event.
        replica: index of this replica.
        extension: the worker extension class that the engines are started with (another framework may combine its own
            with ours).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    world_size: int = Field(ge=2)
    smallest_floor: int = Field(ge=1)
    combine: Literal["stock", "invariant"] = "stock"
    deadline_s: float = Field(default=60.0, gt=0)
    trial_step: bool = True
    keep_groups: int = Field(default=16, ge=1)
    poison: bool = False
    faults: list[str] = Field(default_factory=list)
    events_dir: str
    board: str
    run: str = "run"
    replica: int = 0
    extension: str = EXTENSION

    def export(self) -> dict[str, str]:
        """The environment variable that carries these settings to the engine processes."""
        return {ENV: self.model_dump_json()}

    @classmethod
    def from_env(cls) -> EngineSettings | None:
        """The settings of this process, or None when FlexFloor is not in use.

        Raises:
            InputError: the variable holds something else.
        """
        text = os.environ.get(ENV)
        if not text:
            return None
        try:
            return cls.model_validate(json.loads(text))
        except (ValidationError, ValueError) as error:
            raise InputError(f"not valid engine settings: {str(error).splitlines()[0]}", field=ENV) from error
