"""The model: a small Qwen3-MoE with sixteen experts in every layer."""

from __future__ import annotations

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from checkpoint.tokenizer import MAX_POSITIONS


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    """Sizes: every matrix a multiple of 32, as vLLM's CPU kernel for experts asks."""
    return Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        num_experts=16,
        num_experts_per_tok=4,
        initializer_range=0.06,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3MoeForCausalLM:
    """An untrained model in float32. The same seed gives the same weights."""
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(model_config(tokenizer))
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    return model
