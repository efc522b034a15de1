"""The released packages of Ascend, downloaded by name and unpacked; nothing of them is run or imported.

vllm-ascend is published as source only, and pip asks a source package for its metadata, which would run its setup.py.
A build backend of our own answers from PKG-INFO instead.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).parents[2] / "build" / "npu-packages"
BACKEND = """
from pathlib import Path

def _none(config_settings=None):
    return []

get_requires_for_build_wheel = get_requires_for_build_sdist = _none

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    head = Path("PKG-INFO").read_text(encoding="utf-8").split("\\n\\n")[0]
    said = dict(line.split(": ", 1) for line in head.splitlines() if line.startswith(("Name: ", "Version: ")))
    name = f"{said['Name'].replace('-', '_')}-{said['Version']}.dist-info"
    folder = Path(metadata_directory, name)
    folder.mkdir()
    text = f"Metadata-Version: 2.1\\nName: {said['Name']}\\nVersion: {said['Version']}\\n"
    folder.joinpath("METADATA").write_text(text, encoding="utf-8")
    return name
"""


def vllm_ascend(release):
    """The unpacked package folder of a release of vllm-ascend."""
    place = CACHE / f"vllm_ascend-{release}"
    if not (place / "vllm_ascend").is_dir():
        archive = _download(f"vllm-ascend=={release}", "--no-binary", ":all:", "--no-build-isolation")
        _unpack_source(archive, place)
    return place / "vllm_ascend"


def torch_npu(release):
    """The unpacked Python sources and headers of a release of torch-npu, and its library of strings."""
    place = CACHE / f"torch_npu-{release}"
    if not (place / "torch_npu").is_dir():
        archive = _wheel(f"torch-npu=={release}")
        kept = ("torch_npu/lib/libtorch_npu.so",)
        _unpack_wheel(archive, place, lambda name: name.endswith((".py", ".hpp")) or name in kept)
    return place / "torch_npu"


def torch_helper(release):
    """torch/distributed/distributed_c10d.py of a release of torch."""
    place = CACHE / f"torch-{release}"
    file = "torch/distributed/distributed_c10d.py"
    if not (place / file).is_file():
        archive = _wheel(f"torch=={release}", "manylinux_2_28_aarch64")
        _unpack_wheel(archive, place, lambda name: name == file)
        archive.unlink()
    return place / "torch"


def _wheel(what, platform="manylinux_2_28_x86_64"):
    return _download(what, "--only-binary", ":all:", "--python-version", "3.11", "--platform", platform)


def _download(what, *options):
    folder = CACHE / "downloads" / what.replace("==", "-")
    shutil.rmtree(folder, ignore_errors=True)
    backend = CACHE / "backend" / "setuptools"
    backend.mkdir(parents=True, exist_ok=True)
    backend.joinpath("__init__.py").write_text("", encoding="utf-8")
    backend.joinpath("build_meta.py").write_text(BACKEND, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check"]
    environment = {**os.environ, "PYTHONPATH": str(backend.parent)}
    done = subprocess.run(
        [*command, "-d", str(folder), *options, what], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"pip download {what}: {done.stderr[-2000:]}"
    (archive,) = folder.iterdir()
    return archive


def _unpack_source(archive, place):
    with tarfile.open(archive) as files:
        members = [m for m in files.getmembers() if m.isfile() and m.name.endswith((".py", ".toml", "PKG-INFO"))]
        files.extractall(place.with_suffix(".part"), members, filter="data")
    (top,) = place.with_suffix(".part").iterdir()
    shutil.rmtree(place, ignore_errors=True)
    top.rename(place)
    place.with_suffix(".part").rmdir()


def _unpack_wheel(archive, place, wanted):
    part = place.with_suffix(".part")
    with zipfile.ZipFile(archive) as files:
        files.extractall(part, [name for name in files.namelist() if wanted(name)])
    shutil.rmtree(place, ignore_errors=True)
    part.rename(place)
