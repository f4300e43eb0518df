"""Facts of hyper-connections: sizes of saved tensors, and scratch."""

from typing import NamedTuple

FP32_BYTES = 4


class Connection(NamedTuple):
    """The constants by which the numbers of a token become weights of its streams.

    Attributes:
        num_streams: n.
        norm_eps: Added to the mean square of all streams.
        eps: Added to weights, and to the sums by which the matrix is divided.
        post_scale: Factor of the weights by which streams get a block's output.
        steps: Sinkhorn-Knopp steps of the matrix between streams, each over its columns and its rows.
    """

    num_streams: int
    norm_eps: float
    eps: float
    post_scale: float
    steps: int

    def scratch_bytes(self, rows: int, hidden: int, itemsize: int, numbers: int, *, backward: bool) -> int:
        """Bytes in addition to operands and results while streams are collapsed: a sum in fp32, weights, and divisors of the matrix."""
        square = numbers - 2 * self.num_streams if numbers > 2 * self.num_streams else 0
        if not backward:
            return rows * FP32_BYTES * ((hidden if itemsize < FP32_BYTES else 0) + numbers + square)
        divisors = (2 * self.steps - 1) * self.num_streams if square else 0
        return rows * FP32_BYTES * (hidden + 4 * numbers + 2 * square + divisors)


def expand_scratch_bytes(rows: int, hidden: int, itemsize: int) -> int:
    """Bytes in addition to operands and results while streams are expanded, or backward: a sum in fp32."""
    return rows * hidden * (FP32_BYTES if itemsize < FP32_BYTES else 0)
