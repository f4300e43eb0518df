"""mLSTM: a matrix state per head with exponential input gates and forget gates, and no delta rule (arXiv:2405.04517).

Projections make queries, keys, values, a gate as wide as the values, and two numbers per head for the gates of the state. The heads'
outputs, divided by a normaliser, have a LayerNorm over each head without a bias. The layout is that of xLSTM 7B (arXiv:2503.13427).
`megakernels.mlstm` runs in plain torch on GPUs, too, and states its scratch.
"""

from functools import cache

from megakernels.facts import SUMS_BYTES, KernelScratch, Work
from megakernels.ops.library import scaled
from megakernels.ops.matrix_lstm.facts import MatrixLstmSizes
from megakernels.ops.rms_norm.facts import NORM, norm
from megaplan.blocks.costs import gate_work, linear_work, residual_work
from megaplan.blocks.ops import BlockProgram, Dims, Op, Projection, cut, input_ops, output_ops
from megaplan.blocks.storages import Shapes, inside_storages, mixer_storages, residual, scan_op
from megaplan.blocks.work import OpWork, Workload, Works
from megaplan.families.family import Selective
from megaplan.families.linear_attention.section import MatrixLstm
from megaplan.inventory.makers import column, per_head, row
from megaplan.inventory.makers import norm as scale
from megaplan.inventory.tensors import Init, ParamTensor

PART, SCAN = "G", "mlstm"
MLSTM = Selective(
    "mix",
    frozenset({"qk_proj", "v_proj", "gate_proj", "gates_proj", "split qk", "split gates", "head_norm", "head scale", "gate sigmoid"}),
    caches={SCAN: "mlstm"},
)


def mlstm_tensors(linear: MatrixLstm, hidden_size: int) -> tuple[ParamTensor, ...]:
    """Tensors of one block, its pre-norm included."""
    heads, keys, values = linear.num_heads, linear.num_heads * linear.key_dim, linear.num_heads * linear.value_dim
    return (
        scale("norm.weight", hidden_size),
        column("qk_proj.weight", 2 * keys, hidden_size, parts=(keys, keys), num_matrices=2 * heads),
        column("v_proj.weight", values, hidden_size, num_matrices=heads),
        column("gate_proj.weight", values, hidden_size, num_matrices=heads),
        column("gates_proj.weight", 2 * heads, hidden_size, parts=(heads, heads)),
        per_head("gates_proj.bias", (2 * heads,), Init.ZEROS, (heads, heads)),
        per_head("head_norm.weight", (values,), Init.ONES),
        row("out_proj.weight", hidden_size, values),
    )


def mlstm_sizes(linear: MatrixLstm, batch: int, positions: int, heads: int, itemsize: int) -> MatrixLstmSizes:
    """Sizes of the operation over these heads."""
    return MatrixLstmSizes(batch, positions, heads, linear.key_dim, linear.value_dim, linear.chunk_size, itemsize)


def mlstm_program(dims: Dims, linear: MatrixLstm) -> tuple[BlockProgram, Shapes]:
    """One block; the state and the normaliser before every chunk are kept."""
    heads = linear.num_heads // dims.tp
    keys, values, sizes = (
        heads * linear.key_dim,
        heads * linear.value_dim,
        mlstm_sizes(linear, dims.batch, dims.tokens, heads, dims.dtype.bytes),
    )
    shapes = {"qk": dims.wide(2 * keys), "state_gates": dims.wide(2 * heads)} | dict.fromkeys(("q", "k"), dims.wide(keys))
    shapes |= dict.fromkeys(("input_gate", "forget_gate"), dims.wide(heads))
    names = "v", "y", "y_even", "y_normed", "gate", "gate_sigmoid", "gated", "scale_gradient"
    shapes |= dict.fromkeys(names, dims.wide(values))
    statistics = {**dict.fromkeys(("y_mean", "y_rstd"), dims.wide(heads)), "states": sizes.states}
    inside = inside_storages(dims, KernelScratch(*sizes.scratch_bytes()))
    return _program(dims.tp > 1), residual(mixer_storages(dims, shapes, statistics) | inside)


@cache
def _program(sharded: bool) -> BlockProgram:
    projections = (
        Projection("qk_proj", "qk", "qk_proj.weight"),
        Projection("v_proj", "v", "v_proj.weight"),
        Projection("gate_proj", "gate", "gate_proj.weight"),
        Projection("gates_proj", "state_gates", "gates_proj.weight", "gates_proj.bias"),
    )
    inputs = "q", "k", "v", "input_gate", "forget_gate"
    weight = ("head_norm.weight",)
    scale = Op("head scale", ("y_even",), ("y_normed",), keeps=("y_even",), params=weight, fetches=("scale_gradient",), for_params=True)
    return MLSTM.program(
        *input_ops(*projections, sharded=sharded),
        cut("split qk", "qk", inputs[:2]),
        cut("split gates", "state_gates", inputs[3:]),
        scan_op(SCAN, inputs, "y", ("states",), (), handed=False, summed=False, inside=(True, True)),
        Op("head_norm", ("y",), ("y_even", "y_mean", "y_rstd"), keeps=("y", "y_mean", "y_rstd")),
        scale,
        Op("gate sigmoid", ("gate",), ("gate_sigmoid",), keeps=("gate_sigmoid",)),
        Op("gate", ("y_normed", "gate_sigmoid"), ("gated",), keeps=("y_normed", "gate_sigmoid")),
        *output_ops("gated", sharded=sharded),
    )


def mlstm_work(load: Workload, linear: MatrixLstm, hidden_size: int) -> Works:
    """Work of one block, pre-norm and residual included."""
    heads, size = linear.num_heads // load.tp, load.itemsize
    keys, values, scan = heads * linear.key_dim, heads * linear.value_dim, mlstm_sizes(linear, load.sequences, load.positions, heads, size)
    normed = norm(values, size) + Work(moved_forward=SUMS_BYTES, moved_input=SUMS_BYTES)
    return (
        residual_work(load, PART, hidden_size),
        linear_work(load, "qk_proj", PART, hidden_size, 2 * keys),
        linear_work(load, "v_proj", PART, hidden_size, values),
        linear_work(load, "gate_proj", PART, hidden_size, values),
        linear_work(load, "gates_proj", PART, hidden_size, 2 * heads),
        OpWork(SCAN, "scan", scan.work(load.seq_length), scan),
        OpWork("head_norm", PART, normed, NORM),
        OpWork("head scale", PART, scaled(values, size)),
        gate_work(load, PART, values, counts=("gate sigmoid", "gate")),
        linear_work(load, "out_proj", PART, values, hidden_size, closes=True),
    )
