"""Formulas of T blocks as text; each example is arithmetic that a test evaluates against the operations."""

from megaplan.blocks.formula import Formula

FORMULAS = {
    "toy_narrow": Formula(
        "the narrow projection of a toy block", "F = I = W = 2 · h · r", "FLOPs per token", "counting multiply-adds", "2 · 64 · 8 = 1024"
    ),
}
