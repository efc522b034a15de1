"""Which trajectories a rank was promised, has received and still holds open."""

from __future__ import annotations

from flexfloor.errors import ProtocolError


class Trajectories:
    """Counts for one step on one rank.

    A trajectory is one response with all its turns. A request without a trajectory id is a
    trajectory of its own. A rank that has not yet received what it expects is not complete,
    however idle it is.
    """

    def __init__(self) -> None:
        self._promised = 0
        self.closed = False
        self._received: set[str] = set()
        self._open: set[str] = set()

    @property
    def received(self) -> int:
        """Trajectories that sent at least one request."""
        return len(self._received)

    @property
    def expected(self) -> int:
        """Trajectories to wait for: the promised ones, or more when more arrived."""
        return max(self._promised, self.received)

    @property
    def open(self) -> int:
        """Received trajectories that may send another turn."""
        return len(self._open)

    def begin(self, expected: int, *, closed: bool) -> None:
        """Start a step: ``expected`` trajectories; ``closed`` when no revision will follow."""
        if expected < 0:
            raise ProtocolError(f"a rank cannot expect {expected} trajectories")
        self._promised, self.closed = expected, closed
        self._received.clear()
        self._open.clear()

    def arrive(self, trajectory: str, *, more: bool = False) -> None:
        """A request of ``trajectory`` arrived; ``more`` when further turns may follow.

        A trajectory beyond the expected ones raises the expectation: it is served, never lost.
        """
        self._received.add(trajectory)
        if more:
            self._open.add(trajectory)
        else:
            self._open.discard(trajectory)

    def close_trajectory(self, trajectory: str) -> None:
        """No further turn of ``trajectory`` will come."""
        if trajectory not in self._received:
            raise ProtocolError(f"trajectory {trajectory} was never received on this rank")
        self._open.discard(trajectory)

    def revise(self, delta: int) -> None:
        """Correct the promised count (rejected, aborted or extra trajectories); extra ones may have arrived already."""
        if self._promised + delta < 0:
            raise ProtocolError(f"cannot revise by {delta}: {self._promised} were promised")
        self._promised += delta

    def close(self) -> None:
        """The driver sends nothing more in this step."""
        self.closed = True
