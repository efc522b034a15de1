"""What the Ascend module relies on in vllm-ascend and torch_npu, entry by entry, checked by reading their source.

``check_installed`` runs before anything starts; `tests/npu/test_contract.py` runs the same entries against the
packages as released. Nothing is imported. Comments in the module name an entry as ``contract: NAME``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flexfloor.engine import upstream
from flexfloor.engine.devices.ascend_assumption import RC, TESTED, TORCH_NPU, Assumption
from flexfloor.engine.devices.ascend_contract_groups import GROUPS, OPTIONS, TORCH
from flexfloor.engine.devices.ascend_contract_moe import MOE, SELECTION
from flexfloor.engine.devices.ascend_contract_worker import GRAPHS, MEMORY, RUNNER
from flexfloor.engine.devices.source_tree import SourceTree
from flexfloor.engine.upstream import Symbol
from flexfloor.errors import RefusedError, UpstreamChangedError

ALL: tuple[Assumption, ...] = (*GROUPS, *MOE, *SELECTION, *MEMORY, *GRAPHS, *RUNNER, *OPTIONS, *TORCH)

VLLM: tuple[Symbol, ...] = (
    Symbol("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.capture_model", ("self",), "called: captures graphs"),
    Symbol("vllm.v1.cudagraph_dispatcher", "CudagraphDispatcher.get_capture_descs", ("self",), "reads the keys set"),
    Symbol(
        "vllm.v1.cudagraph_dispatcher",
        "CudagraphDispatcher._compute_bs_to_padded_graph_size",
        ("self",),
        "its list of padded batch sizes is replaced where a world lacks graphs",
    ),
    Symbol("vllm.v1.worker.workspace", "unlock_workspace", (), "called before a capture"),
    Symbol("vllm.model_executor.layers.fused_moe.config", "FusedMoEConfig.ep_size", (), "read by vllm-ascend"),
)


def broken(tree: SourceTree, package: str, release: str = RC) -> dict[str, str]:
    """Assumptions of a package that do not hold in a tree: name -> what broke."""
    own = [a for a in ALL if a.package == package and release in a.releases]
    return {a.name: what for a in own if (what := a.broken(tree)) is not None}


def table() -> list[str]:
    """One row of docs/ascend.md an assumption: name, file, what stands on it, test, releases."""
    rows = []
    for a in ALL:
        where = ", ".join(a.releases) if a.package == "vllm_ascend" else TORCH_NPU
        test = f"test_contract.py::test_{a.package}"
        rows.append(f"| `{a.name}` | `{a.package}/{a.file}` | {a.why} | `{test}` | {where} |")
    return rows


def installed(distributions: Iterable[str] = ("vllm-ascend", "torch-npu")) -> dict[str, str | None]:
    """Version of each distribution, None where it is not installed."""
    found: dict[str, str | None] = {}
    for name in distributions:
        try:
            found[name] = version(name).split("+")[0]
        except PackageNotFoundError:
            found[name] = None
    return found


def package_root(package: str) -> Path | None:
    """Where a package lies; it is not imported."""
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def check_installed() -> None:
    """Refuse packages that are not the ones that were read.

    Raises:
        RefusedError: vllm-ascend is missing.
        UpstreamChangedError: another release, or an assumption that does not hold.
    """
    release, root = installed()["vllm-ascend"], package_root("vllm_ascend")
    if release is None or root is None:
        raise RefusedError("vllm-ascend is not installed", remedy=f"pip install vllm-ascend=={RC}")
    if release not in TESTED:
        raise UpstreamChangedError("vllm-ascend", f"version {release}", "was not read", ", ".join(TESTED))
    for package in ("vllm_ascend", "torch_npu"):
        place = package_root(package)
        if place is None:
            raise RefusedError(f"{package} is not installed", remedy=f"pip install torch-npu=={TORCH_NPU}")
        for name, what in broken(SourceTree(place), package, release).items():
            raise UpstreamChangedError(package, name, what, ", ".join(TESTED))
    upstream.check(VLLM)
