"""Formulas of C blocks as text; each example is arithmetic that a test evaluates against the operations."""

from megaplan.blocks.formula import Formula

FORMULAS = {
    "gated_conv1d": Formula(
        "a depthwise convolution between two gates; backward repeats it",
        "F = W = 2 · C · K, I = 4 · C · K",
        "FLOPs per token",
        "counting multiply-adds",
        "2 · 2048 · 3 = 12288",
    ),
}
