"""Operations of M blocks, the saved tensors of Mamba-2 and Mamba-3, and their work; Mamba-1 is in `mamba1_program`.

in_proj makes one storage; its parts are views of it, kept once (docs/decisions/0002). Mamba-3's scan keeps its inputs (views of in_proj's
output, the angles, normed B and C), and state and phase at each segment's start; it gates and projects its output itself, and recomputes
the inputs of each rank in backward.

Source: arXiv:2405.21060, section 7.1 (Mamba-2); arXiv:2603.15569, section 3 (Mamba-3).
"""

from functools import cache

from megakernels.facts import KernelScratch
from megakernels.ops.causal_conv1d.facts import CONVOLUTION, causal_conv1d
from megakernels.ops.library import scaled
from megakernels.ops.mamba3.facts import TrapezoidalScan
from megakernels.ops.rms_norm.facts import GATED_NORM, TWO_NORMS, gated_norm
from megakernels.ops.rms_norm.facts import norm as rms_norm_work
from megakernels.ops.ssd.facts import Ssd
from megaplan.blocks.costs import gate_work, linear_work, residual_work
from megaplan.blocks.ops import BlockProgram, Dims, Op, Projection, cut, input_ops, norm, output_ops
from megaplan.blocks.storages import (
    PIECES,
    Shapes,
    convolution,
    exchange,
    exchanged_storages,
    handed_storages,
    inside_storages,
    lane_of,
    mixer_storages,
    num_lanes,
    of_pieces,
    piece_positions,
    residual,
    scan_op,
    sums_separately,
)
from megaplan.blocks.work import OpWork, Workload, Works
from megaplan.dtypes import DType
from megaplan.families.family import Selective
from megaplan.families.mamba.mamba1_program import MAMBA1, PART, mamba1_program, mamba1_work
from megaplan.families.mamba.section import Mamba1, Mamba2, Mamba3, num_mamba_heads


def scan_sizes(mamba: Mamba2 | Mamba3, batch: int, positions: int, heads: int, groups: int, itemsize: int) -> Ssd | TrapezoidalScan:
    """Sizes of the scan of Mamba-2 or Mamba-3 over these heads."""
    width, state = mamba.head_dim, mamba.state_dim
    if isinstance(mamba, Mamba2):
        return Ssd(batch, positions, heads, groups, width, state, mamba.chunk_size, itemsize)
    settings = mamba.num_angles, mamba.chunk_positions, mamba.save_every, itemsize
    return TrapezoidalScan(batch, positions, heads, groups, mamba.mimo_rank, width, state, *settings)


def scan_inside(dims: Dims, mamba: Mamba2 | Mamba3, heads: int, groups: int, parameters: DType) -> KernelScratch | None:
    """Kernel scratch of the scan of Mamba-2 or Mamba-3, in bytes.

    Args:
        dims: Local sizes.
        mamba: The model's section.
        heads: Heads of this rank.
        groups: Groups of heads of this rank.
        parameters: Dtype of the parameters' gradients.

    Returns:
        None if the kernels do not support these sizes.
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
    """Mamba-3's scan of a piece: state and phase are views of the result that is passed on, so they are copied."""
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
        return mamba1_work(load, mamba, hidden_size)
    heads, groups = num_mamba_heads(mamba, hidden_size) // load.tp, mamba.num_groups // load.tp
    scan = scan_sizes(mamba, load.sequences, load.positions, heads, groups, load.itemsize)
    if isinstance(mamba, Mamba2):
        body = _mamba2(load, mamba, hidden_size, scan, heads, groups)
    else:
        body = _mamba3(load, mamba, hidden_size, scan, heads, groups)
    last = linear_work(load, "out_proj", PART, heads * mamba.head_dim, hidden_size, closes=True)
    return (residual_work(load, PART, hidden_size), *body, last)


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
    norms = rms_norm_work(mamba.state_dim, load.itemsize) * (2 * groups * rank)
    return (
        linear_work(load, "in_proj", PART, hidden_size, 2 * inner + 2 * shared * rank + 3 * heads),
        *angles,
        OpWork("B_norm, C_norm", PART, norms, TWO_NORMS, counts=("B_norm", "C_norm")),
        OpWork("scan", "scan", scan.work(load.seq_length), scan),
    )


MAMBA2 = Selective(
    "mix",
    frozenset({"in_proj", "scale parts", "split", exchange("conv1d"), "conv1d", "split conv"}),
    # the backward of later operations reads their outputs in any case; because they are saved, they do not run twice
    caches={"ssd": "ssd", "gated_norm": "gated_rms_norm", "gate": "swiglu"},
)
MAMBA3 = Selective("mix", frozenset({"in_proj", "angle_proj", "split", "B_norm", "C_norm"}), caches={"scan": "mamba3"})


def mamba_selective(mamba: Mamba1 | Mamba2 | Mamba3, _variant: None) -> Selective:
    """Operations of an M block that selective recompute runs again."""
    if isinstance(mamba, Mamba1):
        return MAMBA1
    return MAMBA2 if isinstance(mamba, Mamba2) else MAMBA3


def mamba_program(
    dims: Dims, mamba: Mamba1 | Mamba2 | Mamba3, _variant: None, _operations: None, parameters: DType
) -> tuple[BlockProgram, Shapes]:
    """One M block."""
    if isinstance(mamba, Mamba1):
        return mamba1_program(dims, mamba, parameters)
    sharded, handed, summed = dims.tp > 1, dims.cp > 1, sums_separately(dims, parameters)
    heads, groups = num_mamba_heads(mamba, dims.hidden) // dims.tp, mamba.num_groups // dims.tp
    if isinstance(mamba, Mamba2):
        inside = scan_inside(dims, mamba, heads, groups, parameters) if dims.kernels else None
        options = mamba.conv_bias, mamba.bias, mamba.gated_norm, mamba.part_multipliers is not None
        program = _mamba2_program(*options, sharded, handed, inside is not None, summed)
        return program, residual(_mamba2_storages(dims, mamba) | inside_storages(dims, inside))
    inside = scan_inside(dims, mamba, heads, groups, parameters) if dims.kernels else None
    program = _mamba3_program(mamba.num_angles > 0, mamba.mimo_rank > 1, sharded, handed, inside is not None, summed)
    return program, residual(_mamba3_storages(dims, mamba) | inside_storages(dims, inside))


@cache
def _mamba2_program(
    conv_bias: bool, bias: bool, gated_norm: bool, scaled: bool, sharded: bool, handed: bool, kernels: bool, summed: bool
) -> BlockProgram:
    inputs = ("conv_x", "dt", "conv_B", "conv_C")
    ops = (
        *input_ops(Projection("in_proj", "projected", "in_proj.weight", "in_proj.bias" if bias else None), sharded=sharded),
        *((Op("scale parts", ("projected",), ("scaled",)),) if scaled else ()),
        cut("split", "scaled" if scaled else "projected", ("z", "conv_in", "dt")),
        *convolution("conv1d", "conv_in", "conv", ("conv1d.weight", "conv1d.bias") if conv_bias else ("conv1d.weight",), handed=handed),
        cut("split conv", "conv", ("conv_x", "conv_B", "conv_C")),
        scan_op("ssd", inputs, "y", ("states",), ("A_log", "D", "dt_bias"), handed=handed, summed=summed, inside=(kernels, kernels)),
        Op("gated_norm", ("y", "z"), ("gated", "gated_rstd"), keeps=("y", "z", "gated_rstd"), params=("gated_norm.weight",))
        if gated_norm
        else Op("gate", ("y", "z"), ("gated",), keeps=("y", "z")),
        *output_ops("gated", sharded=sharded, bias="out_proj.bias" if bias else None),
    )
    return MAMBA2.program(*ops)


def _mamba2_storages(dims: Dims, mamba: Mamba2) -> Shapes:
    heads = num_mamba_heads(mamba, dims.hidden) // dims.tp
    inner, groups = heads * mamba.head_dim, mamba.num_groups // dims.tp
    state, wide = groups * mamba.state_dim, dims.wide
    shapes = {
        **dict.fromkeys(("projected", "scaled"), wide(2 * inner + 2 * state + heads)),
        "z": wide(inner),
        "conv_in": wide(inner + 2 * state),
        "dt": wide(heads),
        "conv": wide(inner + 2 * state),
        "conv_x": wide(inner),
        "conv_B": wide(state),
        "conv_C": wide(state),
        "y": wide(inner),
        "states": _states(dims, mamba, heads),
        "gated": wide(inner),
    }
    statistics: dict[str, tuple[int, ...]] = {"gated_rstd": wide(groups)}
    carried: Shapes = {}
    if dims.cp > 1:
        statistics["summed"] = (3 * heads,)  # gradients of dt_bias, A_log and D
        carried = handed_storages(dims, heads, num_lanes(groups, dims.cp), mamba.head_dim, mamba.state_dim)
        carried |= exchanged_storages(dims, "conv", mamba.conv_kernel, inner + 2 * state)
    return mixer_storages(dims, shapes, statistics) | carried


@cache
def _mamba3_program(angles: bool, mimo: bool, sharded: bool, handed: bool, kernels: bool, summed: bool) -> BlockProgram:
    steps = ("dt", "A", "trapezoid")
    inputs = ("x_in", "z", "B_normed", "C_normed", *steps, *(("angles",) if angles else ()))
    starting = ("states", *(("phases",) if angles else ()), *(("ahead",) if handed else ()))
    ops = (
        *input_ops(
            Projection("in_proj", "projected", "in_proj.weight"),
            *((Projection("angle_proj", "angles", "angle_proj.weight"),) if angles else ()),
            sharded=sharded,
        ),
        cut("split", "projected", ("z", "x_in", "B", "C", *steps)),
        norm("B_norm", "B", "B_normed", "B_rstd", "B_norm.weight"),
        norm("C_norm", "C", "C_normed", "C_rstd", "C_norm.weight"),
        scan_op(
            "scan",
            inputs,
            "gated",
            starting,
            ("B_bias", "C_bias", "D", "dt_bias", *(("mimo_x", "mimo_z", "mimo_o") if mimo else ())),
            handed=handed,
            summed=summed,
            inside=(kernels, kernels),
            fetches=("ahead_gradient",) if handed else (),
        ),
        *output_ops("gated", sharded=sharded),
    )
    return MAMBA3.program(*ops)


def _mamba3_storages(dims: Dims, mamba: Mamba3) -> Shapes:
    heads = num_mamba_heads(mamba, dims.hidden) // dims.tp
    inner, groups = heads * mamba.head_dim, mamba.num_groups // dims.tp
    state, wide = groups * mamba.mimo_rank * mamba.state_dim, dims.wide
    shapes = {
        "projected": wide(2 * inner + 2 * state + 3 * heads),
        "z": wide(inner),
        "x_in": wide(inner),
        "angles": wide(mamba.num_angles),
        "states": _states(dims, mamba, heads),
        "gated": wide(inner),
        **{name: wide(state) for name in ("B", "C", "B_normed", "C_normed")},
        **{name: wide(heads) for name in ("dt", "A", "trapezoid")},
    }
    statistics = dict.fromkeys(("B_rstd", "C_rstd"), wide(groups * mamba.mimo_rank))
    statistics["phases"] = (*_states(dims, mamba, heads)[:3], mamba.num_angles)
    carried: Shapes = {}
    if dims.cp > 1:
        of_mimo_rank = 2 * mamba.state_dim + (3 * mamba.head_dim if mamba.mimo_rank > 1 else 0)  # the biases of B and C; x, z and o
        statistics["summed"] = (heads * (mamba.mimo_rank * of_mimo_rank + 2),)  # gradients of D and dt_bias
        statistics |= dict.fromkeys(("ahead", "ahead_gradient"), (dims.batch, PIECES, heads))
        travelling = mamba.head_dim * mamba.state_dim + mamba.num_angles
        carried = handed_storages(dims, heads, num_lanes(groups, dims.cp), travelling)
    return mixer_storages(dims, shapes, statistics) | carried


def _states(dims: Dims, mamba: Mamba2 | Mamba3, heads: int) -> tuple[int, ...]:
    """Shape of the saved states; under CP per piece."""
    groups = mamba.num_groups // dims.tp
    return of_pieces(dims, scan_sizes(mamba, dims.batch, piece_positions(dims), heads, groups, dims.dtype.bytes).states)
