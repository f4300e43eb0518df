"""Sizes of tokenizers that launches name: a vocabulary without `--vocab-size` is the tokenizer's."""

from __future__ import annotations

import re
from typing import Any

from megaplan.importers.megatron.unset import readable

DEFAULT = "GPT2BPETokenizer"
"""Of `pretrain_gpt.py`, by its `args_defaults`, where no tokenizer is named."""
OF_TYPE = {"GPT2BPETokenizer": 50_257, "Llama2Tokenizer": 32_000}
OF_MODEL = {
    r"nemotron_2_256k": 256_000,
    r"mistral-?7b|mixtral-8x7b|llama-?2": 32_000,
    r"mixtral-8x22b": 32_768,
    r"llama-?3": 128_256,
    r"gpt2": 50_257,
}
"""By a part of the name of `--tokenizer-model`; tokens with the added ones, as each model's own configuration states them."""


def tokenizer_size(kind: Any, model: Any) -> tuple[int | None, str]:
    """Tokens, or None where they are not known, and the tokenizer as a person reads it.

    Args:
        kind: `--tokenizer-type`; None for Megatron's default.
        model: `--tokenizer-model`; None where it is absent.
    """
    name = str(kind or DEFAULT)
    model = None if model in (None, True) else readable(str(model))  # True: the argument has no value
    shown = f"{name} {model}" if model else name if kind else f"{name}, Megatron's default"
    if model:
        of_model = next((size for part, size in OF_MODEL.items() if re.search(part, str(model).lower())), None)
        if of_model is not None:
            return of_model, shown
    return OF_TYPE.get(name), shown
