"""The cost model's formulas as text, for `megaplan explain`; each example is arithmetic that a test evaluates against the ops."""

from megaplan.blocks.formula import Formula
from megaplan.families.registry import FAMILIES

FORMULAS: dict[str, Formula] = {
    "linear": Formula(
        "a linear layer, and each of its two gradients",
        "F = I = W = 2 · in · out",
        "FLOPs per token",
        "counting multiply-adds; arXiv:2001.08361, section 2.1",
        "2 · 4096 · 14336 = 117440512",
    ),
    **{name: formula for family in FAMILIES.values() for name, formula in family.formulas.items()},
    "head": Formula(
        "logits, forward and backward; each MTP depth has one more",
        "F + I + W = 6 · h · V; 2 · h · V more, repeated forward work, with host.kernels triton",
        "FLOPs per token",
        "counting multiply-adds",
        "6 · 3584 · 65536 = 1409286144",
    ),
    "weight_bytes": Formula(
        "bytes of weights read by F and I, and of gradients read and written by W",
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
"""Formulas of every block, of each family and of the whole model."""
