"""Chosen keys as bits: int32 [B, T, words], bit s % 32 of word s // 32 for the key at position s."""

import torch
from torch import Tensor

from megakernels.ops.indexed_attention.facts import WORD_BITS, num_words


def choice_like(q: Tensor, num_keys: int) -> Tensor:
    """The words of these queries [B, T, …] among so many keys, uninitialised."""
    return torch.empty(*q.shape[:2], num_words(num_keys), dtype=torch.int32, device=q.device)


def bit_values(device: torch.device) -> Tensor:
    """The value of each bit of a word, int32 [32]; the last is the sign bit."""
    return torch.ones(WORD_BITS, dtype=torch.int32, device=device) << torch.arange(WORD_BITS, dtype=torch.int32, device=device)


def packed(chosen: Tensor, seen: slice, words: int, values: Tensor) -> Tensor:
    """Flags of the keys `seen` [B, q, k] -> words [B, q, words]."""
    flags = torch.nn.functional.pad(chosen, (seen.start, words * WORD_BITS - seen.stop))
    return (torch.unflatten(flags, -1, (words, WORD_BITS)) * values).sum(-1, dtype=torch.int32)


def unpacked(choice: Tensor, seen: slice, values: Tensor) -> Tensor:
    """Words [B, q, words] -> flags of the keys `seen`, bool [B, q, k]."""
    return (choice.unsqueeze(-1) & values).flatten(-2)[..., seen] != 0
