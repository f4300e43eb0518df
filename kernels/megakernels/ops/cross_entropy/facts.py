"""Facts of the loss over logits, and of head and loss as one operation."""

from typing import NamedTuple

from megakernels.facts import (
    MEMORY,
    PRODUCT,
    SUM,
    SUMS_BYTES,
    FixedRatios,
    KernelPass,
    KindShare,
    KindWork,
    Pass,
    Passes,
    PlainPass,
    PlainPasses,
    Work,
)
from megakernels.ops.linear_cross_entropy.facts import num_slices

LAUNCHES = 18, 12
PLAIN = PlainPasses(PlainPass(500, launches=94), PlainPass(900, launches=117))
RECOMPUTED_LOGITS = FixedRatios(KernelPass(kinds=(KindShare(MEMORY),)), KernelPass(kinds=(KindShare(PRODUCT),)))
"""The logits that the backward of head and loss makes again."""
PLAIN_LOGITS = 1 << 22
"""Maximum number of logits in fp32 at a time."""
LOSS_STEP_COLUMNS = 4096
"""Columns that a row's program reads per step."""
LOSS_TILE_COLUMNS = 2048
"""Columns of a tile of the gradient."""


class Loss(NamedTuple):
    """Sizes of a call.

    Attributes:
        vocab: Columns of the full vocabulary.
        hidden: Width of the rows that the head multiplies.
        rows: Rows of this rank.
        joined: True if head and loss are one operation.
    """

    vocab: int
    hidden: int
    rows: int
    joined: bool

    def kernels(self, work: Work, tokens: int) -> Passes:
        """Rows of the logits; the backward of head and loss in one operation also sums the gradient over slices of the vocabulary."""
        moved, back = work.moved_forward * tokens, work.moved_input * tokens
        kinds = [KindWork("loss.backward", back, 0, LAUNCHES[1])]
        if self.joined:
            slices = num_slices(self.rows, self.vocab)
            kinds.append(KindWork(SUM, slices * 3 * SUMS_BYTES * self.rows * self.hidden, 0, slices))
        forward = Pass(moved, 0, LAUNCHES[0], (KindWork("loss.forward", moved, 0, LAUNCHES[0]),))
        return forward, Pass(back, 0, LAUNCHES[1], tuple(kinds))

    def plain(self, work: Work, tokens: int) -> Passes:
        """Both passes by plain torch: every intermediate goes through memory."""
        return PLAIN.passes(work, tokens)


def cross_entropy(vocab: int, itemsize: int) -> Work:
    """Forward reads the logits; backward reads them again and writes their gradient over them.

    Source: counting operands.
    """
    return Work(moved_forward=vocab * itemsize + SUMS_BYTES, moved_input=2 * vocab * itemsize + SUMS_BYTES)
