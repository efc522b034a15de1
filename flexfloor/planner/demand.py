"""What a step asks of the ranks: predicted completions and KV demand of its prompts (planner.md sections 3 to 5).

Predicted tails are whole millionths of a token, so that costs, areas and ties are compared exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from flexfloor.history import resample
from flexfloor.plan import Tokens

MICRO = 1_000_000
"""Units of a predicted token."""

IntArray = NDArray[np.int64]


def to_micro(tokens: float) -> int:
    """Tokens as whole millionths."""
    return round(tokens * MICRO)


def to_tokens(micro: int) -> Tokens:
    """Millionths as tokens: an integer where it is whole."""
    whole, rest = divmod(int(micro), MICRO)
    return whole if rest == 0 else int(micro) / MICRO


@dataclass(frozen=True)
class Prompt:
    """One prompt of an epoch; a repeated item is two prompts.

    Attributes:
        item_id: identity of the dataset row.
        tail: predicted tail, micro-tokens.
        lengths: expected response lengths in tokens, n of them.
        prompt_tokens: length of the prompt.
        predicted: False where nothing is known of the item, so that ``tail`` is the global limit.
        assumed: True where ``tail`` is a quantile of the other items' tails.
    """

    item_id: str
    tail: int
    lengths: tuple[int, ...]
    prompt_tokens: int
    predicted: bool = True
    assumed: bool = False

    @property
    def sort_key(self) -> tuple[bool, int, str]:
        """Layout order: ascending prediction, ties by item id, items without prediction last."""
        return (not self.predicted, self.tail, self.item_id)


@dataclass(frozen=True)
class KvRules:
    """How lengths become KV tokens.

    Attributes:
        mu: safety factor on lengths, exact.
        block_tokens: tokens of a block.
        prompt_sharing: whether the responses of a prompt share its full blocks.
        responses: responses n of a prompt.
    """

    mu: Fraction
    block_tokens: int
    prompt_sharing: bool
    responses: int

    def expected_lengths(self, prompts: Sequence[Prompt]) -> IntArray:
        """Expected response lengths in tokens, shape (prompts, n), each row descending."""
        if prompts and all(len(p.lengths) == self.responses for p in prompts):
            rows = -np.array([p.lengths for p in prompts], dtype=np.int64)
            rows.sort(axis=1)
            return -rows
        lengths = np.array([resample(p.lengths, self.responses) for p in prompts], dtype=np.int64)
        return lengths.reshape(len(prompts), self.responses)

    def response_rows(self, lengths: IntArray, limit: int) -> IntArray:
        """KV tokens of responses of the given lengths, same shape.

        Lengths are multiplied by mu, rounded up, clipped to ``limit`` tokens and rounded to blocks; a response may
        share its first block with the end of its prompt, hence the extra B - 1 tokens.
        """
        inflated = -(-lengths * self.mu.numerator // self.mu.denominator)
        blocks = -(-(np.minimum(inflated, limit) + self.block_tokens - 1) // self.block_tokens)
        rows: IntArray = blocks * self.block_tokens
        return rows

    def prompt_rows(self, prompts: Sequence[Prompt]) -> IntArray:
        """KV tokens of every prompt's full blocks, shape (prompts,)."""
        full = np.array([p.prompt_tokens // self.block_tokens * self.block_tokens for p in prompts], dtype=np.int64)
        return full if self.prompt_sharing else full * self.responses


@dataclass(frozen=True)
class Demand:
    """A step's prompts in ascending order of predicted completion.

    Attributes:
        items: item ids, length b.
        tails: predicted tails, micro-tokens, shape (b,).
        completions: tails clipped to the cap, micro-tokens, shape (b,), ascending.
        rows: KV tokens of the responses, shape (b, n), each row descending.
        prompts: KV tokens of the prompts, shape (b,).
        lexical: position of each item id among the sorted ids, shape (b,); equal ids share it.
        lengths: expected response lengths in tokens, shape (b, n), each row descending.
    """

    items: tuple[str, ...]
    tails: IntArray
    completions: IntArray
    rows: IntArray
    prompts: IntArray
    lexical: IntArray
    lengths: IntArray

    def __len__(self) -> int:
        return len(self.items)

    @property
    def tail(self) -> int:
        """Step tail T, micro-tokens; 0 without prompts."""
        return int(self.completions.max(initial=0))


def build_demand(prompts: Sequence[Prompt], limit: int, rules: KvRules, *, in_order: bool = False) -> Demand:
    """The demand of a step.

    Args:
        prompts: its prompts.
        limit: response limit, tokens.
        rules: KV accounting.
        in_order: keep the given order, for methods that neither sort nor match.
    """
    ordered = list(prompts) if in_order else sorted(prompts, key=lambda p: p.sort_key)
    tails = np.array([p.tail for p in ordered], dtype=np.int64)
    names = {name: index for index, name in enumerate(sorted({p.item_id for p in ordered}))}
    lengths = rules.expected_lengths(ordered)
    return Demand(
        items=tuple(p.item_id for p in ordered),
        tails=tails,
        completions=np.minimum(tails, limit * MICRO),
        rows=rules.response_rows(lengths, limit),
        prompts=rules.prompt_rows(ordered),
        lexical=np.array([names[p.item_id] for p in ordered], dtype=np.int64),
        lengths=np.minimum(lengths, limit),
    )
