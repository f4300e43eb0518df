"""Formulas of M blocks as text; each example is arithmetic that a test evaluates against the operations."""

from megaplan.blocks.formula import Formula

FORMULAS = {
    "ssd": Formula(
        "Mamba-2's scan in chunks of Q; backward repeats C Bᵀ",
        "F = 2QNG + H(2QP + 4NP), I = 2F + 2QNG; N state, G groups, H heads, P head width, Q = min(chunk, T)",
        "FLOPs per token",
        "arXiv:2405.21060, section 6",
        "2 · 256 · 128 · 8 + 128 · (2 · 256 · 64 + 4 · 128 · 64) = 8912896",
    ),
    "mimo_ssd": Formula(
        "Mamba-3's scan with R inputs a position, in chunks of Q rows (Q / R positions)",
        "F = H · R · (2QN + 2QP + 4NP), I = 2F + 2HRQN",
        "FLOPs per token",
        "arXiv:2603.15569, section 3",
        "112 · 4 · (2 · 64 · 128 + 2 · 64 · 64 + 4 · 128 · 64) = 25690112",
    ),
    "selective_scan": Formula(
        "Mamba-1's scan, elementwise in every channel's state; backward repeats the states",
        "F = 5 · I · N, I = 14 · I · N; I channels, N state",
        "FLOPs per token",
        "arXiv:2312.00752, algorithm 2; counting multiplications and additions",
        "5 · 8192 · 16 = 655360",
    ),
    "causal_conv1d": Formula(
        "a depthwise convolution, and each of its two gradients",
        "F = I = W = 2 · C · K",
        "FLOPs per token",
        "counting multiply-adds",
        "2 · 10240 · 4 = 81920",
    ),
}
