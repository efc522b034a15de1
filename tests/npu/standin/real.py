"""vllm-ascend's own modules over the stand-in: what imports without a device runs as released.

A module of vllm_ascend is, in this order: a file of the stand-in, a released file named in `RELEASED`, or an empty
shell. Single functions are taken out of released files that need a device to be imported.
"""

import ast
import importlib.abc
import importlib.util
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

RELEASED = (
    "vllm_ascend.ascend_forward_context",
    "vllm_ascend.device_allocator.camem",
    "vllm_ascend.device_allocator.sleep_mem_optimized",
    "vllm_ascend.distributed.device_communicators.npu_communicator",
    "vllm_ascend.ops.fused_moe.dataclass",
    "vllm_ascend.ops.fused_moe.moe_comm_method",
    "vllm_ascend.ops.fused_moe.prepare_finalize",
    "vllm_ascend.ops.fused_moe.token_dispatcher",
    "vllm_ascend.patch.worker._hccl_pg_registry",
    "vllm_ascend.patch.worker.patch_distributed",
)
root = [Path()]


class _Shell(types.ModuleType):
    """A module that nothing here goes into."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last: the stand-in's own files are found before."""

    def find_spec(self, name, path=None, target=None):
        if not name.startswith("vllm_ascend."):
            return None
        file = root[0].parent / (name.replace(".", "/") + ".py")
        if any(name == known or name.startswith(known + ".") for known in RELEASED) and file.is_file():
            return importlib.util.spec_from_file_location(name, file)
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec):
        return _Shell(spec.name)

    def exec_module(self, module):
        pass


def install(package):
    """Use the released modules under ``package`` (the folder vllm_ascend)."""
    root[0] = Path(package)
    sys.meta_path.append(Finder())


def take(file, space, *names, owner=None):
    """Define released functions, classes and constants of a file in ``space``, which holds what they refer to."""
    tree = ast.parse((root[0] / file).read_text(encoding="utf-8"))
    body = tree.body
    if owner is not None:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
    kept = [node for node in body if _name(node) in names]
    assert {_name(node) for node in kept} == set(names), f"{file} lacks {set(names) - {_name(n) for n in kept}}"
    exec(compile(ast.Module(kept, []), str(file), "exec"), space)


def _name(node):
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return getattr(node, "name", None)
