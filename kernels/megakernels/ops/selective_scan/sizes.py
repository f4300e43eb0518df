"""Bytes and cost of the selective scan's kernels for given tensors: the facts of their sizes, and copies of operands; needs no triton."""

from torch import Tensor

from megakernels._common.cost import Cost
from megakernels._common.scratch import copies_bytes
from megakernels.facts import KernelBytes
from megakernels.ops.selective_scan.facts import SelectiveSizes
from megakernels.ops.selective_scan.inputs import GRADIENTS, SelectiveScanInputs


def sizes_of(given: SelectiveScanInputs) -> SelectiveSizes:
    """The sizes of these arguments."""
    batch, positions, channels = given.x.shape
    return SelectiveSizes(batch, positions, channels, given.A_log.shape[1], given.save_every, given.x.element_size())


def accepts(given: SelectiveScanInputs) -> bool:
    """True if the kernels take this width of a state."""
    return sizes_of(given).accepted


def forward_bytes(state: Tensor | None, given: SelectiveScanInputs) -> KernelBytes:
    """Bytes of `kernel.forward` with the same operands."""
    return sizes_of(given).forward_bytes((_copies(given, (state,)) if given.x.numel() else 0) + _row_copies(given))


def backward_bytes(grad_last: Tensor | None, grad_y: Tensor, given: SelectiveScanInputs, states: Tensor) -> KernelBytes:
    """Bytes of `kernel.backward` with the same operands."""
    found = sizes_of(given).backward_bytes(0, _copies(given, (states, grad_last)) if given.x.numel() else 0)
    results = sum(getattr(given, name).nbytes for name in GRADIENTS)
    return found._replace(results=results, scratch=found.scratch + _row_copies(given, grad_y))


def forward_cost(_state: Tensor | None, given: SelectiveScanInputs) -> Cost:
    """Cost of `kernel.forward`: no products; position by position."""
    return Cost({}, steps=given.x.shape[1])


def backward_cost(_grad_last: Tensor | None, _grad_y: Tensor, given: SelectiveScanInputs, _states: Tensor) -> Cost:
    """Cost of `kernel.backward`: x, Δ and a segment's states are read twice, and the states written for each segment."""
    sizes = sizes_of(given)
    recomputed = 2 * given.x.nbytes + max(0, 2 * sizes.segments - 1) * sizes.repeated_bytes()
    return Cost({}, steps=2 * sizes.positions, repeated_bytes=recomputed)


def _copies(given: SelectiveScanInputs, others: tuple[Tensor | None, ...]) -> int:
    """Bytes of dense copies of parameters, starts and others that are not contiguous."""
    dense = (given.A_log, given.D, given.dt_bias, given.starts, *others)
    return copies_bytes(each for each in dense if each is not None)


def _row_copies(given: SelectiveScanInputs, *others: Tensor) -> int:
    return copies_bytes(rows=(given.x, given.dt, given.B, given.C, *others))
