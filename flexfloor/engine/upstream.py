"""The check of what FlexFloor patches or relies on in vLLM and torch (:mod:`flexfloor.engine.upstream_symbols`).

``check()`` runs when the plugin is loaded; it imports each symbol and compares its
parameters, so that another version is refused at start with the symbol's name instead of
failing in a rollout.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from flexfloor.engine.upstream_symbols import (
    COMBINE,
    COMMON,
    CPU,
    CUDA,
    DRIVER,
    TORCH_TESTED,
    VLLM_TESTED,
    Symbol,
)
from flexfloor.errors import UpstreamChangedError

__all__ = ["COMBINE", "COMMON", "CPU", "CUDA", "DRIVER", "VLLM_TESTED", "Symbol", "check", "check_version", "replace"]


def check(symbols: tuple[Symbol, ...], versions: str = ", ".join(VLLM_TESTED)) -> None:
    """Raise UpstreamChangedError for the first symbol that is missing or has other parameters.

    Args:
        symbols: what is relied on.
        versions: tested versions of their package (torch apart), for the message.
    """
    for symbol in symbols:
        package = symbol.module.split(".")[0]
        tested = TORCH_TESTED if package == "torch" else versions
        where = f"{symbol.module}.{symbol.name}"
        try:
            found: Any = importlib.import_module(symbol.module)
            for part in symbol.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise UpstreamChangedError(package, where, f"is gone (it was {symbol.why})", tested) from error
        if not callable(found):
            continue
        parameters = tuple(inspect.signature(inspect.unwrap(found)).parameters)
        missing = [name for name in symbol.parameters if name not in parameters]
        if missing:
            raise UpstreamChangedError(package, where, f"lost the parameters {missing} (it is {symbol.why})", tested)


def replace(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Put ``ours`` in the place of ``owner.name``; the original's signature stays readable for :func:`check`."""
    setattr(owner, name, functools.wraps(getattr(owner, name))(ours))


def check_version() -> None:
    """Refuse a vLLM whose engine core was not tested."""
    import vllm

    base = vllm.__version__.split("+")[0]
    if base not in VLLM_TESTED:
        raise UpstreamChangedError("vllm", f"version {vllm.__version__}", "was not tested", ", ".join(VLLM_TESTED))
