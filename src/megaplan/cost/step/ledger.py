"""The work of one block on one rank for one microbatch, by kernel class: the inputs of the formulas."""

from dataclasses import dataclass, field
from typing import NamedTuple

FORWARD, BACKWARD = 0, 1


class Product(NamedTuple):
    """A matrix product M·N·K.

    Attributes:
        run: FORWARD or BACKWARD.
        dtype: Dtype of the operands.
        flops: 2·M·N·K.
        moved: Bytes of operands and result.
        quality: Share of full tiles and full waves, see `gemm.quality`.
        depth: K.
        times: Number of such products; fractional if only a share of them runs.
    """

    run: int
    dtype: str
    flops: float
    moved: float
    quality: float
    depth: float
    times: float


class GroupedProduct(NamedTuple):
    """Products of all local experts in one launch.

    Attributes:
        weight_bytes: Bytes of the experts' weights, or of their gradients.
        row_bytes: Bytes of rows read and written.
        rows: Rows of one expert.
    """

    run: int
    dtype: str
    flops: float
    weight_bytes: float
    row_bytes: float
    rows: float
    depth: float
    times: float


class AttentionCore(NamedTuple):
    """A fused attention kernel.

    Attributes:
        backward: 1 for the backward kernel, 0 for the forward kernel, which backward may run again.
        blocks: Query blocks of 128 rows times heads.
        width: Share of the rate at these head widths.
        num_sms: Multiprocessors of the device.
    """

    run: int
    backward: int
    flops: float
    blocks: float
    width: float
    num_sms: int
    times: float


class Drawn(NamedTuple):
    """Random numbers of a fused attention kernel's dropout, and random numbers per second of a multiprocessor."""

    run: int
    numbers: float
    rate: float


class Moved(NamedTuple):
    """Bytes of memory-bound kernels of a kind: plain, accumulate, scores, copied, scanned, permute, or a cast to a dtype."""

    run: int
    kind: str
    moved: float


class Scan(NamedTuple):
    """A chunked scan of a state-space model."""

    run: int
    flops: float
    moved: float


class Transfer(NamedTuple):
    """Collectives of a group: tensor, exchange, context or pipeline.

    Attributes:
        moved: Bytes that a rank sends.
        calls: Number of collectives.
    """

    run: int
    group: str
    moved: float
    calls: float


@dataclass(slots=True)
class Ledger:
    """Work of one block, or of one end of the model."""

    products: list[Product] = field(default_factory=list)
    grouped: list[GroupedProduct] = field(default_factory=list)
    attention: list[AttentionCore] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    scans: list[Scan] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    kernels: list[float] = field(default_factory=lambda: [0.0, 0.0])
    launched: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def move(self, run: int, moved: float, kind: str = "plain") -> None:
        """Add memory-bound bytes."""
        if moved > 0:
            self.moved.append(Moved(run, kind, moved))

    def transfer(self, run: int, group: str, moved: float, calls: float) -> None:
        """Add collectives."""
        if moved > 0:
            self.transfers.append(Transfer(run, group, moved, calls))

    def launch(self, forward: float, backward: float, *, graphed: bool) -> None:
        """Add kernels; kernels in a CUDA graph do not count as host launches."""
        for run, count in enumerate((forward, backward)):
            self.kernels[run] += count
            if not graphed:
                self.launched[run] += count
