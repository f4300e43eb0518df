"""Facts of head and loss as one operation: slices of the vocabulary, of which one slice of logits exists at a time."""

from __future__ import annotations

from megakernels.facts import ceil_div

LOGITS_SLICE_ELEMENTS = 1 << 27
"""Largest number of logits at a time: 256 MiB in bf16."""


def slice_columns(rows: int, vocab: int) -> int:
    """Columns of the vocabulary whose logits exist at a time."""
    return min(vocab, max(1, LOGITS_SLICE_ELEMENTS // max(1, rows)))


def num_slices(rows: int, vocab: int) -> int:
    """Slices of the vocabulary."""
    return ceil_div(vocab, slice_columns(rows, vocab))
