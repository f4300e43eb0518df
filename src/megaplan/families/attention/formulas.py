"""Formulas of A blocks as text; each example is arithmetic that a test evaluates against the operations."""

from megaplan.blocks.formula import Formula

FORMULAS = {
    "attention_core": Formula(
        "causal attention over the visible pairs; backward repeats q kᵀ",
        "F = 2 · pairs / T · H · (D + Dv), I = 2 · F + 2 · pairs / T · H · D, W = 0; pairs = w(w+1)/2 + (T−w)w, w = min(window, T)",
        "FLOPs per token, rounded up",
        "arXiv:2307.08691, section 3.1; counting pairs",
        "2 · (8192 · 8193 / 2) / 8192 · 32 · (128 + 128) = 67117056",
    ),
    "indexer": Formula(
        "scores of a sparse-attention indexer for every visible pair",
        "F = 2 · pairs / T · heads · (dim + 1), I = 3 · F, in addition to its three linears, which have no I",
        "FLOPs per token, rounded up",
        "arXiv:2512.02556, equation 1",
        "2 · (4096 · 4097 / 2) / 4096 · 8 · (64 + 1) = 2130440",
    ),
}
