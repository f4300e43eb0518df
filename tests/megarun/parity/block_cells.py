"""Cells of short convolutions and of Mamba-1."""

from feature_cells import WINDOWED
from parity_cells import C2, C4, FEW_WORDS, GENTLE, LONG, RECOMPUTED, RESHARD, SELECTIVE, T2, T4, UNBIASED, V2, Cell, pattern

PLAIN = {"short_convolution": {"conv_kernel": 3}}
"""A section without biases: they start at zero, so AdamW makes steps of the rounding of their gradients."""
MAMBA1 = {"mamba": {"kind": "mamba1", "state_dim": 4, "dt_rank": 6, "save_every": 5, "inner_norm": "scaled"}}
BARE_NORMS = {"mamba": {**MAMBA1["mamba"], "inner_norm": "plain", "inner_norm_eps": 1e-3}}
BARE = {"mamba": {"kind": "mamba1", "state_dim": 4, "expand": 1, "conv_bias": False, "save_every": 16}}
BLOCK_CELLS = [
    Cell("1f1b-pp2-short", {"pp": 2}, spec=pattern("CD", 4) | RECOMPUTED),
    Cell("zbv-pp2-short-experts", V2, "zbv", pattern("CE", 4)),
    Cell("tp2-short", T2, spec=pattern("C", 2)),
    Cell("tp4-short-selective", T4, spec=pattern("CD", 4, **PLAIN) | SELECTIVE),
    Cell("cp2-short", C2, spec=pattern("C", 2)),
    Cell("cp4-short-selective", C4, spec=pattern("CAD", 3) | LONG | SELECTIVE),
    Cell("cp2-tp2-dp2-short", C2 | T2 | {"dp_shard": 2}, spec=pattern("CAE", 3) | RECOMPUTED),
    Cell("cp2-zbv-short", C2 | V2, "zbv", pattern("CD", 4, **PLAIN)),
    Cell("packed-short-windows", {"dp_shard": 2}, spec=FEW_WORDS | WINDOWED | pattern("CAD", 3)),
    Cell("packed-cp2-short", C2, spec=FEW_WORDS | pattern("C", 2)),
    Cell("packed-cp4-tp2-short", C4 | T2, spec=FEW_WORDS | LONG | pattern("C", 2)),
    Cell("1f1b-pp2-mamba1", {"pp": 2}, spec=pattern("MD", 4, **MAMBA1) | SELECTIVE),
    Cell("zbv-pp2-mamba1-experts", V2, "zbv", pattern("ME", 4, **MAMBA1)),
    Cell("mamba1-dp2-reshard", {"dp_shard": 2}, spec=pattern("MA", 4, **MAMBA1) | RESHARD),
    Cell("tp2-mamba1", T2, spec=pattern("M", 2, **MAMBA1) | UNBIASED | GENTLE),
    Cell("tp2-cp2-mamba1-plain", T2 | C2, spec=pattern("MD", 4, **BARE_NORMS) | SELECTIVE | UNBIASED | GENTLE, ci=True),
    Cell("tp4-mamba1-selective", T4, spec=pattern("MD", 4, **BARE) | SELECTIVE),
    Cell("cp2-mamba1", C2, spec=pattern("M", 2, **BARE)),
    Cell("cp4-mamba1-selective", C4, spec=pattern("MAD", 3, **BARE) | LONG | SELECTIVE),
    Cell("cp2-tp2-dp2-mamba1", C2 | T2 | {"dp_shard": 2}, spec=pattern("MAD", 3, **MAMBA1) | SELECTIVE | GENTLE),
    Cell("packed-mamba1-windows", {"dp_shard": 2}, spec=FEW_WORDS | WINDOWED | pattern("MAD", 3, **MAMBA1)),
    Cell("packed-cp2-mamba1", C2, spec=FEW_WORDS | pattern("M", 2, **MAMBA1) | GENTLE),
    Cell("packed-cp4-tp2-mamba1", C4 | T2, spec=FEW_WORDS | LONG | pattern("M", 2, **BARE)),
]
