"""Weights and KV of one rank: release them off the core loop, and take them back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from flexfloor.engine.devices.base import Device
from flexfloor.errors import ProtocolError


def flat(tensors: Any) -> Iterator[torch.Tensor]:
    """The tensors of nested sequences: a layer's KV is one tensor, or a pair of keys and values."""
    for part in tensors:
        if isinstance(part, torch.Tensor):
            yield part
        else:
            yield from flat(part)


def storages_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor a distinct, non-empty storage."""
    seen: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.numel():
            seen.setdefault(storage._cdata, tensor)
    return list(seen.values())


WAKE_DEADLINE_S = 60.0


class Memory:
    """What a parked rank gives back.

    Args:
        device: the device module.
        model: the loaded model.
        runner: vLLM's model runner (owner of the KV tensors).
        poison: fill with NaN before release and after reclaim (tests).

    Attributes:
        released: weights and KV have no memory, or their memory is coming back.
        reclaim_s: how long the memory took to come back the last time, seconds; 0 before the first.
    """

    def __init__(self, device: Device, model: torch.nn.Module, runner: Any, *, poison: bool) -> None:
        self._device, self._poison = device, poison
        self._model, self._runner = model, runner
        self._thread: threading.Thread | None = None
        self._report: dict[str, Any] | None = None
        self._waking: threading.Thread | None = None
        self._not_woken: Exception | None = None
        self.released = False
        self.reclaim_s = 0.0

    def weights(self) -> list[torch.Tensor]:
        """Parameters that hold memory, in an order equal on all ranks."""
        return storages_of([p.data for _, p in sorted(self._model.named_parameters())])

    def kv(self) -> list[torch.Tensor]:
        """The KV cache tensors."""
        return storages_of(list(flat(self._runner.kv_caches)))

    def start_release(self) -> None:
        """Begin to release weights and KV in a thread of its own; idempotent."""
        if self.released or self._thread is not None:
            return
        self._report = None
        self._thread = threading.Thread(target=self._release, name="flexfloor-release", daemon=True)
        self._thread.start()

    def _release(self) -> None:
        try:
            started = time.time()
            before = self._device.memory_used()
            tensors = [*self.weights(), *self.kv()]
            if self._poison:
                self._poison_all(tensors)
            freed = self._device.release(tensors)
            after = self._device.memory_used()
            self._report = {
                "released_bytes": freed,
                "process_bytes_before": before,
                "process_bytes_after": after,
                "start": started,
                "end": time.time(),
            }
        except Exception as error:  # noqa: BLE001 - reported at the next sync point
            self._report = {"error": f"{type(error).__name__}: {error}"}

    def report(self) -> dict[str, Any] | None:
        """The release's result once it is done, else None."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread.join()
        self._thread = None
        self.released = self._report is not None and "error" not in self._report
        return self._report

    def start_reclaim(self) -> None:
        """Begin to :meth:`reclaim` in a thread of its own; idempotent.

        Raises:
            ProtocolError: memory is still being released.
        """
        if self._thread is not None:
            raise ProtocolError("memory is still being released")
        if self.released and self._waking is None:
            self._waking = threading.Thread(target=self._wake, name="flexfloor-wake", daemon=True)
            self._waking.start()

    def _wake(self) -> None:
        try:
            self._reclaim()
        except Exception as error:  # noqa: BLE001 - raised by whoever needs the memory
            self._not_woken = error

    def reclaim(self) -> None:
        """Memory for weights (undefined, or NaN in tests) and KV (zero); waits for what was started; idempotent.

        Raises:
            ProtocolError: memory is still being released, or has not come back in time.
        """
        if self._thread is not None:
            raise ProtocolError("memory is still being released")
        if self._waking is not None:
            self._waking.join(WAKE_DEADLINE_S)
            if self._waking.is_alive():
                raise ProtocolError(f"memory has not come back within {WAKE_DEADLINE_S} s")
            self._waking = None
            failed, self._not_woken = self._not_woken, None
            if failed is not None:
                raise failed
        elif self.released:
            self._reclaim()
        self.released = False

    def _reclaim(self) -> None:
        began = time.perf_counter()
        weights, kv = self.weights(), self.kv()
        self._device.reclaim([*weights, *kv])
        with torch.inference_mode():
            if self._poison:
                self._poison_all(weights)
            self._device.clear(kv)
        self.reclaim_s = time.perf_counter() - began

    def _poison_all(self, tensors: Sequence[torch.Tensor]) -> None:
        with torch.inference_mode():
            for part in (part for tensor in tensors for part in self._device.backed(tensor)):
                fill_nan(part)


def fill_nan(tensor: torch.Tensor) -> None:
    """NaN into a floating tensor."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
