"""Supervised training on drawn questions, batches of about equal answer length, one optimiser step a batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from checkpoint.task import LONGEST, SHORTEST, Question, draw

LEARNING_RATE: Final = 3e-3
WARMUP_SHARE: Final = 0.05
BALANCE_WEIGHT: Final = 0.02
BATCH_TOKENS: Final = 1536
BATCHES_A_POOL: Final = 8
FIRST_LONGEST: Final = 16
SHORT_UNTIL: Final = 0.4
FULL_FROM: Final = 0.7
EVEN_SHARE: Final = 0.5
IGNORED: Final = -100


@dataclass(frozen=True)
class Batch:
    """Right-padded token ids, attention mask and targets, each [examples, tokens]; prompt and padding are no target."""

    token_ids: torch.Tensor
    mask: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True)
class Progress:
    """State after one optimiser step: losses of its batch in nats a token."""

    step: int
    loss: float
    balance: float


def as_chat(tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """The prompt as the one user message of a chat, ready for the answer."""
    messages = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _longest(done: float) -> int:
    """Longest answer drawn when the share ``done`` of the training is over.

    Where to stop is learnt fastest from short answers, which have an end every few tokens; length comes after.
    """
    grown = min(1.0, max(0.0, (done - SHORT_UNTIL) / (FULL_FROM - SHORT_UNTIL)))
    longest: float = FIRST_LONGEST * (LONGEST / FIRST_LONGEST) ** grown
    return round(longest)


def _draw_length(rng: random.Random, longest: int) -> int:
    """Tokens of the next answer: half of them evenly spread, half mostly short (log-uniform)."""
    if rng.random() < EVEN_SHARE:
        return rng.randint(SHORTEST, longest)
    length: float = SHORTEST * (longest / SHORTEST) ** rng.random()
    return round(length)


def _encode(tokenizer: PreTrainedTokenizerFast, asked: Question, rng: random.Random) -> tuple[list[int], int]:
    """Token ids of prompt and answer, and how many of them are the prompt. Half of the prompts are chats."""
    text = as_chat(tokenizer, asked.prompt) if rng.random() < 0.5 else asked.prompt
    prompt_ids: list[int] = tokenizer(text)["input_ids"]
    answer_ids: list[int] = tokenizer(asked.broken(rng))["input_ids"]
    return [*prompt_ids, *answer_ids, tokenizer.eos_token_id], len(prompt_ids)


def _collate(examples: list[tuple[list[int], int]], pad: int) -> Batch:
    width = max(len(ids) for ids, _ in examples)
    token_ids = torch.full((len(examples), width), pad)
    targets = torch.full((len(examples), width), IGNORED)
    for row, (ids, prompt_length) in enumerate(examples):
        token_ids[row, : len(ids)] = torch.tensor(ids)
        targets[row, prompt_length : len(ids)] = torch.tensor(ids[prompt_length:])
    lengths = torch.tensor([len(ids) for ids, _ in examples])
    return Batch(token_ids, (torch.arange(width) < lengths[:, None]).long(), targets)


def batches(tokenizer: PreTrainedTokenizerFast, *, steps: int, seed: int) -> Iterator[Batch]:
    """``steps`` batches of at most ``BATCH_TOKENS`` tokens with padding; the same seed gives the same batches."""
    rng = random.Random(seed)
    pad: int = tokenizer.pad_token_id
    drawn = 0
    while drawn < steps:
        longest = _longest(drawn / steps)
        pool: list[tuple[list[int], int]] = []
        while sum(len(ids) for ids, _ in pool) < BATCHES_A_POOL * BATCH_TOKENS:
            pool.append(_encode(tokenizer, draw(rng, _draw_length(rng, longest), held_out=False), rng))
        pool.sort(key=lambda example: len(example[0]))
        groups: list[list[tuple[list[int], int]]] = [[]]
        for example in pool:
            if (len(groups[-1]) + 1) * len(example[0]) > BATCH_TOKENS:
                groups.append([])
            groups[-1].append(example)
        rng.shuffle(groups)
        groups = groups[: steps - drawn]
        drawn += len(groups)
        yield from (_collate(group, pad) for group in groups)


def _balance_loss(router_logits: tuple[torch.Tensor, ...], model: Qwen3MoeForCausalLM, batch: Batch) -> torch.Tensor:
    """Switch load-balancing loss (arXiv 2101.03961, equations 4 to 6), a layer at a time; top-k at best."""
    experts, chosen = model.config.num_experts, model.config.num_experts_per_tok
    each = [load_balancing_loss_func((layer,), experts, chosen, batch.mask) for layer in router_logits]
    return torch.stack(each).mean()


def train(
    model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, *, steps: int, seed: int
) -> Iterator[Progress]:
    """Train ``model`` in place; yields after every step."""
    decayed = [weight for weight in model.parameters() if weight.ndim > 1]
    plain = [weight for weight in model.parameters() if weight.ndim <= 1]
    optimiser = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=(0.9, 0.98),
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, LEARNING_RATE, total_steps=steps + 1, pct_start=WARMUP_SHARE, cycle_momentum=False
    )
    model.train()
    for step, batch in enumerate(batches(tokenizer, steps=steps, seed=seed), start=1):
        output = model(input_ids=batch.token_ids, attention_mask=batch.mask, output_router_logits=True, use_cache=False)
        logits, targets = output.logits[:, :-1], batch.targets[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        balance = _balance_loss(output.router_logits, model, batch)
        (loss + BALANCE_WEIGHT * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad(set_to_none=True)
        yield Progress(step, loss.item(), balance.item())
