"""The prompt set of the quickstart: heavy-tailed answer lengths, known beforehand.

Lengths are stratified draws of a Pareto law (one draw in each of ``count`` equal slices of its probability), so that
every set of a few dozen prompts has the tail; what falls above the longest answer is spread near it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Final

from checkpoint.task import LONGEST, Question, draw

TAIL_INDEX: Final = 0.7
SHORTEST_PROMPTED: Final = 8
NEAR_LONGEST: Final = 170
MOST_PROMPTS: Final = 512


def _lengths(rng: random.Random, count: int) -> list[int]:
    lengths: list[int] = []
    for index in range(count):
        quantile = (index + rng.random()) / count
        length = SHORTEST_PROMPTED * (1.0 - quantile) ** (-1.0 / TAIL_INDEX)
        lengths.append(round(length) if length <= LONGEST else rng.randint(NEAR_LONGEST, LONGEST))
    rng.shuffle(lengths)
    return lengths


def draw_prompts(count: int, seed: int) -> list[Question]:
    """``count`` different held-out prompts in random order. The same seed gives the same prompts.

    Raises:
        ValueError: more prompts than the held-out ones can give with these lengths.
    """
    if not 0 < count <= MOST_PROMPTS:
        raise ValueError(f"count must be 1 to {MOST_PROMPTS}, not {count}")
    rng = random.Random(f"prompts {seed}")
    asked: dict[str, Question] = {}
    for length in _lengths(rng, count):
        while (drawn := draw(rng, length, held_out=True)).prompt in asked:
            length = min(LONGEST, length + 1)
        asked[drawn.prompt] = drawn
    return list(asked.values())


def write_prompts(file: Path, asked: list[Question]) -> Path:
    """Write the prompts to ``file`` and the right answers with their tokens to answers.jsonl beside it.

    Returns:
        The file of the answers.
    """
    answers = file.with_name("answers.jsonl")
    width = max(3, len(str(len(asked) - 1)))
    names = [f"p{index:0{width}d}" for index in range(len(asked))]
    _write_lines(
        file, [{"item_id": name, "prompt": question.prompt} for name, question in zip(names, asked, strict=True)]
    )
    _write_lines(
        answers,
        [
            {"item_id": name, "answer": question.answer, "answer_tokens": question.answer_tokens}
            for name, question in zip(names, asked, strict=True)
        ],
    )
    return answers


def _write_lines(file: Path, rows: list[dict[str, object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
