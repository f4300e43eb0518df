"""Sizes of tokenizers that launches name; without `--vocab-size` the tokenizer gives the vocabulary."""

from __future__ import annotations

import re
from typing import Any

from megaplan.importers.megatron.unset import readable, unset_names

DEFAULT = "GPT2BPETokenizer"
"""Default tokenizer of `pretrain_gpt.py`, from its `args_defaults`."""
GPT2_TOKENS = 50_257
OF_MODEL = {
    r"nemotron_2_256k": 256_000,
    r"mistral-?7b|mixtral-8x7b|llama-?2": 32_000,
    r"mixtral-8x22b": 32_768,
    r"llama-?3": 128_256,
    r"gpt2": 50_257,
}
"""Sizes by a part of the name in `--tokenizer-model`; added tokens included, as in each model's configuration."""


def tokenizer_size(kind: Any, model: Any, vocabulary: Any = None) -> tuple[int | None, str]:
    """Number of tokens, or None if unknown, and the tokenizer's name for readers.

    A type alone decides no size: a file of one's own may be behind it. GPT-2's is known, unless another file is named.

    Args:
        kind: `--tokenizer-type`; None for Megatron's default.
        model: `--tokenizer-model`; None if absent.
        vocabulary: `--vocab-file`; None if absent.
    """
    name = str(kind or DEFAULT)
    model = None if model in (None, True) else readable(str(model))  # True: the argument has no value
    shown = f"{name} {model}" if model else name if kind else f"{name}, Megatron's default"
    if model:
        of_model = next((size for part, size in OF_MODEL.items() if re.search(part, str(model).lower())), None)
        if of_model is not None:
            return of_model, shown
        return None, shown
    own = isinstance(vocabulary, str) and not unset_names(vocabulary) and not re.search(r"gpt-?2", vocabulary.lower())
    if own:
        shown += f" with {vocabulary}"
    return (GPT2_TOKENS if name == DEFAULT and not own else None), shown
