"""Bytes and cost of the scan's kernels for given tensors: the facts of their sizes, and copies of operands; needs no triton."""

from torch import Tensor

from megakernels._common.cost import Cost
from megakernels._common.scratch import copies_bytes
from megakernels.facts import SUMS_BYTES, KernelBytes
from megakernels.ops.ssd.facts import Ssd
from megakernels.ops.ssd.inputs import ACCUMULATED, SsdInputs


def sizes_of(scan: SsdInputs) -> Ssd:
    """The sizes of these arguments."""
    (batch, positions, heads, width), (groups, state) = scan.x.shape, scan.B.shape[2:]
    return Ssd(batch, positions, heads, groups, width, state, scan.chunk_size, scan.x.element_size())


def accepts(scan: SsdInputs) -> bool:
    """True if the kernels support these sizes and dtypes; products need one dtype."""
    return scan.x.dtype == scan.B.dtype == scan.C.dtype and sizes_of(scan).accepted


def forward_bytes(state: Tensor | None, scan: SsdInputs) -> KernelBytes:
    """Bytes of `kernel.forward` with the same operands."""
    own = sizes_of(scan).forward_bytes()
    dense = [each for each in (scan.A_log, scan.D, scan.dt_bias, scan.starts, state if own.last else None) if each is not None]
    return own._replace(scratch=own.scratch + copies_bytes(dense, rows=(scan.x, scan.B, scan.C)))


def backward_bytes(grad_state: Tensor | None, grad_y: Tensor, scan: SsdInputs, states: Tensor) -> KernelBytes:
    """Bytes of `kernel.backward` with the same operands."""
    x = scan.x
    walked = copies_bytes(() if grad_state is None else (grad_state,))
    found = sizes_of(scan).backward_bytes(sum(getattr(scan, name).nbytes for name in ACCUMULATED), walked)
    dense = [each for each in (scan.A_log, scan.D, scan.dt_bias, states, scan.starts) if each is not None]
    own = grad_y.numel() * x.element_size() if grad_y.dtype != x.dtype else copies_bytes(rows=(grad_y,))
    results = found.results + scan.dt.nbytes - scan.dt.numel() * x.element_size()  # dt may have another dtype
    return found._replace(results=results, scratch=found.scratch + own + copies_bytes(dense, rows=(x, scan.B, scan.C)))


def forward_cost(_state: Tensor | None, scan: SsdInputs) -> Cost:
    """Cost of `kernel.forward`."""
    return Cost({scan.x.dtype: sizes_of(scan).flops()[0]})


def backward_cost(_grad_last: Tensor | None, grad_y: Tensor, scan: SsdInputs, states: Tensor) -> Cost:
    """Cost of `kernel.backward`; launches over a part of the chunks receive the full inputs."""
    sizes = sizes_of(scan)
    extents = sizes.extents()
    launches = -(-extents.chunks // max(1, extents.at_once))
    rows = 5 * scan.x.nbytes + 4 * grad_y.nbytes + 5 * scan.B.nbytes + 5 * scan.C.nbytes + 2 * states.nbytes
    per_step = SUMS_BYTES * scan.dt.numel() * (6 * extents.tables + 4 * extents.blocks)
    return Cost({scan.x.dtype: sizes.flops()[1]}, untouched_bytes=max(0, launches - 1) * (rows + per_step))
