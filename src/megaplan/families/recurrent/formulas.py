"""Formulas of R blocks as text; each example is arithmetic that a test evaluates against the operations."""

from megaplan.blocks.formula import Formula

FORMULAS = {
    "m2rnn": Formula(
        "the matrix-state recurrence; backward repeats H W + k vᵀ",
        "F = H(2KV² + 4KV), I = F + H(2KV² + 6KV), W = 2HKV²; K key, V value width",
        "FLOPs per token",
        "arXiv:2603.14360, state update; counting multiply-adds",
        "44 · (2 · 64 · 16 · 16 + 4 · 64 · 16) = 1622016",
    ),
}
