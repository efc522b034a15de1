"""What a checkpoint can do: right answers on held-out prompts, answer lengths, and the load of its experts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from checkpoint.task import LONGEST, SHORTEST, Question, draw, reward
from checkpoint.training import as_chat

MARGIN_TOKENS: Final = 64
ROWS: Final = 64


@dataclass(frozen=True)
class Answer:
    """One generated answer: ``tokens`` counts the end token, ``ended`` tells whether there was one."""

    text: str
    tokens: int
    ended: bool


@dataclass(frozen=True)
class Accuracy:
    """Shares of ``prompts`` in [0, 1]; gaps in tokens.

    Attributes:
        prompts: answers looked at.
        right: right text, ended by the end token.
        ended: ended by the end token, right or wrong.
        exact_length: as many tokens as the unbroken right answer.
        mean_gap: mean of |generated tokens - tokens of the unbroken right answer|.
    """

    prompts: int
    right: float
    ended: float
    exact_length: float
    mean_gap: float


def held_out(count: int, seed: int) -> list[Question]:
    """``count`` prompts that training never saw, answer lengths spread evenly from shortest to longest."""
    rng = random.Random(f"measure {seed}")
    lengths = [SHORTEST + (LONGEST - SHORTEST) * index // max(1, count - 1) for index in range(count)]
    return [draw(rng, length, held_out=True) for length in lengths]


@torch.inference_mode()
def generate(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    asked: Sequence[Question],
    *,
    chat: bool,
    sample: bool,
) -> list[Answer]:
    """One answer a question, greedy or sampled at temperature 1, in batches of similar length."""
    model.eval()
    answers: dict[int, Answer] = {}
    order = sorted(range(len(asked)), key=lambda index: asked[index].answer_tokens)
    for start in range(0, len(order), ROWS):
        rows = order[start : start + ROWS]
        texts = [as_chat(tokenizer, asked[row].prompt) if chat else asked[row].prompt for row in rows]
        inputs = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max(asked[row].answer_tokens for row in rows) + MARGIN_TOKENS,
            do_sample=sample,
            **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}),
        )
        for row, ids in zip(rows, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            ended = tokenizer.eos_token_id in ids
            tokens = ids.index(tokenizer.eos_token_id) + 1 if ended else len(ids)
            answers[row] = Answer(tokenizer.decode(ids[: tokens - ended]), tokens, ended)
    return [answers[row] for row in range(len(asked))]


def accuracy(asked: Sequence[Question], answers: Sequence[Answer]) -> Accuracy:
    """How right ``answers`` are."""
    pairs = list(zip(asked, answers, strict=True))
    gaps = [abs(answer.tokens - question.answer_tokens) for question, answer in pairs]
    count = len(pairs)
    return Accuracy(
        prompts=count,
        right=sum(reward(question.prompt, answer.text, ended=answer.ended) for question, answer in pairs) / count,
        ended=sum(answer.ended for answer in answers) / count,
        exact_length=sum(gap == 0 for gap in gaps) / count,
        mean_gap=sum(gaps) / count,
    )


@torch.inference_mode()
def expert_shares(
    model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, asked: Sequence[Question]
) -> list[list[float]]:
    """Per layer, the share of routed (token, slot) pairs each expert gets over prompts and right answers; sums to 1."""
    model.eval()
    experts, chosen = model.config.num_experts, model.config.num_experts_per_tok
    loads = torch.zeros(model.config.num_hidden_layers, experts, dtype=torch.long)
    for question in asked:
        ids = tokenizer(question.prompt + question.answer, return_tensors="pt")["input_ids"]
        routers = model(input_ids=ids, output_router_logits=True).router_logits
        for layer, logits in enumerate(routers):
            loads[layer] += torch.bincount(logits.topk(chosen, dim=-1).indices.flatten(), minlength=experts)
    return [[float(share) for share in layer / layer.sum()] for layer in loads.double()]
