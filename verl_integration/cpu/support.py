"""What stock verl lacks on a machine without accelerators, in each process of a run on ``trainer.device: cpu``.

Two official doors (platform registry, distribution finder) and one patch (`process_group`).
"""

from __future__ import annotations

from typing import Any

_applied = False


def apply() -> None:
    """Make verl run on CPU in this process; idempotent.

    Raises:
        UpstreamChangedError: a symbol that is relied on is gone.
    """
    global _applied
    if _applied:
        return
    _applied = True
    from verl.plugin.platform import PlatformRegistry

    from verl_integration import upstream
    from verl_integration.cpu import alias, process_group
    from verl_integration.cpu.platform import CpuPlatform

    upstream.check(upstream.CPU)
    PlatformRegistry.register(platform="cpu")(CpuPlatform)
    alias.install()
    process_group.patch()


def environment() -> dict[str, str]:
    """Variables of every process of such a run; a value that stands already wins."""
    return {
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # verl registers its FSDP engines for cuda and npu only; the code is the same
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }


def local_cluster(ranks: int) -> dict[str, Any]:
    """``ray.init`` arguments of a local Ray: verl asks for GPUs by count, so the ranks are declared as such."""
    return {
        "num_gpus": ranks,
        "num_cpus": max(16, 4 * ranks),
        "include_dashboard": False,
        "object_store_memory": 256 << 20,
    }
