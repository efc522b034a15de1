"""The shipped checkpoint: whole, balanced, and right in real vLLM and in transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = ROOT / "recipes" / "data"
CHECKPOINT = DATA / "tiny-moe"
sys.path.insert(0, str(ROOT / "tools"))

ASK_VLLM = """
import json, sys
from pathlib import Path
from vllm import LLM, SamplingParams

def main():
    checkpoint, data = sys.argv[1], Path(sys.argv[2])
    prompts = [json.loads(line)["prompt"] for line in (data / "prompts.jsonl").read_text().splitlines()]
    llm = LLM(checkpoint, dtype="bfloat16", enforce_eager=True, max_model_len=512, max_num_seqs=32,
              kv_cache_memory_bytes=64 << 20, seed=0)
    asked = {"greedy": SamplingParams(temperature=0.0, max_tokens=300),
             "sampled": [SamplingParams(temperature=1.0, max_tokens=300, seed=i) for i in range(len(prompts))]}
    answers = {}
    for way, parameters in asked.items():
        outputs = [request.outputs[0] for request in llm.generate(prompts, parameters, use_tqdm=False)]
        answers[way] = [[out.text, len(out.token_ids), out.finish_reason] for out in outputs]
    Path(sys.argv[3]).write_text(json.dumps(answers))

if __name__ == "__main__":
    main()
"""


def _lines(name):
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def vllm_answers(tmp_path_factory):
    """[text, tokens, finish reason] of every shipped prompt, greedy and sampled, from one vLLM engine."""
    folder = tmp_path_factory.mktemp("vllm")
    script, result = folder / "ask.py", folder / "answers.json"
    script.write_text(ASK_VLLM)
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_PLUGINS": ""}
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
    command = [sys.executable, str(script), str(CHECKPOINT), str(DATA), str(result)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(result.read_text())


def test_vllm_answers_rightly_and_stops_where_the_answer_ends(vllm_answers):
    from checkpoint.task import reward

    prompts, known = _lines("prompts.jsonl"), _lines("answers.jsonl")
    greedy = vllm_answers["greedy"]
    right = [
        reward(prompt["prompt"], text, ended=reason == "stop")
        for prompt, (text, _, reason) in zip(prompts, greedy, strict=True)
    ]
    assert sum(right) / len(right) >= 0.95
    exact = [tokens == answer["answer_tokens"] for answer, (_, tokens, _) in zip(known, greedy, strict=True)]
    assert sum(exact) / len(exact) >= 0.95


def test_sampled_answers_end_by_themselves_near_the_known_length(vllm_answers):
    known = [row["answer_tokens"] for row in _lines("answers.jsonl")]
    sampled = vllm_answers["sampled"]
    near = [abs(tokens - right) <= max(3, 0.1 * right) for right, (_, tokens, _) in zip(known, sampled, strict=True)]
    assert sum(near) / len(near) >= 0.8
    assert sum(reason == "stop" for _, _, reason in sampled) / len(sampled) >= 0.9
    assert [tokens for _, tokens, _ in sampled] != [tokens for _, tokens, _ in vllm_answers["greedy"]]


def test_the_folder_is_what_its_record_says():
    from checkpoint.saving import RECORD, digest

    record = json.loads((CHECKPOINT / RECORD).read_text(encoding="utf-8"))
    assert record["digest"] == digest(CHECKPOINT)
    assert record["accuracy"]["greedy"]["right"] >= 0.95
    for layer in record["expert_shares"]:
        assert len(layer) == 16
        assert sum(layer) == pytest.approx(1.0, abs=0.01)
        assert min(layer) > 0.02
        assert max(layer) < 0.15


def test_the_tokenizer_fits_model_and_task():
    from checkpoint.task import LARGEST, WORDS, question
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    config = AutoConfig.from_pretrained(CHECKPOINT)
    assert config.vocab_size == len(tokenizer)
    assert config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    for piece in ["\n", *(f" {number}" for number in range(LARGEST + 1)), *(f" {word}" for word in WORDS)]:
        assert len(tokenizer.encode(piece)) == 1
    text = "Any text, even Grüße\n\n 1000 ✓ crab"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    asked = question("repeat crab up to 7:")
    assert len(tokenizer.encode(asked.answer)) + 1 == asked.answer_tokens
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": asked.prompt}], tokenize=False, add_generation_prompt=True
    )
    assert chat == f"<|im_start|>user\n{asked.prompt}<|im_end|>\n<|im_start|>assistant\n"


def test_training_again_gives_the_same_weights(tmp_path):
    from checkpoint.saving import RECORD

    digests = []
    for name in ("first", "second"):
        flags = ["--steps", "3", "--measured", "2", "--seed", "5"]
        command = [sys.executable, str(ROOT / "tools" / "make_checkpoint.py"), "--out", str(tmp_path / name), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        digests.append(json.loads((tmp_path / name / RECORD).read_text(encoding="utf-8"))["digest"])
    assert digests[0] == digests[1]
