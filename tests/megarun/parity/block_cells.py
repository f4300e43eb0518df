"""Cells of short convolutions."""

from feature_cells import WINDOWED
from parity_cells import C2, C4, FEW_WORDS, LONG, RECOMPUTED, SELECTIVE, T2, T4, V2, Cell, pattern

PLAIN = {"short_convolution": {"conv_kernel": 3}}
"""Without biases: they start at zero, so AdamW makes steps of the rounding of their gradients."""
BLOCK_CELLS = [
    Cell("1f1b-pp2-short", {"pp": 2}, spec=pattern("CD", 4) | RECOMPUTED),
    Cell("zbv-pp2-short-experts", V2, "zbv", pattern("CE", 4)),
    Cell("tp2-short", T2, spec=pattern("C", 2), ci=True),
    Cell("tp4-short-selective", T4, spec=pattern("CD", 4, **PLAIN) | SELECTIVE),
    Cell("cp2-short", C2, spec=pattern("C", 2), ci=True),
    Cell("cp4-short-selective", C4, spec=pattern("CAD", 3) | LONG | SELECTIVE),
    Cell("cp2-tp2-dp2-short", C2 | T2 | {"dp_shard": 2}, spec=pattern("CAE", 3) | RECOMPUTED),
    Cell("cp2-zbv-short", C2 | V2, "zbv", pattern("CD", 4, **PLAIN)),
    Cell("packed-short-windows", {"dp_shard": 2}, spec=FEW_WORDS | WINDOWED | pattern("CAD", 3)),
    Cell("packed-cp2-short", C2, spec=FEW_WORDS | pattern("C", 2)),
    Cell("packed-cp4-tp2-short", C4 | T2, spec=FEW_WORDS | LONG | pattern("C", 2)),
]
