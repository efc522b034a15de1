"""How long the survivors' clients waited for a token because of a transition."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from flexfloor.driver.orders import Response


def token_gap_ms(responses: Sequence[Response], survivors: Collection[int], since: float, until: float) -> float:
    """Longest time between two tokens of a survivor's request around a transition, milliseconds.

    Args:
        responses: timed responses of the rollout.
        survivors: ranks that went on.
        since: when the transition began (event log's clock).
        until: when it was committed.
    """
    own = [response.times for response in responses if response.request.rank in survivors]
    gaps = [b - a for times in own for a, b in pairwise(times) if a < until and b > since]
    return round(1e3 * max(gaps, default=0.0), 2)
