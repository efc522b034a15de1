"""verl's training dataset: read, identified, and refused where verl would cut a prompt without a word."""

from __future__ import annotations

from typing import Any

from flexfloor.config import FlexFloorConfig
from verl_integration.items import ItemIndex, check_prompt_lengths


def read_dataset(config: Any) -> tuple[Any, Any]:
    """The dataset and the tokenizer, made the way verl's trainer makes them (no engine, no Ray)."""
    from verl.trainer.ppo.utils import create_rl_dataset
    from verl.utils.config import omega_conf_to_dataclass

    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    dataset = create_rl_dataset(
        config.data.train_files,
        config.data,
        model.tokenizer,
        model.processor,
        is_train=True,
        max_samples=config.data.get("train_max_samples", -1),
    )
    return dataset, model.tokenizer


def identify(dataset: Any, tokenizer: Any, config: Any, section: FlexFloorConfig) -> ItemIndex:
    """Item ids of the dataset's rows.

    Raises:
        InputError: a row without an id, or an empty dataset.
        RefusedError: a prompt is longer than ``data.max_prompt_length``.
    """
    index = ItemIndex.of(dataset, section.verl.item_id)
    if not config.data.get("filter_overlong_prompts", False):
        lengths = prompt_lengths(dataset, tokenizer)
        if lengths is not None:
            check_prompt_lengths(lengths, index.ids, int(config.data.max_prompt_length))
    return index


def prompt_lengths(dataset: Any, tokenizer: Any) -> list[int] | None:
    """Prompt tokens by row, chat template applied; None where prompts are not text alone or not verl's own rows."""
    frame = getattr(dataset, "dataframe", None)
    if frame is None or getattr(dataset, "processor", None) is not None:
        return None
    options = dict(getattr(dataset, "apply_chat_template_kwargs", None) or {})
    found = []
    for messages in frame[dataset.prompt_key]:
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, **options)
        found.append(len(tokens["input_ids"] if hasattr(tokens, "keys") else tokens))
    return found
