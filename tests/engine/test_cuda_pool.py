"""vLLM's CuMem pools as FlexFloor calls them: the extension's functions by ctypes, the workspace in the KV pool."""

import contextlib
import ctypes.util
import shutil
import subprocess
import time

import pytest
import torch
from vllm.device_allocator import cumem

from flexfloor.engine.devices.cuda_pool import Extension, grows, in_kv_pool
from flexfloor.errors import UpstreamChangedError

SOURCE = """
#include <string.h>
#include <sys/types.h>
#include <unistd.h>
int error_code = 0;
char error_msg[10240];
unsigned long long seen[4];
void create_and_map(unsigned long long device, ssize_t size, unsigned long long at, void *handle) {
    usleep(200000);
    seen[0] = device; seen[1] = size; seen[2] = at; seen[3] = (unsigned long long) handle;
    if (size == 13) { error_code = 2; strcpy(error_msg, "CUDA Error: out of memory"); }
}
void unmap_and_release(unsigned long long device, ssize_t size, unsigned long long at, void *handle) { seen[1] = 0; }
"""
HANDLE = (3, 1 << 40, 1 << 46, 1 << 45)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler is installed")
    folder = tmp_path_factory.mktemp("extension")
    (folder / "pool.c").write_text(SOURCE)
    path = folder / "pool.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, folder / "pool.c"], check=True)
    return str(path)


def test_handles_reach_the_extension_whole(library):
    extension = Extension(library)
    seen = (ctypes.c_ulonglong * 4).in_dll(ctypes.CDLL(library), "seen")
    extension.create_and_map(HANDLE)
    assert tuple(seen) == HANDLE
    extension.unmap_and_release(HANDLE)
    assert seen[1] == 0


def test_what_the_driver_refuses_is_raised_once(library):
    extension = Extension(library)
    with pytest.raises(RuntimeError, match="CUDA Error: out of memory"):
        extension.create_and_map((0, 13, 0, 0))
    extension.create_and_map(HANDLE)


def test_others_run_while_memory_is_mapped(library):
    import threading

    extension, steps = Extension(library), []
    thread = threading.Thread(target=extension.create_and_map, args=(HANDLE,))
    thread.start()
    while thread.is_alive():
        steps.append(time.perf_counter())
        time.sleep(0.001)
    assert len(steps) > 20, "the interpreter's lock was held"


def test_another_extension_is_refused():
    with pytest.raises(UpstreamChangedError, match="create_and_map"):
        Extension(ctypes.util.find_library("m"))


@pytest.mark.parametrize(
    ("spaces", "needed", "answer"),
    [([None], 1, True), ([torch.empty(8)], 33, True), ([torch.empty(8)], 32, False), ([None, None], 1, False)],
)
def test_only_a_single_workspace_that_grows_moves_into_the_pool(spaces, needed, answer):
    assert grows(spaces, needed) is answer


def test_the_workspace_sleeps_with_kv_and_every_pool_is_kept(monkeypatch):
    used, unmapped = {1: 8, 11: 8, 12: 8}, []

    class Pool:
        def __init__(self, address):
            self.address = address

        def snapshot(self):
            return [{"address": self.address, "allocated_size": used[self.address]}]

    class Allocator:
        def __init__(self):
            self.allocator_and_pools = {"weights": (Pool(1), None)}
            self.pointer_to_data = {1: cumem.AllocationData((0, 8, 1, 0), "weights")}

        @contextlib.contextmanager
        def use_memory_pool(self, tag):
            address = 10 + len(self.allocator_and_pools)
            self.allocator_and_pools[tag] = (Pool(address), None)
            yield
            self.pointer_to_data[address] = cumem.AllocationData((0, 8, address, 0), tag)

        def _python_free_callback(self, address):
            return self.pointer_to_data.pop(address).handle

    allocator = Allocator()
    monkeypatch.setattr(cumem.CuMemAllocator, "get_instance", staticmethod(lambda: allocator))
    monkeypatch.setattr(cumem, "unmap_and_release", unmapped.append, raising=False)
    assert in_kv_pool(lambda: "space") == "space"
    assert {a: data.tag for a, data in allocator.pointer_to_data.items()} == {1: "weights", 11: "kv_cache"}

    def grown():
        used[11] = 0
        return "more space"

    assert in_kv_pool(grown) == "more space"
    assert {a: data.tag for a, data in allocator.pointer_to_data.items()} == {1: "weights", 12: "kv_cache"}
    assert unmapped == [(0, 8, 11, 0)], "the smaller one's memory is given back"
    assert len(allocator.allocator_and_pools) == 3, "pools stay referenced"
