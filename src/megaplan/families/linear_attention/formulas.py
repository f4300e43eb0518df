"""Formulas of G blocks as text; each example is arithmetic that a test evaluates against the operations."""

from megaplan.blocks.formula import Formula

FORMULAS = {
    "lightning": Formula(
        "Mamba-2's scan with a group for each head: attention inside chunks of Q, and the state between them",
        "F = H(4QK + 4KK), I = 2F + 2HQK; H heads, K width of a head, Q = min(chunk, T)",
        "FLOPs per token",
        "arXiv:2401.04658, algorithm 1; counting multiply-adds",
        "64 · (4 · 256 · 128 + 4 · 128 · 128) = 12582912",
    ),
    "mlstm": Formula(
        "attention inside chunks of Q, and the matrix state between them",
        "F = H(2Q(K + V) + 4KV), I = 2F + 2HQK; H heads, K key, V value width, Q = min(chunk, T)",
        "FLOPs per token",
        "arXiv:2503.13427, section 3; counting multiply-adds",
        "8 · (2 · 64 · (256 + 512) + 4 · 256 · 512) = 4980736",
    ),
    "delta_rule": Formula(
        "the gated delta rule in chunks of Q; backward repeats all except the outputs",
        "F = H(4QK + 3QV + 6KV), I = 2F + H(4QK + QV + 4KV); H value heads, K key, V value width, Q = min(chunk, save_every, T)",
        "FLOPs per token",
        "arXiv:2412.06464, section 3.3; counting multiply-adds",
        "32 · (4 · 64 · 128 + 3 · 64 · 128 + 6 · 128 · 128) = 4980736",
    ),
}
