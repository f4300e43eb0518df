"""Facts of activations: with a gate (swiglu, geglu, relu2glu) two operands, without one (relu2, gelu) one."""

from megakernels.facts import FixedRatios, KernelPass, KindShare, PlainPass, PlainPasses, Work

KIND = (KindShare("activation"),)
PLAIN_GATED = PlainPasses(PlainPass(830, launches=6), PlainPass(1180, launches=13))
GATED = FixedRatios(KernelPass(kinds=KIND), KernelPass(kinds=KIND), PLAIN_GATED)
UNGATED = FixedRatios(KernelPass(kinds=KIND), KernelPass(kinds=KIND), PlainPasses(PlainPass(700, launches=4), PlainPass(770, launches=6)))
XIELU_TILE = 2048
"""Elements of a tile of xielu."""
NUM_XIELU_SUMS = 512
"""Largest number of programs that sum: it does not depend on the device, so the result does not either."""
GATE = FixedRatios(torch=PLAIN_GATED)
"""The gate of a block's output, whose kernels have no measured constants."""


def activation(width: int, itemsize: int, *, gated: bool) -> Work:
    """Elementwise: with a gate 3 activations move forward and 5 backward; without one 2 and 3.

    Source: counting operands: (gate, up → y; gate, up, dy → dgate, dup), (x → y; x, dy → dx).
    """
    forward, backward = (3, 5) if gated else (2, 3)
    return Work(moved_forward=forward * width * itemsize, moved_input=backward * width * itemsize)
