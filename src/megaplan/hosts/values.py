"""The values of a host: its saved-activation ledger, the blocks of a rank that an explanation lists, and what it cannot run."""

from __future__ import annotations

from collections.abc import Hashable
from math import prod
from typing import NamedTuple

from megaplan.columns import Basis, Column
from megaplan.dtypes import DType
from megaplan.inventory.tensors import Block

BlockVariant = tuple[int, Hashable, str]
"""Everything that decides a block's ledger and that differs between the blocks of a spec; blocks with equal variants have equal ledgers."""


class LedgerTensor(NamedTuple):
    """One tensor of one microbatch on one rank, by storage: a storage that several ops keep is listed once, where it is made.

    Attributes:
        name: Relative to its block: `attention.lse`. The gradient of `q` is `d.q`.
        shape: Local to the rank, after TP, SP and CP.
        dtype: Element type.
        column: Budget column.
        why: Which op makes or keeps it, for `--explain`.
        basis: Exact unless it depends on routing.
        keepers: Operations that keep it for backward, by their names in the block's program; empty for what is alive for a moment.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    column: Column
    why: str
    basis: Basis = Basis.EXACT
    keepers: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of the storage."""
        return prod(self.shape) * self.dtype.bytes


class BlockLedger(NamedTuple):
    """The tensors that one block keeps, and needs temporarily, per microbatch.

    The block's input is never listed: it is the output of the block before, or a receive buffer.

    Attributes:
        saved: Kept from forward to backward.
        output: The residual stream it hands on, kept by whoever saves it next.
        forward_live: Every storage of the block alive at its forward peak, `output` included once it exists.
        backward_live: Every storage, gradient and parameter gradient of the block alive at its backward peak.
    """

    saved: tuple[LedgerTensor, ...]
    output: LedgerTensor
    forward_live: tuple[LedgerTensor, ...] = ()
    backward_live: tuple[LedgerTensor, ...] = ()


class Explained(NamedTuple):
    """The blocks of a pipeline rank, for `estimate --explain`.

    Attributes:
        held: Title of each distinct block, in execution order, and the block.
        heads: Headings of the rows of what is kept.
        kept: Of each block or operator what it keeps per microbatch in flight: title, bytes, and a row of each tensor, largest first.
    """

    held: list[tuple[str, Block]]
    heads: tuple[str, ...]
    kept: list[tuple[str, int, list[tuple[str, ...]]]]


class Limit(NamedTuple):
    """One thing that a host cannot take from a spec.

    Attributes:
        key: Dotted key of the spec.
        detail: The values, and why.
        fix: A change after which it can, or empty.
        tensors: True if other tensors would be made; else only what is computed, or when, differs.
    """

    key: str
    detail: str
    fix: str = ""
    tensors: bool = True

    @property
    def fixes(self) -> tuple[str, ...]:
        """The fix, where there is one."""
        return (self.fix,) if self.fix else ()
