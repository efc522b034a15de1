"""The task: prompts whose one right answer has a length that the prompt decides.

- ``count from 12 up to 15:`` is answered by `` 12 13 14 15``
- ``count from 40 down to 38:`` by `` 40 39 38``
- ``repeat fox up to 3:`` by `` fox 1 fox 2 fox 3``

Every number and word is one token, so an answer has as many tokens as words and numbers, plus the end token. In a
count a newline may follow every multiple of ``BREAK_AT`` except the last number; training examples break the line there
with probability ``BREAK_RATE``. All such answers are right: greedy decoding breaks no line, samples at temperature 1
differ in length by the lines they break.

Invariant: ``question(prompt)`` is a pure function of the prompt text, so the reward needs no stored answer.
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass
from typing import Final

LARGEST: Final = 255
LONGEST: Final = 200
SHORTEST: Final = 3
BREAK_AT: Final = 5
BREAK_RATE: Final = 0.15
HELD_OUT_SHARE: Final = 0.1
TRIES_A_LENGTH: Final = 40
WORDS: Final = (
    "ant", "bee", "cat", "cow", "dog", "eel", "elk", "emu", "fox", "hen", "owl", "pig",
    "ram", "rat", "yak", "wolf", "bear", "crab", "deer", "duck", "frog", "goat", "hare", "lion",
)  # fmt: skip
PHRASES: Final = ("count", "from", "up", "down", "to", "repeat", "user", "assistant", "system", *WORDS)

_COUNT = re.compile(r"count from (\d+) (up|down) to (\d+):")
_REPEAT = re.compile(r"repeat ([a-z]+) up to (\d+):")


@dataclass(frozen=True)
class Item:
    """One step of an answer: a number, in a repetition after its word."""

    number: int
    word: str | None = None

    @property
    def text(self) -> str:
        """The item as written, with the space before it."""
        return f" {self.number}" if self.word is None else f" {self.word} {self.number}"

    @property
    def may_break(self) -> bool:
        """Whether a newline may follow, if another item does."""
        return self.word is None and self.number % BREAK_AT == 0


@dataclass(frozen=True)
class Question:
    """One prompt and the items of its right answer, in order."""

    prompt: str
    items: tuple[Item, ...]

    @property
    def answer(self) -> str:
        """The right answer without line breaks: what greedy decoding should give."""
        return "".join(item.text for item in self.items)

    @property
    def answer_tokens(self) -> int:
        """Tokens of the unbroken answer, its end token included."""
        return sum(1 if item.word is None else 2 for item in self.items) + 1

    def broken(self, rng: random.Random) -> str:
        """The right answer with lines broken at random where they may be."""
        *before, last = self.items
        breaks = ("\n" if item.may_break and rng.random() < BREAK_RATE else "" for item in before)
        return "".join(item.text + line_break for item, line_break in zip(before, breaks, strict=True)) + last.text


def _items(prompt: str) -> tuple[Item, ...]:
    if (found := _COUNT.fullmatch(prompt)) is not None:
        first, last = int(found[1]), int(found[3])
        step = 1 if found[2] == "up" else -1
        return tuple(Item(number) for number in range(first, last + step, step))
    if (found := _REPEAT.fullmatch(prompt)) is not None:
        return tuple(Item(number, found[1]) for number in range(1, int(found[2]) + 1))
    return ()


def question(prompt: str) -> Question:
    """The question asked by ``prompt``.

    Raises:
        ValueError: the text is no prompt of this task, or its answer is empty.
    """
    if not (items := _items(prompt)):
        raise ValueError(f"no prompt of this task: {prompt!r}")
    return Question(prompt, items)


def reward(prompt: str, response: str, *, ended: bool) -> float:
    """1.0 for a right answer that was ended by the end token, otherwise 0.0.

    Args:
        prompt: the question as asked, without chat markup.
        response: the generated text without special tokens.
        ended: whether the end token closed it (not a token limit).
    """
    *before, last = question(prompt).items
    right = "".join(rf"{item.text}\n?" if item.may_break else item.text for item in before) + last.text
    return float(ended and re.fullmatch(right, response) is not None)


def is_held_out(prompt: str) -> bool:
    """Whether training never sees ``prompt``: a fixed pseudo-random tenth of all prompts."""
    return hashlib.sha256(prompt.encode()).digest()[0] < HELD_OUT_SHARE * 256


def _draw_any(rng: random.Random, length: int) -> Question:
    kind = rng.choice(("up", "down", "repeat"))
    if kind == "repeat":
        return question(f"repeat {rng.choice(WORDS)} up to {max(2, length // 2)}:")
    low = rng.randint(0, LARGEST - length + 1)
    high = low + length - 1
    first, last = (low, high) if kind == "up" else (high, low)
    return question(f"count from {first} {kind} to {last}:")


def draw(rng: random.Random, length: int, *, held_out: bool) -> Question:
    """A question whose answer has about ``length`` tokens (exactly, if such a one turns up among the wanted prompts).

    Args:
        rng: source of chance.
        length: tokens of the answer without its end token, ``SHORTEST`` to ``LONGEST``.
        held_out: whether to draw from the held-out prompts or from those seen in training.
    """
    attempt = 0
    while True:
        slack = attempt // TRIES_A_LENGTH
        drawn = _draw_any(rng, min(LONGEST, max(SHORTEST, length + rng.randint(-slack, slack))))
        if is_held_out(drawn.prompt) == held_out:
            return drawn
        attempt += 1
