"""Sizes of tokenizers that launches name; without `--vocab-size` the tokenizer gives the vocabulary."""

from __future__ import annotations

import re
from typing import Any

from megaplan.importers.megatron.unset import readable

DEFAULT = "GPT2BPETokenizer"
"""Default tokenizer of `pretrain_gpt.py`, from its `args_defaults`."""
OF_TYPE = {"GPT2BPETokenizer": 50_257, "Llama2Tokenizer": 32_000}
OF_MODEL = {
    r"nemotron_2_256k": 256_000,
    r"mistral-?7b|mixtral-8x7b|llama-?2": 32_000,
    r"mixtral-8x22b": 32_768,
    r"llama-?3": 128_256,
    r"gpt2": 50_257,
}
"""Sizes by a part of the name in `--tokenizer-model`; added tokens included, as in each model's configuration."""


def tokenizer_size(kind: Any, model: Any) -> tuple[int | None, str]:
    """Number of tokens, or None if unknown, and the tokenizer's name for readers.

    Args:
        kind: `--tokenizer-type`; None for Megatron's default.
        model: `--tokenizer-model`; None if absent.
    """
    name = str(kind or DEFAULT)
    model = None if model in (None, True) else readable(str(model))  # True: the argument has no value
    shown = f"{name} {model}" if model else name if kind else f"{name}, Megatron's default"
    if model:
        of_model = next((size for part, size in OF_MODEL.items() if re.search(part, str(model).lower())), None)
        if of_model is not None:
            return of_model, shown
    return OF_TYPE.get(name), shown
