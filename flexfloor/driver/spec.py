"""How a rollout server is started: engine arguments and environment, as plain data that travels to the server."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexfloor.config import FlexFloorConfig
from flexfloor.engine.settings import EXTENSION, EngineSettings

CPU_KV_BYTES = 256 << 20
"""KV cache a rank on CPU where the configuration names none; vLLM's own default would share out the whole machine."""

CLEARED = ("VLLM_CPU_KVCACHE_SPACE",)
"""Variables that must not stand: they override engine arguments."""

STALL_MARGIN_S = 15.0
START_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ServerSpec:
    """One rollout server.

    Attributes:
        settings: what the engine processes must know before the model is loaded.
        engine: engine arguments of vLLM.
        log: file for everything the server's processes print; None leaves it on the terminal.
        slots: Ray CPUs the server holds.
        stall_s: longest silence of a rank that is not idle, seconds.
    """

    settings: EngineSettings
    engine: dict[str, Any] = field(default_factory=dict)
    log: str | None = None
    slots: int = 1
    stall_s: float = 45.0

    @property
    def world_size(self) -> int:
        """Ranks of the full world."""
        return int(self.settings.world_size)

    @classmethod
    def of(
        cls,
        config: FlexFloorConfig,
        model: str | Path,
        *,
        events_dir: str | Path,
        board: str | Path,
        run: str,
        log: str | Path | None = None,
        smallest_floor: int | None = None,
        faults: tuple[str, ...] = (),
        poison: bool = False,
    ) -> ServerSpec:
        """From a configuration.

        Args:
            config: the configuration.
            model: the checkpoint's folder.
            events_dir: folder of the ranks' event files.
            board: path of the status board.
            run: run id of the events.
            log: see the class.
            smallest_floor: smallest EP size that rows are allocated for; None: the configuration's.
            faults: faults to inject (tests), see :mod:`flexfloor.elastic.faults`.
            poison: fill released and spare rows with NaN (tests).
        """
        engine = config.engine
        settings = EngineSettings(
            world_size=config.world_size,
            smallest_floor=smallest_floor or min(config.admissible_sizes),
            combine=engine.combine,
            deadline_s=engine.deadline_s,
            trial_step=engine.trial_step,
            poison=poison,
            faults=list(faults),
            events_dir=str(events_dir),
            board=str(board),
            run=run,
        )
        own = {
            "max_model_len": engine.max_model_len,
            "max_num_seqs": engine.max_num_seqs,
            "block_size": engine.block_size,
            "kv_cache_memory_bytes": engine.kv_cache_bytes,
        }
        arguments = {
            "model": str(model),
            "dtype": engine.dtype,
            "enforce_eager": engine.enforce_eager,
            "seed": config.rollout.seed,
            **{name: value for name, value in own.items() if value is not None},
            **engine.vllm,
            "tensor_parallel_size": 1,
            "data_parallel_size": config.world_size,
            "enable_expert_parallel": True,
            "worker_extension_cls": EXTENSION,
        }
        return cls(
            settings,
            arguments,
            str(log) if log is not None else None,
            config.world_size,
            engine.deadline_s + STALL_MARGIN_S,
        )

    def environment(self) -> dict[str, str]:
        """Variables that must stand before vllm is imported in any process."""
        threads = max(1, (os.cpu_count() or 1) // self.world_size)
        return {
            **self.settings.export(),
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
