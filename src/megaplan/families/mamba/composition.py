"""Work of the operations of M blocks: Mamba-1's selective scan, Mamba-2's chunked state-space duality and Mamba-3's multi-input form of it.

Source: arXiv:2312.00752, section 3 (Mamba-1); arXiv:2405.21060, section 7.1 (Mamba-2); arXiv:2603.15569, section 3 (Mamba-3).
"""

from __future__ import annotations

from megakernels.facts import KernelScratch
from megakernels.ops.causal_conv1d.facts import CONVOLUTION, causal_conv1d
from megakernels.ops.library import scaled
from megakernels.ops.mamba3.facts import TrapezoidalScan
from megakernels.ops.rms_norm.facts import GATED_NORM, TWO_NORMS, gated_norm, norm
from megakernels.ops.selective_scan.facts import SelectiveSizes
from megakernels.ops.ssd.facts import Ssd
from megaplan.blocks.costs import gate_work, linear_work, residual_work
from megaplan.blocks.ops import Dims
from megaplan.blocks.storages import lane_of
from megaplan.blocks.work import OpWork, Workload, Works
from megaplan.dtypes import DType
from megaplan.families.mamba.section import Mamba1, Mamba2, Mamba3, num_mamba_heads

PART = "M"


def selective_sizes(mamba: Mamba1, batch: int, positions: int, channels: int, itemsize: int) -> SelectiveSizes:
    """Sizes of Mamba-1's scan over these channels."""
    return SelectiveSizes(batch, positions, channels, mamba.state_dim, mamba.save_every, itemsize)


def scan_sizes(mamba: Mamba2 | Mamba3, batch: int, positions: int, heads: int, groups: int, itemsize: int) -> Ssd | TrapezoidalScan:
    """Sizes of the scan of Mamba-2 or Mamba-3 over these heads."""
    width, state = mamba.head_dim, mamba.state_dim
    if isinstance(mamba, Mamba2):
        return Ssd(batch, positions, heads, groups, width, state, mamba.chunk_size, itemsize)
    settings = mamba.num_angles, mamba.chunk_positions, mamba.save_every, itemsize
    return TrapezoidalScan(batch, positions, heads, groups, mamba.mimo_rank, width, state, *settings)


def selective_inside(dims: Dims, mamba: Mamba1, channels: int, parameters: DType) -> KernelScratch | None:
    """Kernel scratch of Mamba-1's scan over these channels of this rank; arguments and result as for the other scans."""
    run = lane_of(dims, channels, channels)
    sizes = selective_sizes(mamba, dims.batch, run.positions, run.heads, dims.dtype.bytes)
    if not sizes.accepted:
        return None
    state_bytes = sizes.forward_bytes().last
    copied = 0 if dims.cp == 1 else run.copied_states(dims, sizes.segments, sizes.segments * state_bytes) + run.copied_starts
    backward = sizes.backward_bytes(parameters.bytes * run.heads * (mamba.state_dim + 2), copied)
    return run.inside(dims, sizes.forward_bytes(run.copied_starts), backward, 0, 0, with_starts=False)


def scan_inside(dims: Dims, mamba: Mamba2 | Mamba3, heads: int, groups: int, parameters: DType) -> KernelScratch | None:
    """Kernel scratch of the scan of Mamba-2 or Mamba-3, in bytes.

    Args:
        dims: Local sizes.
        mamba: The model's section.
        heads: Heads of this rank.
        groups: Groups of heads of this rank.
        parameters: Dtype of the parameters' gradients.

    Returns:
        None where the kernels do not take these sizes.
    """
    run = lane_of(dims, heads, groups)
    sizes = scan_sizes(mamba, dims.batch, run.positions, run.heads, run.groups, dims.dtype.bytes)
    if not sizes.accepted:
        return None
    if isinstance(sizes, TrapezoidalScan):
        per_head = (sizes.shares + 1) * parameters.bytes * run.heads
        if dims.cp == 1:
            return run.inside(dims, sizes.forward_bytes(), sizes.backward_bytes(per_head), 0, 0)
        return _trapezoidal_pieces(dims, sizes, run.copied_states(dims, sizes.segments, _saved_bytes(sizes)), run.copied_starts, per_head)
    backward = sizes.backward_bytes(3 * parameters.bytes * run.heads)
    return run.inside(
        dims, sizes.forward_bytes(), backward, sizes.states[1], dims.dtype.bytes * dims.batch * run.heads * sizes.width * sizes.state
    )


def _saved_bytes(sizes: TrapezoidalScan) -> int:
    """Bytes of the saved states and phases of a piece."""
    of_state = sizes.width * sizes.state * sizes.itemsize + sizes.angles * DType.FP32.bytes
    return sizes.batch * sizes.segments * sizes.heads * of_state


def _trapezoidal_pieces(dims: Dims, sizes: TrapezoidalScan, copied_states: int, copied_starts: int, parameter_bytes: int) -> KernelScratch:
    """Mamba-3's scan of a piece: state and phase are parts of the result passed on; views of it are copied."""
    of_last = DType.FP32.bytes * dims.batch * sizes.heads * sizes.angles
    whole = sizes.forward_bytes()
    viewed = sizes.angles > 0 and dims.batch * sizes.heads > 1
    carried, phase = (whole.last, of_last) if viewed else (0, 0)
    given = copied_starts + (DType.FP32.bytes * dims.batch * sizes.heads if dims.batch > 1 else 0)
    backward = sizes.backward_bytes(parameter_bytes, carried - phase, phase + of_last)
    return KernelScratch(
        whole.results + max(given + carried + whole.scratch, whole.last), backward.results + backward.scratch + given + copied_states
    )


def mamba_work(load: Workload, mamba: Mamba1 | Mamba2 | Mamba3, hidden_size: int, _variant: None = None) -> Works:
    """One M block, pre-norm and residual included; `tp` shards its heads and groups, or channels, not Mamba-3's angles."""
    if isinstance(mamba, Mamba1):
        channels = mamba.expand * hidden_size // load.tp
        body = _mamba1(load, mamba, hidden_size, channels)
        return (residual_work(load, PART, hidden_size), *body, linear_work(load, "out_proj", PART, channels, hidden_size, closes=True))
    heads, groups = num_mamba_heads(mamba, hidden_size) // load.tp, mamba.num_groups // load.tp
    scan = scan_sizes(mamba, load.sequences, load.positions, heads, groups, load.itemsize)
    if isinstance(mamba, Mamba2):
        body = _mamba2(load, mamba, hidden_size, scan, heads, groups)
    else:
        body = _mamba3(load, mamba, hidden_size, scan, heads, groups)
    last = linear_work(load, "out_proj", PART, heads * mamba.head_dim, hidden_size, closes=True)
    return (residual_work(load, PART, hidden_size), *body, last)


def _mamba1(load: Workload, mamba: Mamba1, hidden_size: int, channels: int) -> Works:
    rank, state, size = mamba.step_width(hidden_size), mamba.state_dim, load.itemsize
    norms: Works = ()
    if mamba.inner_norm != "none":
        norms = (OpWork("inner norms", PART, norm(rank, size) + norm(state, size) * 2, counts=("dt_norm", "B_norm", "C_norm")),)
    scan = selective_sizes(mamba, load.sequences, load.positions, channels, size)
    return (
        linear_work(load, "in_proj", PART, hidden_size, 2 * channels),
        OpWork("conv1d", PART, causal_conv1d(channels, mamba.conv_kernel, size), CONVOLUTION),
        linear_work(load, "x_proj", PART, channels, rank + 2 * state),
        *norms,
        linear_work(load, "dt_proj", PART, rank, channels),
        OpWork("selective_scan", "scan", scan.work(load.seq_length), scan),
        gate_work(load, PART, channels),
    )


def _mamba2(load: Workload, mamba: Mamba2, hidden_size: int, scan: Ssd | TrapezoidalScan, heads: int, groups: int) -> Works:
    inner, shared, size = heads * mamba.head_dim, groups * mamba.state_dim, load.itemsize
    width = 2 * inner + 2 * shared + heads
    factors: Works = () if mamba.part_multipliers is None else (OpWork("scale parts", PART, scaled(width, size)),)
    gated = OpWork("gated_norm", PART, gated_norm(inner, groups, size), GATED_NORM)
    return (
        linear_work(load, "in_proj", PART, hidden_size, width),
        *factors,
        OpWork("conv1d", PART, causal_conv1d(inner + 2 * shared, mamba.conv_kernel, size), CONVOLUTION),
        OpWork("ssd", "scan", scan.work(load.seq_length), scan),
        gated if mamba.gated_norm else gate_work(load, PART, inner),
    )


def _mamba3(load: Workload, mamba: Mamba3, hidden_size: int, scan: Ssd | TrapezoidalScan, heads: int, groups: int) -> Works:
    rank, inner, shared = mamba.mimo_rank, heads * mamba.head_dim, groups * mamba.state_dim
    angles = (linear_work(load, "angle_proj", PART, hidden_size, mamba.num_angles),) if mamba.num_angles else ()
    norms = norm(mamba.state_dim, load.itemsize) * (2 * groups * rank)
    return (
        linear_work(load, "in_proj", PART, hidden_size, 2 * inner + 2 * shared * rank + 3 * heads),
        *angles,
        OpWork("B_norm, C_norm", PART, norms, TWO_NORMS, counts=("B_norm", "C_norm")),
        OpWork("scan", "scan", scan.work(load.seq_length), scan),
    )
