"""Seeded requests in chunked prefill on CPU.

While a prompt is prefilled in chunks (and when a preempted request is recomputed in chunks),
vLLM samples a token, throws it away and winds the request's generator back by an offset.
Torch's CPU generator has no offset, so stock vLLM 0.30 fails with "CPU Generator does not use
offset". Here such a request's generator remembers its state before the discarded sample.
"""

from __future__ import annotations

from typing import Any

import torch

from flexfloor.engine.upstream import replace


class RewindingGenerator(torch.Generator):  # type: ignore[misc]
    """A CPU generator whose last sample can be taken back."""

    _DISCARDED = 4

    @classmethod
    def of(cls, generator: torch.Generator) -> RewindingGenerator:
        """A generator in the same state, ready to discard its next sample."""
        rewinding = generator if isinstance(generator, cls) else cls()
        rewinding.set_state(generator.get_state())
        rewinding._before = generator.get_state()
        return rewinding

    def get_offset(self) -> int:
        """What vLLM subtracts the discarded sample from."""
        return self._DISCARDED

    def set_offset(self, offset: int) -> None:
        """Back to before the discarded sample."""
        if offset != 0:
            raise ValueError(f"vLLM winds back by {self._DISCARDED - offset}, not by {self._DISCARDED}")
        self.set_state(self._before)


def apply() -> None:
    """Patch ``CPUModelRunner._sample``."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    sample = CPUModelRunner._sample

    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        batch = self.input_batch
        for index in self.discard_request_mask.np[: batch.num_reqs].nonzero()[0]:
            generator = batch.generators.get(int(index))
            if generator is not None:
                rewinding = RewindingGenerator.of(generator)
                batch.generators[int(index)] = rewinding
                self.requests[batch.req_ids[int(index)]].generator = rewinding
        return sample(self, logits, spec_decode_metadata)

    replace(CPUModelRunner, "_sample", _sample)
