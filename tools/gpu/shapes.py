"""Shapes of Qwen3-MoE checkpoints, and checkpoints made on the spot: config alone, or seeded weights."""

from __future__ import annotations

import json
from pathlib import Path

SHAPES: dict[str, dict[str, int]] = {
    "small": {
        "hidden_size": 1024,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "vocab_size": 32000,
    },
    "wide": {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 32000,
    },
    "a3b": {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
    },
}


def write_config(folder: Path, shape: dict[str, int]) -> Path:
    """The config.json of a Qwen3-MoE of this shape."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "intermediate_size": 3 * shape["hidden_size"],
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **shape,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def write_weights(folder: Path, shape: dict[str, int], seed: int = 0) -> Path:
    """Seeded normal weights of standard deviation 0.02 in one safetensors file."""
    import torch
    from safetensors.torch import save_file

    write_config(folder, shape)
    hidden, inner, head = shape["hidden_size"], shape["moe_intermediate_size"], shape["head_dim"]
    query, value = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape["vocab_size"], hidden),
        "lm_head.weight": (shape["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(shape["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        sizes |= {
            f"{base}.input_layernorm.weight": (hidden,),
            f"{base}.post_attention_layernorm.weight": (hidden,),
            f"{base}.self_attn.q_norm.weight": (head,),
            f"{base}.self_attn.k_norm.weight": (head,),
            f"{base}.self_attn.q_proj.weight": (query, hidden),
            f"{base}.self_attn.k_proj.weight": (value, hidden),
            f"{base}.self_attn.v_proj.weight": (value, hidden),
            f"{base}.self_attn.o_proj.weight": (hidden, query),
            f"{base}.mlp.gate.weight": (shape["num_experts"], hidden),
        }
        for expert in range(shape["num_experts"]):
            sizes[f"{base}.mlp.experts.{expert}.gate_proj.weight"] = (inner, hidden)
            sizes[f"{base}.mlp.experts.{expert}.up_proj.weight"] = (inner, hidden)
            sizes[f"{base}.mlp.experts.{expert}.down_proj.weight"] = (hidden, inner)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(size, dtype=torch.bfloat16)
        if len(size) == 1
        else (torch.randn(size, generator=generator) * 0.02).to(torch.bfloat16)
        for name, size in sizes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
