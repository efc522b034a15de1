"""How an engine server of CUDA ranks is started for a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexfloor.config import FlexFloorConfig, config_from_mapping
from flexfloor.driver.spec import ServerSpec

BUCKETS = (1, 2, 4, 8, 16, 32, 64)


def section(*, dummy: bool, combine: str, use: float, world_size: int, floors: Sequence[int]) -> dict[str, Any]:
    """The `flexfloor:` section of a measurement: natural residency unless it is changed."""
    vllm: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enable_sleep_mode": True,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": use,
        "max_num_batched_tokens": 8192,
        "kernel_config": {"enable_jit_warmup": False},
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": list(BUCKETS),
        },
    }
    if dummy:
        vllm["load_format"] = "dummy"
    return {
        "world_size": world_size,
        "responses_per_prompt": 1,
        "step_prompts": world_size,
        "floors": {"natural": list(floors), "planned": list(floors)},
        "tail_guard": {"enabled": False},
        "engine": {
            "combine": combine,
            "dtype": "bfloat16",
            "max_num_seqs": max(BUCKETS),
            "max_model_len": 4096,
            "deadline_s": 30.0,
            "vllm": vllm,
        },
    }


def server_spec(
    model: Path,
    folder: Path,
    *,
    dummy: bool,
    combine: str,
    poison: bool,
    use: float,
    deadline_s: float = 30.0,
    faults: tuple[str, ...] = (),
    ahead: bool = True,
    ladder: Sequence[int] = (2, 1),
) -> ServerSpec:
    """How the server of ``ladder[0]`` ranks is started; ``ahead``: vLLM schedules a batch while the one before runs."""
    world, *floors = ladder
    made = section(dummy=dummy, combine=combine, use=use, world_size=world, floors=floors)
    made["engine"]["deadline_s"] = deadline_s
    made["engine"]["vllm"]["async_scheduling"] = ahead
    return spec_of(config_from_mapping(made), model, folder, poison=poison, faults=faults)


def four_ranks(model: Path, folder: Path, *, faults: tuple[str, ...] = ()) -> ServerSpec:
    """How a server of four ranks is started: invariant combine, poisoned rows, a gibibyte of KV a rank."""
    made = section(dummy=False, combine="invariant", use=0.1, world_size=4, floors=[2, 1])
    made["engine"]["kv_cache_bytes"] = 1 << 30
    return spec_of(config_from_mapping(made), model, folder, poison=True, faults=faults)


def spec_of(config: FlexFloorConfig, model: Path, folder: Path, **more: Any) -> ServerSpec:
    """A server of a configuration; ``more`` goes to `ServerSpec.of`."""
    return ServerSpec.of(config, model, events_dir=folder / "events", board=folder / "board", run="gpu", **more)
