"""What a finished step tells: lengths of what was generated and kept, by dataset item and sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexfloor.history import Observation
from verl_integration.epochs import Placement


@dataclass(frozen=True)
class Kept:
    """One response that verl kept.

    Attributes:
        placement: its prompt's place in the plan.
        sample: index of the response among all of the item in the epoch.
        prompt_tokens: length of its prompt.
        tokens: tokens that the policy generated (ones of the response mask, over all turns).
        limit: global limit, tokens.
    """

    placement: Placement
    sample: int
    prompt_tokens: int
    tokens: int
    limit: int

    @property
    def censored(self) -> bool:
        """Stopped by a step cap below the global limit."""
        cap = self.placement.cap
        return cap is not None and self.tokens >= cap

    @property
    def at_limit(self) -> bool:
        """Stopped by the global limit."""
        return self.tokens >= self.limit and not self.censored


def gather(
    keys: Sequence[str],
    prompt_tokens: Sequence[int],
    mask_tokens: Sequence[int],
    prompts: Mapping[str, Placement],
    limit: int,
) -> list[Kept]:
    """The responses of a batch.

    Args:
        keys: verl's keys ``{uid}_{session}_{index}``; several outputs of a session are one response.
        prompt_tokens: prompt length of each key.
        mask_tokens: generated tokens of each key.
        prompts: placement by uid.
        limit: global limit, tokens.
    """
    found: dict[tuple[str, int], Kept] = {}
    for key, prompt, tokens in zip(keys, prompt_tokens, mask_tokens, strict=True):
        uid, session, _ = key.rsplit("_", 2)
        placement = prompts[uid]
        before = found.get((uid, int(session)))
        found[uid, int(session)] = Kept(
            placement=placement,
            sample=placement.samples[int(session)],
            prompt_tokens=int(prompt) if before is None else before.prompt_tokens,
            tokens=int(tokens) + (0 if before is None else before.tokens),
            limit=limit,
        )
    return list(found.values())


def observations(epoch: int, kept: Sequence[Kept]) -> list[Observation]:
    """One observation an item, samples in order; an empty response tells nothing."""
    by_item: dict[str, list[Kept]] = {}
    for one in kept:
        if one.tokens > 0:
            by_item.setdefault(one.placement.item_id, []).append(one)
    found = []
    for item_id, own in by_item.items():
        own.sort(key=lambda one: one.sample)
        found.append(
            Observation(
                item_id,
                epoch,
                own[0].prompt_tokens,
                tuple(one.tokens for one in own),
                tuple(index for index, one in enumerate(own) if one.censored),
            )
        )
    return found
