"""The tokenizer: byte-level BPE, whose merges make one token of every number and word of the task.

Any text can be encoded (bytes are the fallback) and is given back unchanged; a newline is one token.
"""

from __future__ import annotations

from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from checkpoint.task import LARGEST, PHRASES

PAD: Final = "<|endoftext|>"
START: Final = "<|im_start|>"
END: Final = "<|im_end|>"
SPACE: Final = "Ġ"
MAX_POSITIONS: Final = 1024
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _merges() -> list[tuple[str, str]]:
    """Pairs in order of precedence: words grow from their first letter, numbers from the space before them."""
    merges: dict[tuple[str, str], None] = {}
    for word in PHRASES:
        for end in range(1, len(word)):
            merges[word[:end], word[end]] = None
        merges[SPACE, word] = None
    for number in range(LARGEST + 1):
        digits = f"{SPACE}{number}"
        merges[digits[:-1], digits[-1]] = None
    return list(merges)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer, with padding, start and end tokens and a chat template."""
    merges = _merges()
    special = (PAD, START, END)
    pieces = dict.fromkeys(
        [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    )
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=START,
        eos_token=END,
        pad_token=PAD,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
