"""Formulas of E blocks as text; each example is arithmetic that a test evaluates against the operations."""

from megaplan.blocks.formula import Formula

FORMULAS = {
    "experts": Formula(
        "the experts that a token chooses, without the router and the shared expert",
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
}
