"""The values of a host's saved-activation ledger."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from megaplan.columns import Basis, Column
from megaplan.dtypes import DType


@dataclass(frozen=True, slots=True)
class LedgerTensor:
    """One tensor of one microbatch on one rank, by storage: a storage that several ops keep is listed once, where it is made.

    Attributes:
        name: Relative to its block: `attention.lse`.
        shape: Local to the rank, after TP, SP and CP.
        dtype: Element type.
        column: Budget column.
        why: Which op keeps it, for `--explain`.
        basis: Exact unless it depends on routing.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    column: Column
    why: str
    basis: Basis = Basis.EXACT

    @property
    def bytes(self) -> int:
        """Bytes of the storage."""
        return prod(self.shape) * self.dtype.bytes


@dataclass(frozen=True, slots=True)
class BlockLedger:
    """What one block keeps, and needs for a moment, per microbatch.

    Attributes:
        saved: Kept from forward to backward. The block's input is not listed: it is the output of the block before (or a receive buffer).
        output: The residual stream it hands on, kept by whoever saves it next.
        forward_working: Live on top of `saved` at the block's forward peak.
        backward_working: Live on top of `saved` at the block's backward peak (gradients of intermediates).
    """

    saved: tuple[LedgerTensor, ...]
    output: LedgerTensor
    forward_working: tuple[LedgerTensor, ...] = ()
    backward_working: tuple[LedgerTensor, ...] = ()


def bytes_by_column(tensors: Iterable[LedgerTensor]) -> dict[Column, int]:
    """Sum of bytes per column."""
    total: dict[Column, int] = {}
    for tensor in tensors:
        total[tensor.column] = total.get(tensor.column, 0) + tensor.bytes
    return total
