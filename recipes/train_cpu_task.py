"""The task of `train_cpu`: dataset files and the reward that verl calls.

Prompts ask to count or to repeat (tools/checkpoint/task.py); the answer's length depends on the prompt. The reward is
the share of the right answer that a response gives before it goes wrong, and the rest for ending where it should.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SPECIAL = re.compile(r"<\|[a-z_]+\|>")


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
    """Share of right words before the first wrong one, 0 to 1; words beyond the answer cost as missing ones do."""
    wanted, given = ground_truth.split(), SPECIAL.sub(" ", solution_str).split()
    right = next(
        (i for i, (a, b) in enumerate(zip(wanted, given, strict=False)) if a != b), min(len(wanted), len(given))
    )
    return right / max(len(wanted), len(given), 1)
