"""prompts.jsonl: what is read, what is refused, and the seeds."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexfloor.errors import InputError
from flexfloor.workload import Prompt, read_prompts, response_seed


def write(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_texts_token_ids_and_options(tmp_path):
    workload = read_prompts(
        write(
            tmp_path,
            {"item_id": "a", "prompt": "count:"},
            "",
            {"item_id": "b", "prompt_token_ids": [3, 0, 5], "max_tokens": 7, "n": 2, "seed": 9},
        )
    )
    assert list(workload) == ["a", "b"]
    assert workload["a"] == Prompt("a", "count:")
    assert workload["b"] == Prompt("b", (3, 0, 5), 7, 2, 9)


@pytest.mark.parametrize(
    ("line", "field", "part"),
    [
        ({"prompt": "x"}, "item_id", "missing"),
        ({"item_id": "a"}, "prompt", "either"),
        ({"item_id": "a", "prompt": "x", "prompt_token_ids": [1]}, "prompt", "either"),
        ({"item_id": "a", "prompt": ""}, "prompt", "at least 1"),
        ({"item_id": "a", "prompt": "x", "n": 0}, "n", "greater"),
        ({"item_id": "a", "prompt": "x", "n": True}, "n", "integer"),
        ({"item_id": "a", "prompt": "x", "max_tokens": "9"}, "max_tokens", "integer"),
        ({"item_id": "a", "prompt": "x", "seed": -1}, "seed", "greater"),
        ({"item_id": "a", "prompt_token_ids": []}, "prompt_token_ids", "at least 1"),
        ({"item_id": "a", "prompt_token_ids": [1, -1]}, "prompt_token_ids.1", "greater"),
        ({"item_id": "a", "prompt": "x", "answer": "y"}, "answer", "unknown"),
        ({"item_id": 3, "prompt": "x"}, "item_id", "string"),
        ('{"item_id": "a", "item_id": "b", "prompt": "x"}', None, "twice"),
        ('{"item_id": "a", ', None, "no JSON"),
        ("[1]", None, "object"),
    ],
)
def test_a_bad_line_is_named_with_line_and_field(tmp_path, line, field, part):
    path = write(tmp_path, {"item_id": "good", "prompt": "x"}, line)
    with pytest.raises(InputError) as caught:
        read_prompts(path)
    assert (caught.value.line, caught.value.field) == (2, field)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_item_that_stands_twice_is_refused(tmp_path):
    path = write(tmp_path, {"item_id": "a", "prompt": "x"}, {"item_id": "a", "prompt": "y"})
    with pytest.raises(InputError, match="line 1"):
        read_prompts(path)


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="is empty"):
        read_prompts(write(tmp_path, ""))


@given(st.text(min_size=1, max_size=8), st.integers(0, 50), st.integers(0, 50))
def test_seeds_fit_and_depend_on_every_part(item, epoch, sample):
    seed = response_seed(item, epoch, sample)
    assert 0 <= seed < 1 << 62
    others = {
        response_seed(item + "x", epoch, sample),
        response_seed(item, epoch + 1, sample),
        response_seed(item, epoch, sample + 1),
        response_seed(item, epoch, sample, base=1),
    }
    assert seed not in others


def test_seeds_are_the_same_in_every_process():
    code = "from flexfloor.workload import response_seed; print(response_seed('a', 1, 2))"
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(elsewhere.stdout) == response_seed("a", 1, 2)


def test_an_own_seed_gives_each_sample_its_own():
    prompt = Prompt("a", "x", seed=5)
    assert [prompt.response_seed(3, sample) for sample in (0, 1, 2)] == [5, 6, 7]
