"""Every error FlexFloor raises on purpose, drawn once.

FlexFloorError
├── InputError          bad file, flag or configuration: the CLI prints one line and exits with 2
├── RefusedError        a run that cannot work is refused before anything starts; names the remedy (exit 2)
├── UpstreamChangedError a symbol of vLLM, vllm-ascend or verl that we rely on is gone or has changed
├── PlanningError       the solver failed where the fallback does not apply
├── ProtocolError       an illegal move in the elastic protocol (a bug, never a user's fault)
├── PeerLostError       a joint operation failed because another rank did not take part in it
├── TransitionError     a transition failed after its point of no return; names rank and phase
└── EngineLostError     an engine process died or hung; names rank and phase
"""

from __future__ import annotations

from pathlib import Path


class FlexFloorError(Exception):
    """Base of every error raised on purpose."""


class InputError(FlexFloorError):
    """Bad input. The message is one line: what, where, what to do.

    Args:
        what: what is wrong and what to do about it.
        file: the file at fault, if any.
        line: 1-based line number in ``file``.
        field: name of the offending field.
    """

    def __init__(
        self, what: str, *, file: str | Path | None = None, line: int | None = None, field: str | None = None
    ) -> None:
        self.what, self.file, self.line, self.field = what, file, line, field
        where = str(file) if file is not None else ""
        if line is not None:
            where += f":{line}"
        prefix = f"{where}: " if where else ""
        middle = f"{field}: " if field else ""
        super().__init__(" ".join(f"{prefix}{middle}{what}".split()))


class RefusedError(FlexFloorError):
    """A run that cannot work. ``remedy`` says what to change; the message is one line."""

    def __init__(self, what: str, *, remedy: str) -> None:
        self.what, self.remedy = what, remedy
        super().__init__(f"{what}; {remedy}")


class UpstreamChangedError(FlexFloorError):
    """A private symbol of an upstream package is missing or differs from the tested one."""

    def __init__(self, package: str, symbol: str, why: str, tested: str) -> None:
        self.package, self.symbol = package, symbol
        super().__init__(f"{package}: {symbol} {why}; FlexFloor was tested with {package} {tested}")


class PlanningError(FlexFloorError):
    """The solver failed where the no-shrink fallback does not apply."""


class ProtocolError(FlexFloorError):
    """An illegal move in the elastic protocol."""


class PeerLostError(FlexFloorError):
    """A joint operation failed because another rank did not take part; the fault is not this rank's own."""


class TransitionError(FlexFloorError):
    """A transition failed where it can no longer be rolled back."""

    def __init__(self, rank: int, phase: str, why: str) -> None:
        self.rank, self.phase, self.why = rank, phase, why
        super().__init__(f"rank {rank} failed in phase '{phase}': {why}")


class EngineLostError(FlexFloorError):
    """An engine process died or stopped making progress."""

    def __init__(self, rank: int, phase: str, why: str) -> None:
        self.rank, self.phase, self.why = rank, phase, why
        super().__init__(f"rank {rank} lost in phase '{phase}': {why}")
