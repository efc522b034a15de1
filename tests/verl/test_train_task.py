"""The reward of the CPU recipe: right words, and the line breaks that might have been made."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

from train_cpu_task import compute_score, rows

ANSWER = " 3 4 5 6 7 8 9 10"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (" 3 4 5 6 7 8 9 10", 0.5),
        (" 3 4 5\n 6 7 8 9 10<|im_end|>", 1.0),
        (" 3 4 5\n 6 7", 5 / 8),
        (" 3 4 6", 2 / 8 * 0.5),
        (" 3 4 5\n 6 7 8 9 10 11 12", 8 / 10),
        ("", 0.0),
    ],
)
def test_score(text, score):
    assert compute_score("count", text, ANSWER) == pytest.approx(score)


def test_an_answer_without_a_place_to_break_can_be_right():
    assert compute_score("count", " fox 1 fox 2", " fox 1 fox 2") == 1.0


def test_rows_have_identities():
    made = rows()
    assert len({row["extra_info"]["item_id"] for row in made}) == len(made) == 32
