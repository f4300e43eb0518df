"""Facts of operations that torch and its libraries run: linears, lookups and elementwise products."""

from megakernels.facts import Work


def linear(in_width: int, out_width: int, itemsize: int) -> Work:
    """A linear y = x Wᵀ: 2·in·out FLOPs each for y, dx = dy W and dW = dyᵀ x.

    Bytes: each of the three reads or writes one activation of either width.

    Source: counting multiply-adds; the 6·N rule of arXiv:2001.08361, section 2.1.
    """
    flops, moved = 2 * in_width * out_width, (in_width + out_width) * itemsize
    return Work(flops, flops, flops, moved_forward=moved, moved_input=moved, moved_weight=moved)


def scaled(width: int, itemsize: int) -> Work:
    """A product with constant factors: read and write, forward and backward."""
    return Work(moved_forward=2 * width * itemsize, moved_input=2 * width * itemsize)


def gather(width: int, itemsize: int, grad_bytes: int) -> Work:
    """Rows of a table: one row read and written forward; backward reads its gradient and adds it into the table's gradient.

    Source: counting operands; a lookup has no FLOPs.
    """
    return Work(moved_forward=2 * width * itemsize, moved_input=width * (itemsize + 2 * grad_bytes))
