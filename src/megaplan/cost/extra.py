"""A pass of an operation that runs as plain torch."""

from __future__ import annotations

from typing import NamedTuple


class Extra(NamedTuple):
    """A pass in plain torch.

    Attributes:
        num_bytes: That it moves.
        launches: Of its kernels.
        flops: Of its products.
        is_fp32: They run in fp32.
    """

    num_bytes: int
    launches: int
    flops: int
    is_fp32: bool
