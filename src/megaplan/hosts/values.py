"""Data types of a host: its saved-activation ledger, the blocks of a rank that an explanation lists, and its limits."""

from collections.abc import Callable, Hashable, Iterator
from math import prod
from typing import NamedTuple

from megaplan.columns import Basis, Column
from megaplan.dtypes import DType
from megaplan.errors import Diagnostic
from megaplan.inventory.tensors import Block
from megaplan.spec.context import Checked
from megaplan.spec.models import Spec

BlockVariant = tuple[int, Hashable, str]
"""Everything that decides a block's ledger and that differs between the blocks of a spec; blocks with equal variants have equal ledgers."""


class LedgerTensor(NamedTuple):
    """One storage of one microbatch on one rank; a storage that several ops keep is listed once, under the op that makes it.

    Attributes:
        name: Name relative to its block: `attention.lse`. The gradient of `q` is `d.q`.
        shape: Shape on the rank, after TP, SP and CP.
        dtype: Element type.
        column: Budget column.
        why: Operation that makes or keeps it, for `--explain`.
        basis: Exact unless it depends on routing.
        keepers: Names of the operations of the block's program that keep it for backward; empty for a temporary tensor.
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
    """Kept and temporary tensors of one block per microbatch.

    The block's input is never listed: it is the output of the block before, or a receive buffer.

    Attributes:
        saved: Tensors kept from forward to backward.
        output: The block's output in the residual stream; the next block that saves it keeps it.
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
        heads: Headings of the rows of kept tensors.
        kept: Tensors that each block or operator keeps per microbatch in flight: title, bytes, and a row per tensor, largest first.
    """

    held: list[tuple[str, Block]]
    heads: tuple[str, ...]
    kept: list[tuple[str, int, list[tuple[str, ...]]]]


class Limit(NamedTuple):
    """A setting of a spec that a host cannot run.

    Attributes:
        key: Dotted key of the spec.
        detail: The values, and the reason.
        fix: A change that removes the limit, or empty.
        tensors: True if it would need other tensors; false if only computation or order would differ.
    """

    key: str
    detail: str
    fix: str = ""
    tensors: bool = True

    @property
    def fixes(self) -> tuple[str, ...]:
        """The fix, if there is one."""
        return (self.fix,) if self.fix else ()


def refused(checked: Checked, limits: Callable[[Spec, str], Iterator[Limit]]) -> Iterator[Diagnostic]:
    """MP902 for each of a host's limits that would need other tensors; `limits` takes a spec and one letter per layer."""
    if checked.pattern is not None:
        for limit in limits(checked.spec, checked.pattern.layers):
            if limit.tensors:
                yield checked.error("MP902", limit.detail, limit.key, *limit.fixes)


class HostBytes(NamedTuple):
    """Bytes of a rank in host memory: page-locked, and pageable."""

    pinned: int
    pageable: int

    @property
    def total(self) -> int:
        """Both."""
        return self.pinned + self.pageable
