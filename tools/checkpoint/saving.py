"""Write a checkpoint folder with its record, so that it can be told apart and made again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from checkpoint.measurement import Accuracy

RECORD: Final = "flexfloor_checkpoint.json"
DIGESTED: Final = ("model.safetensors", "config.json", "tokenizer.json")


@dataclass(frozen=True)
class Training:
    """How the weights came about; ``seconds`` is wall time of the optimiser steps."""

    seed: int
    steps: int
    threads: int
    seconds: float


def digest(folder: Path) -> str:
    """SHA-256 over weights, sizes and vocabulary of a checkpoint folder, as hex."""
    total = hashlib.sha256()
    for name in DIGESTED:
        total.update(hashlib.sha256((folder / name).read_bytes()).digest())
    return total.hexdigest()


def save_model(folder: Path, model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Save weights and tokenizer, without the record."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _name_portable_tokenizer_class(folder / "tokenizer_config.json")
    (folder / "model.safetensors").chmod(0o644)


def save_record(
    folder: Path, training: Training, accuracy: dict[str, Accuracy], expert_shares: list[list[float]]
) -> Path:
    """Write what is known of the saved checkpoint; returns the file."""
    record = {
        "task": "count and repeat: tools/checkpoint/task.py",
        "training": dataclasses.asdict(training),
        "accuracy": {way: dataclasses.asdict(measured) for way, measured in accuracy.items()},
        "expert_shares": [[round(share, 4) for share in layer] for layer in expert_shares],
        "digest": digest(folder),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "tokenizers": version("tokenizers"),
        },
    }
    file = folder / RECORD
    file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return file


def _name_portable_tokenizer_class(file: Path) -> None:
    """Write the old name of PreTrainedTokenizerFast: transformers 4 does not know the new one, 5 knows both."""
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
