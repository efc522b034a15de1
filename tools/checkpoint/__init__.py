"""The small trained Qwen3-MoE checkpoint: its task, tokenizer, training and measurement."""
