"""Configurations, plans and servers for the driver's engine tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexfloor.config import FlexFloorConfig, config_from_mapping
from flexfloor.driver.handles import LocalServer
from flexfloor.driver.spec import ServerSpec
from flexfloor.plan import EpochPlan, RankPlan, StepPlan, release_area
from flexfloor.workload import Prompt, Workload

RUN = "test"


def settings(**changes: Any) -> dict[str, Any]:
    """The `flexfloor:` section of the tests."""
    return {
        "world_size": 4,
        "responses_per_prompt": 1,
        "step_prompts": 8,
        "floors": {"natural": [1, 2]},
        "tail_guard": {"l_max": 400, "c_min": 16, "rounding": 16},
        "engine": {
            "combine": "invariant",
            "kv_cache_bytes": 16 << 20,
            "max_num_seqs": 16,
            "max_model_len": 512,
            "block_size": 32,
            "dtype": "bfloat16",
            "deadline_s": 20.0,
            "vllm": {"skip_tokenizer_init": True},
        },
        "rollout": {"temperature": 1.0, "ignore_eos": True, "logprobs": True},
        **changes,
    }


def config(**changes: Any) -> FlexFloorConfig:
    """The configuration of the tests."""
    return config_from_mapping(settings(**changes))


def prompts(lengths: Sequence[int]) -> Workload:
    """Prompts p0, p1 and so on, of different token ids, with these response lengths."""
    return Workload([Prompt(f"p{i}", tuple(range(3 + i, 11 + 2 * i)), length) for i, length in enumerate(lengths)])


def step(index: int, groups: Sequence[Sequence[int]], lengths: Sequence[int], ladder: tuple[int, ...]) -> StepPlan:
    """A step that gives rank r the prompts ``groups[r]`` (indices); completions are the known lengths."""
    done = [max((lengths[i] for i in group), default=0) for group in groups]
    tail, world = max(done), len(groups)
    times = tuple(sorted(done)[world - size - 1] for size in ladder[1:])
    return StepPlan(
        step=index,
        items=tuple(f"p{i}" for group in groups for i in group),
        cap=None,
        tail=tail,
        floor=ladder[-1],
        ladder=ladder,
        quorum_times=times,
        release_area=release_area(ladder, times, tail),
        residency="natural",
        kv_tokens_per_rank=None,
        capture_sizes=(),
        kv_safe=True,
        optimality_gap=0.0,
        excluded_floors={},
        ranks=tuple(
            RankPlan(rank=r, items=tuple(f"p{i}" for i in group), completion=done[r], peak_tokens=0)
            for r, group in enumerate(groups)
        ),
    )


def plan(*steps: StepPlan, epoch: int = 0) -> EpochPlan:
    """A plan of these steps."""
    return EpochPlan(epoch=epoch, world_size=4, method="flex", config_digest="test", steps=steps)


def spec(folder: Path, model: Path, settings: FlexFloorConfig, **options: Any) -> ServerSpec:
    """How a server of the tests is started; its files lie in ``folder``."""
    options = {"poison": True, "events_dir": folder / "events", "board": folder / "board", "run": RUN, **options}
    return ServerSpec.of(settings, model, **options)


def local_server(folder: Path, model: Path, settings: FlexFloorConfig, **options: Any) -> LocalServer:
    """A server in this process, not yet started."""
    return LocalServer(spec(folder, model, settings, **options))
