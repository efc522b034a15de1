"""Tests of the Ascend module. Contract and stand-in tests run anywhere; device tests only where NPUs are."""

from pathlib import Path

import packages
import pytest

from flexfloor.engine.devices.ascend_assumption import RC, STABLE, TORCH_NPU
from flexfloor.engine.devices.source_tree import SourceTree

DEVICE_FILE = "test_device.py"


def _missing():
    try:
        import torch
        import torch_npu  # noqa: F401
    except ImportError as error:
        return f"{error.name or 'torch_npu'} is not installed"
    if torch.npu.device_count() < 2:
        return f"two NPUs are needed, {torch.npu.device_count()} are here"
    return None


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    mine = [item for item in items if Path(item.fspath) == here / DEVICE_FILE]
    reason = _missing() if mine else None
    for item in mine:
        item.add_marker(pytest.mark.npu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def trees():
    """Release of vllm-ascend -> its source."""
    return {release: SourceTree(packages.vllm_ascend(release)) for release in (RC, STABLE)}


@pytest.fixture(scope="session")
def torch_npu_tree():
    """The source of torch-npu."""
    return SourceTree(packages.torch_npu(TORCH_NPU))


@pytest.fixture(scope="session")
def torch_tree():
    """The part of torch that the pinned torch-npu stands on."""
    return SourceTree(packages.torch_helper("2.10.0"))
