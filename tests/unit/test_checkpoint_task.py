"""The checkpoint's task: answers, lengths, reward, split, and the shipped prompt set. No torch."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from checkpoint import prompts, task  # noqa: E402


@pytest.mark.parametrize(
    ("prompt", "answer", "tokens"),
    [
        ("count from 12 up to 15:", " 12 13 14 15", 5),
        ("count from 40 down to 38:", " 40 39 38", 4),
        ("count from 0 up to 0:", " 0", 2),
        ("repeat fox up to 3:", " fox 1 fox 2 fox 3", 7),
    ],
)
def test_the_answer_follows_from_the_prompt(prompt, answer, tokens):
    asked = task.question(prompt)
    assert asked.answer == answer
    assert asked.answer_tokens == tokens


@pytest.mark.parametrize(
    "prompt",
    ["", "count from 12 up to 15", "count from 15 up to 12:", "repeat fox up to 0:", "count from 1 down to 4:"],
)
def test_other_text_is_no_prompt(prompt):
    with pytest.raises(ValueError, match="no prompt of this task"):
        task.question(prompt)


@pytest.mark.parametrize(
    ("response", "ended", "expected"),
    [
        (" 9 10 11 12", True, 1.0),
        (" 9 10\n 11 12", True, 1.0),
        (" 9 10 11 12", False, 0.0),
        (" 9 10 11", True, 0.0),
        (" 9 10 11 12 13", True, 0.0),
        (" 9\n 10 11 12", True, 0.0),
        (" 9 10\n\n 11 12", True, 0.0),
        (" 9 10 12 11", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_reward_of_a_count(response, ended, expected):
    assert task.reward("count from 9 up to 12:", response, ended=ended) == expected


@pytest.mark.parametrize(
    "response", [" owl 1 owl 2\n", " owl 1\n owl 2", " owl 1 owl", " 1 owl 2 owl", " owl 1 owl 2 owl 3"]
)
def test_reward_of_a_repetition(response):
    assert task.reward("repeat owl up to 2:", " owl 1 owl 2", ended=True) == 1.0
    assert task.reward("repeat owl up to 2:", response, ended=True) == 0.0


def test_a_repetition_breaks_no_line():
    asked = task.question("repeat owl up to 60:")
    assert {asked.broken(random.Random(seed)) for seed in range(20)} == {asked.answer}


def test_drawn_questions_keep_split_and_length():
    rng = random.Random(3)
    for _ in range(500):
        length, held_out = rng.randint(task.SHORTEST, task.LONGEST), rng.random() < 0.5
        asked = task.draw(rng, length, held_out=held_out)
        assert task.is_held_out(asked.prompt) == held_out
        assert abs(asked.answer_tokens - 1 - length) <= 3
        assert task.reward(asked.prompt, asked.broken(rng), ended=True) == 1.0


def test_held_out_share_is_about_a_tenth():
    every = [f"count from {low} up to {high}:" for low in range(100) for high in range(low, 100)]
    share = sum(map(task.is_held_out, every)) / len(every)
    assert 0.08 < share < 0.12


def test_broken_answers_differ_in_length_alone():
    asked = task.question("count from 1 up to 60:")
    breaks = {asked.broken(random.Random(seed)).count("\n") for seed in range(50)}
    assert len(breaks) > 3
    assert asked.broken(random.Random(1)).replace("\n", "") == asked.answer


@pytest.mark.parametrize("seed", range(5))
def test_prompt_sets_have_a_tail(seed):
    lengths = sorted(asked.answer_tokens for asked in prompts.draw_prompts(32, seed))
    assert lengths[0] >= 4
    assert lengths[16] < 35
    assert sum(length > 60 for length in lengths) in range(4, 11)
    assert sum(length > 160 for length in lengths) in range(2, 7)
    assert lengths[-1] <= task.LONGEST + 2


def test_prompt_sets_are_reproducible_distinct_and_never_trained_on():
    asked = prompts.draw_prompts(100, 7)
    assert asked == prompts.draw_prompts(100, 7)
    assert len({question.prompt for question in asked}) == 100
    assert all(task.is_held_out(question.prompt) for question in asked)


def test_shipped_prompts_match_their_answers(tmp_path):
    shipped = ROOT / "recipes" / "data"
    asked = [json.loads(line) for line in (shipped / "prompts.jsonl").read_text().splitlines()]
    answers = [json.loads(line) for line in (shipped / "answers.jsonl").read_text().splitlines()]
    assert [row["item_id"] for row in asked] == [row["item_id"] for row in answers]
    assert len(asked) == 32
    for prompt, answer in zip(asked, answers, strict=True):
        assert set(prompt) == {"item_id", "prompt"}
        right = task.question(prompt["prompt"])
        assert (answer["answer"], answer["answer_tokens"]) == (right.answer, right.answer_tokens)
    prompts.write_prompts(tmp_path / "prompts.jsonl", prompts.draw_prompts(32, 0))
    for name in ("prompts.jsonl", "answers.jsonl"):
        assert (tmp_path / name).read_text() == (shipped / name).read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to do"),
        (["--out", "x", "--steps", "0"], "--steps: must be 1 or more, not 0"),
        (["--prompts", "p.jsonl", "--count", "0"], "--count: count must be 1 to"),
    ],
)
def test_bad_flags_end_in_one_line(arguments, message, tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "make_checkpoint.py"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
