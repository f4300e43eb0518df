"""The cost model's formulas as text, for `megaplan explain`; each example is arithmetic that a test evaluates against the ops."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Formula:
    """One formula as a person reads it.

    Attributes:
        summary: What it counts, in one line.
        formula: With the field's symbols, all of them defined in it.
        unit: Of the result.
        source: Paper and equation, or the counting argument.
        example: The formula with numbers, `expression = value`.
    """

    summary: str
    formula: str
    unit: str
    source: str
    example: str


FORMULAS: dict[str, Formula] = {
    "linear": Formula(
        "a linear layer, and each of its two gradients",
        "F = I = W = 2 · in · out",
        "FLOPs per token",
        "counting multiply-adds; arXiv:2001.08361, section 2.1",
        "2 · 4096 · 14336 = 117440512",
    ),
    "attention_core": Formula(
        "causal attention over the visible pairs; backward repeats q kᵀ",
        "F = 2 · pairs / T · H · (D + Dv), I = 2 · F + 2 · pairs / T · H · D, W = 0; pairs = w(w+1)/2 + (T−w)w, w = min(window, T)",
        "FLOPs per token, rounded up",
        "arXiv:2307.08691, section 3.1; counting pairs",
        "2 · (8192 · 8193 / 2) / 8192 · 32 · (128 + 128) = 67117056",
    ),
    "indexer": Formula(
        "scores of a sparse-attention indexer for every visible pair",
        "F = 2 · pairs / T · heads · (dim + 1), I = 3 · F, beside its three linears, which have no I",
        "FLOPs per token, rounded up",
        "arXiv:2512.02556, equation 1",
        "2 · (4096 · 4097 / 2) / 4096 · 8 · (64 + 1) = 2130440",
    ),
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
    "delta_rule": Formula(
        "the gated delta rule in chunks of Q; backward repeats all but the outputs",
        "F = H(4QK + 3QV + 6KV), I = 2F + H(4QK + QV + 4KV); H value heads, K key, V value width, Q = min(chunk, save_every, T)",
        "FLOPs per token",
        "arXiv:2412.06464, section 3.3; counting multiply-adds",
        "32 · (4 · 64 · 128 + 3 · 64 · 128 + 6 · 128 · 128) = 4980736",
    ),
    "gated_conv1d": Formula(
        "a depthwise convolution between two gates; backward repeats it",
        "F = W = 2 · C · K, I = 4 · C · K",
        "FLOPs per token",
        "counting multiply-adds",
        "2 · 2048 · 3 = 12288",
    ),
    "m2rnn": Formula(
        "the matrix-state recurrence; backward repeats H W + k vᵀ",
        "F = H(2KV² + 4KV), I = F + H(2KV² + 6KV), W = 2HKV²; K key, V value width",
        "FLOPs per token",
        "arXiv:2603.14360, state update; counting multiply-adds",
        "44 · (2 · 64 · 16 · 16 + 4 · 64 · 16) = 1622016",
    ),
    "causal_conv1d": Formula(
        "a depthwise convolution, and each of its two gradients",
        "F = I = W = 2 · C · K",
        "FLOPs per token",
        "counting multiply-adds",
        "2 · 10240 · 4 = 81920",
    ),
    "experts": Formula(
        "the experts a token chooses, beside the router and the shared expert",
        "F = I = W = top_k · m · 2 · h · f; m = 3 matrices with swiglu, 2 without",
        "FLOPs per token",
        "arXiv:2401.04088, section 2.1",
        "2 · 3 · 2 · 4096 · 14336 = 704643072",
    ),
    "router": Formula(
        "scores of all experts",
        "F = I = W = 2 · h · E",
        "FLOPs per token",
        "arXiv:1701.06538, section 2",
        "2 · 4096 · 8 = 65536",
    ),
    "head": Formula(
        "logits, forward and backward; each MTP depth has one more",
        "F + I + W = 6 · h · V; 2 · h · V more, repeated forward work, with host.kernels triton",
        "FLOPs per token",
        "counting multiply-adds",
        "6 · 3584 · 65536 = 1409286144",
    ),
    "weight_bytes": Formula(
        "weights read by F and I, gradients read and written by W",
        "n · (2 · params + 2 · grads); n elements, bytes of precision.params and precision.grads",
        "bytes per microbatch",
        "counting operands",
        "176164864 · (2 · 2 + 2 · 4) = 2113978368",
    ),
    "flops_per_token": Formula(
        "model FLOPs of one token, the numerator of MFU",
        "sum of F + I + W over layers, side embeddings, head and MTP depths, repeated forward work left out",
        "FLOPs per token",
        "arXiv:2204.02311, appendix B",
        "6 · 7504658432 + 32 · 3 · 67117056 = 51471187968",
    ),
}
