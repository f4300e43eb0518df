"""Facts of RMSNorm: alone, with the residual addition before it, and gated."""

from megakernels.facts import ADD, SUMS_BYTES, FixedRatios, KernelPass, KindShare, PlainPass, PlainPasses, Work

FORWARD, BACKWARD = "norm.forward", "norm.backward"
ALONE, ALONE_BACK = (KindShare(FORWARD),), (KindShare(BACKWARD, launches=3),)
PLAIN = PlainPasses(PlainPass(1000, launches=9), PlainPass(1570, launches=14))
PLAIN_RESIDUAL = PlainPasses(PlainPass(590, launches=10), PlainPass(1250, launches=15))
NORM = FixedRatios(KernelPass(kinds=ALONE), KernelPass(118, 3, kinds=ALONE_BACK), PLAIN)
"""A norm by itself."""
RESIDUAL_NORM = FixedRatios(
    KernelPass(125, 2, kinds=(KindShare(FORWARD, 40), KindShare(ADD, 60))),
    KernelPass(163, 4, kinds=(KindShare(BACKWARD, 54, launches=3), KindShare(ADD, 46))),
    PLAIN_RESIDUAL,
)
"""The norm, and the addition to the stream by its own operation."""
FINAL_NORM = FixedRatios(KernelPass(50, kinds=ALONE), KernelPass(88, 3, kinds=ALONE_BACK), PLAIN_RESIDUAL)
"""The norm before the head, whose addition the last layer has."""
TWO_NORMS = FixedRatios(KernelPass(100, 2, kinds=ALONE), KernelPass(101, 6, kinds=ALONE_BACK), PLAIN)
"""Two norms of small heads: Mamba-3's of B and C."""
GATED_NORM = FixedRatios(
    KernelPass(kinds=ALONE),
    KernelPass(102, 3, kinds=(KindShare("gated_norm.backward", launches=3),)),
    PlainPasses(PlainPass(1300, launches=13), PlainPass(2060, launches=25)),
)

NORM_LARGEST_WIDTH = 8192
"""Maximum group width of a tile; the backward of a wider one runs out of registers on sm_90, so wider groups use the reference."""
LARGEST_GATED_FP32_WIDTH = 4096
"""Maximum group width in fp32 of the gated and the fused norm, which need one more tile."""
LARGEST_NESTED = 2**31 - 1
"""Largest number of rows in runs: their numbers are divided in 32 bits. More rows are copied if they are not evenly spaced."""


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
