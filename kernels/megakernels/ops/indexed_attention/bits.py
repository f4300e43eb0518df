"""Chosen keys as bits: int32 [B, T, words], bit s % 32 of word s // 32 for the key at position s."""

import torch
from torch import Tensor

WORD_BITS = 32
COLUMN_BLOCK = 128
"""Columns of the scores, and bits of the chosen keys, are a multiple: the most keys of any tile."""


def num_columns(num_keys: int) -> int:
    """Columns of the scores, and bits of a query: one per key, in whole tiles."""
    return -(-num_keys // COLUMN_BLOCK) * COLUMN_BLOCK


def num_words(num_keys: int) -> int:
    """Words of a query."""
    return num_columns(num_keys) // WORD_BITS


def choice_like(q: Tensor, num_keys: int) -> Tensor:
    """The words of these queries [B, T, …] among so many keys, uninitialised."""
    return torch.empty(*q.shape[:2], num_words(num_keys), dtype=torch.int32, device=q.device)


def packed(chosen: Tensor, seen: slice, words: int) -> Tensor:
    """Flags of the keys `seen` [B, q, k] -> words [B, q, words]."""
    flags = torch.zeros(*chosen.shape[:2], words * WORD_BITS, dtype=torch.int64, device=chosen.device)
    flags[..., seen] = chosen.to(torch.int64)
    values = (torch.unflatten(flags, -1, (words, WORD_BITS)) << torch.arange(WORD_BITS, device=chosen.device)).sum(-1)
    return torch.where(values >= 1 << (WORD_BITS - 1), values - (1 << WORD_BITS), values).to(torch.int32)


def unpacked(choice: Tensor, seen: slice) -> Tensor:
    """Words [B, q, words] -> flags of the keys `seen`, bool [B, q, k]."""
    flags = (choice.unsqueeze(-1) >> torch.arange(WORD_BITS, device=choice.device, dtype=torch.int32)) & 1
    return flags.flatten(-2)[..., seen].bool()
