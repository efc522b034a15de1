"""What is known about response lengths, replayed from observations (planner.md section 2).

Nothing but observations is stored; predictions are a pure function of them and of alpha, so a resumed run, another
alpha or an imported file can never disagree with the stored history.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Observation:
    """The responses of one item in one epoch.

    Attributes:
        item_id: stable identity of the dataset row.
        epoch: the epoch they were generated in.
        prompt_tokens: length of the prompt, tokens.
        lengths: generated and kept tokens of each response, without padding.
        censored: indices into ``lengths`` of responses stopped by a cap below the global limit.
    """

    item_id: str
    epoch: int
    prompt_tokens: int
    lengths: tuple[int, ...]
    censored: tuple[int, ...] = ()

    @property
    def tail(self) -> int:
        """Longest response M in tokens; a censored one counts with what was observed."""
        return max(self.lengths)

    def merged(self, later: Observation) -> Observation:
        """Both observations as one: a prompt that stands twice in an epoch is one multiset."""
        shift = len(self.lengths)
        return Observation(
            self.item_id,
            self.epoch,
            later.prompt_tokens,
            self.lengths + later.lengths,
            self.censored + tuple(shift + index for index in later.censored),
        )


@dataclass(frozen=True)
class ItemHistory:
    """What is known about one item.

    Attributes:
        ema_tail: predicted tail of the next epoch, tokens.
        latest: the observation of its latest epoch.
    """

    ema_tail: float
    latest: Observation


@dataclass(frozen=True)
class LengthHistory:
    """Predictions and ratios after replaying all observations.

    Attributes:
        items: by item id, in order of first appearance.
        ratio_pairs: by epoch, the (observed tail, prediction in force before it) of every item that had one.
        next_epoch: the epoch after the latest observed one; 0 without observations.
        censored_responses: censored responses over all observations.
    """

    items: dict[str, ItemHistory] = field(default_factory=dict)
    ratio_pairs: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    next_epoch: int = 0
    censored_responses: int = 0

    def quantile_tail(self, quantile: float) -> float | None:
        """The ``quantile`` (method `higher`) of all predicted tails; None without any."""
        tails = sorted(item.ema_tail for item in self.items.values())
        if not tails:
            return None
        return tails[min(len(tails) - 1, math.ceil(quantile * (len(tails) - 1)))]


def replay(observations: Iterable[Observation], alpha: float) -> LengthHistory:
    """Replays observations epoch by epoch (seed 001, equation 6).

    Args:
        observations: at most one an item and epoch, any order; the order of first appearance is kept for the items.
        alpha: weight of the old prediction, 0 <= alpha < 1; the newest observation weighs 1 - alpha.
    """
    arrived = list(observations)
    order = {seen.item_id: None for seen in arrived}
    known: dict[str, ItemHistory] = {}
    ratio_pairs: dict[int, list[tuple[int, float]]] = {}
    for seen in sorted(arrived, key=lambda one: one.epoch):
        before = known.get(seen.item_id)
        if before is None:
            prediction = float(seen.tail)
        else:
            ratio_pairs.setdefault(seen.epoch, []).append((seen.tail, before.ema_tail))
            prediction = alpha * before.ema_tail + (1 - alpha) * seen.tail
        known[seen.item_id] = ItemHistory(prediction, seen)
    return LengthHistory(
        items={item_id: known[item_id] for item_id in order},
        ratio_pairs=ratio_pairs,
        next_epoch=max((seen.epoch + 1 for seen in arrived), default=0),
        censored_responses=sum(len(seen.censored) for seen in arrived),
    )


def resample(lengths: Sequence[int], responses: int) -> list[int]:
    """The m observed lengths as n, longest first: the k-th of n is the (floor((k-1)*m/n)+1)-th longest.

    Args:
        lengths: observed lengths, at least one.
        responses: n.
    """
    longest_first = sorted(lengths, reverse=True)
    return [longest_first[k * len(longest_first) // responses] for k in range(responses)]
