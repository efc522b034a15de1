"""A mixture-of-experts checkpoint of 2 MB with random weights, for tests that only need an engine to run."""

from pathlib import Path

EXPERTS = 16
VOCABULARY = 512


def make(folder: Path, seed: int = 0) -> Path:
    """Qwen3-MoE: 2 layers, 16 experts of which 4 answer, no tokenizer."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
