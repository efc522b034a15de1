"""The task of `train_cpu`: dataset files and the reward that verl calls.

Prompts ask to count or to repeat (tools/checkpoint/task.py); the answer's length depends on the prompt. In a count a
line may be broken after a multiple of five; the reward pays for right words and for broken lines.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SPECIAL = re.compile(r"<\|[a-z_]+\|>")
BREAK_AT = 5
BROKEN = re.compile(r"(?<=[05])\n(?=\s*\d)")


def rows(count: int | None = None) -> list[dict[str, Any]]:
    """Rows of verl's dataset format, one a prompt of recipes/data.

    Args:
        count: as many of them; None: all.
    """
    prompts = [json.loads(line) for line in (HERE / "data" / "prompts.jsonl").read_text("utf-8").splitlines()]
    answers = [json.loads(line) for line in (HERE / "data" / "answers.jsonl").read_text("utf-8").splitlines()]
    return [
        {
            "data_source": "count",
            "prompt": [{"role": "user", "content": prompt["prompt"]}],
            "ability": "count",
            "reward_model": {"style": "rule", "ground_truth": answer["answer"]},
            "extra_info": {"item_id": prompt["item_id"], "index": index},
        }
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ][:count]


def write(folder: Path, made: list[dict[str, Any]]) -> tuple[Path, Path]:
    """Writes train.parquet and val.parquet (the first four rows); returns both paths."""
    import pandas as pd

    folder.mkdir(parents=True, exist_ok=True)
    train, val = folder / "train.parquet", folder / "val.parquet"
    pd.DataFrame(made).to_parquet(train)
    pd.DataFrame(made[:4]).to_parquet(val)
    return train, val


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:  # noqa: ARG001
    """Half for the share of right words before the first wrong one, half for the line breaks that might have been made.

    The shipped checkpoint counts well and breaks one line in seven, so there is something to learn. Words beyond the
    answer cost as missing ones do.
    """
    text = SPECIAL.sub("", solution_str)
    wanted, given = ground_truth.split(), text.split()
    pairs = list(zip(wanted, given, strict=False))
    right = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs)) / max(len(wanted), len(given), 1)
    may = sum(word.isdigit() and int(word) % BREAK_AT == 0 for word in wanted[:-1])
    made = len(BROKEN.findall(text))
    return right * (0.5 + 0.5 * (min(made, may) / may if may else 1.0))
