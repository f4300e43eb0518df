"""Facts of RMSNorm: alone, with the residual addition before it, and gated."""

from __future__ import annotations

from megakernels.facts import ADD, SUMS_BYTES, Multiple, Multiples, Plain, PlainPass, Share, Work

FORWARD, BACKWARD = "norm.forward", "norm.backward"
ALONE, ALONE_BACK = (Share(FORWARD),), (Share(BACKWARD, launches=3),)
PLAIN = Plain(PlainPass(1000, launches=9), PlainPass(1570, launches=14))
PLAIN_RESIDUAL = Plain(PlainPass(590, launches=10), PlainPass(1250, launches=15))
NORM = Multiples(Multiple(kinds=ALONE), Multiple(118, 3, kinds=ALONE_BACK), PLAIN)
"""A norm by itself."""
RESIDUAL_NORM = Multiples(
    Multiple(125, 2, kinds=(Share(FORWARD, 40), Share(ADD, 60))),
    Multiple(163, 4, kinds=(Share(BACKWARD, 54, launches=3), Share(ADD, 46))),
    PLAIN_RESIDUAL,
)
"""The norm, and the addition to the stream by an operation of its own."""
FINAL_NORM = Multiples(Multiple(50, kinds=ALONE), Multiple(88, 3, kinds=ALONE_BACK), PLAIN_RESIDUAL)
"""The norm before the head, whose addition the last layer has."""
TWO_NORMS = Multiples(Multiple(100, 2, kinds=ALONE), Multiple(101, 6, kinds=ALONE_BACK), PLAIN)
"""Two norms of small heads: Mamba-3's of B and C."""
GATED_NORM = Multiples(
    Multiple(kinds=ALONE),
    Multiple(102, 3, kinds=(Share("gated_norm.backward", launches=3),)),
    Plain(PlainPass(1300, launches=13), PlainPass(2060, launches=25)),
)


def norm(width: int, itemsize: int) -> Work:
    """RMSNorm: forward reads x and writes y; backward reads x and dy and writes dx; one fp32 statistic is written and read.

    Source: counting operands, arXiv:1910.07467, equation 4.
    """
    return Work(moved_forward=2 * width * itemsize + SUMS_BYTES, moved_input=3 * width * itemsize + SUMS_BYTES)


def residual_norm(width: int, itemsize: int) -> Work:
    """Residual addition fused with the next RMSNorm: four activations forward, four backward, one fp32 statistic.

    Source: counting operands: x, f(x), sum, normed; then their gradients and the sum.
    """
    moved = 4 * width * itemsize + SUMS_BYTES
    return Work(moved_forward=moved, moved_input=moved)


def gated_norm(width: int, num_groups: int, itemsize: int) -> Work:
    """RMSNorm of x · silu(gate): three activations forward, five backward, one fp32 statistic a group.

    Source: counting operands, arXiv:2405.21060, section 7.1.
    """
    statistics = SUMS_BYTES * num_groups
    return Work(moved_forward=3 * width * itemsize + statistics, moved_input=5 * width * itemsize + statistics)
