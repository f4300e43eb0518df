"""Counted work of operations and kernels: HBM bytes, FLOPs, launches, host synchronisations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel launch, or one synchronisation of the host.

    Attributes:
        op: Name of the aten operation or Triton kernel.
        num_bytes: HBM bytes: each operand read once, each result written once.
        products: FLOPs of matrix products by short dtype name, a multiply-add as two.
        other_flops: Other arithmetic, counted as one per element of the largest operand or result.
        launches: Number of kernel launches.
        syncs: Number of host synchronisations.
        triton: True if it is a Triton kernel.
        library: True if it is a fused kernel of a library, such as cuDNN attention.
    """

    op: str
    num_bytes: int = 0
    products: Mapping[str, int] = field(default_factory=dict)
    other_flops: int = 0
    launches: int = 1
    syncs: int = 0
    triton: bool = False
    library: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One operation of the step with its kernels, in order.

    Attributes:
        op: Name in `torch.ops`, without the overload.
        kernels: Kernels of the operation.
        products: FLOPs of the matrix products inside its Triton kernels, by dtype; those of aten operations are in `kernels`.
        steps: Number of sequential steps of a recurrence.
        repeated_bytes: Bytes in addition to one pass over each operand of each kernel.
        ideal_bytes: Bytes of its operands and results, once each, which one fused kernel would move; for an aten operation `num_bytes`.
    """

    op: str
    kernels: tuple[Kernel, ...]
    products: Mapping[str, int] = field(default_factory=dict)
    steps: int = 0
    repeated_bytes: int = 0
    ideal_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """HBM bytes."""
        return self.repeated_bytes + sum(kernel.num_bytes for kernel in self.kernels)

    @property
    def launches(self) -> int:
        """Number of kernel launches."""
        return sum(kernel.launches for kernel in self.kernels)

    @property
    def syncs(self) -> int:
        """Number of host synchronisations."""
        return sum(kernel.syncs for kernel in self.kernels)

    @property
    def product_flops(self) -> dict[str, int]:
        """FLOPs of all matrix products, by dtype."""
        found = dict(self.products)
        for kernel in self.kernels:
            for dtype, flops in kernel.products.items():
                found[dtype] = found.get(dtype, 0) + flops
        return found

    @property
    def flops(self) -> int:
        """All FLOPs."""
        return sum(self.product_flops.values()) + sum(kernel.other_flops for kernel in self.kernels)

    @property
    def inside(self) -> str:
        """Implementation: `triton`, `library`, `torch` for plain torch, or "" without kernels."""
        if any(kernel.triton for kernel in self.kernels):
            return "triton"
        if any(kernel.library for kernel in self.kernels):
            return "library"
        return "torch" if self.kernels else ""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective or message.

    Attributes:
        op: Name in `torch.ops`.
        kind: gather (all-gather and reduce-scatter), reduce (all-reduce), exchange (all-to-all) or send.
        payload_bytes: Bytes of the gathered or reduced tensor; for an exchange or send the bytes that the rank sends.
        size: Ranks of the group.
        stride: Distance of neighbouring ranks of the group.
        overlapped: True if it runs on its own stream, overlapped with computation.
    """

    op: str
    kind: str
    payload_bytes: int
    size: int
    stride: int
    overlapped: bool


class Action(NamedTuple):
    """Forward (F), backward (B), or input and weight half (I, W) of a split backward, of one microbatch on one slot."""

    slot: int
    letter: str
    microbatch: int


@dataclass(frozen=True, slots=True)
class Event:
    """An executed operation with its place in the step.

    Attributes:
        action: Computation of a microbatch that it belongs to, or None.
        phase: `microbatches`, or `step` after the last backward.
        family: Part of the model: a block letter, `embedding`, `head`, `mtp`, `optimizer` or `stage`.
        done: The counted operation.
    """

    action: tuple[int, str] | None
    phase: str
    family: str
    done: Work | Transfer
