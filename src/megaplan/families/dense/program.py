"""Operations of D blocks, their saved tensors and work; also for every gated or ungated MLP inside other blocks."""

from functools import cache

from megaplan.blocks.costs import mlp, norm_work, residual_work
from megaplan.blocks.ops import BlockProgram, Dims, Op, Projection, add, linear, norm, partial_gradient, project
from megaplan.blocks.storages import Shapes, residual, storages
from megaplan.blocks.work import Workload, Works
from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.families.dense.section import INNER_NORM, Mlp
from megaplan.families.family import Selective
from megaplan.scalars import GATED

PART = "D"


def dense_work(load: Workload, section: Mlp, hidden_size: int, variant: int | None = None) -> Works:
    """One D block, pre-norm and residual included; `tp` shards its width."""
    width, kind, scales_gate = variant or section.ffn_hidden_size, section.activation, section.gate_multiplier != 1
    inner = (norm_work(load, INNER_NORM, PART, width // load.tp),) if section.inner_norm else ()
    *ops, down = mlp(load, PART, hidden_size, width, kind, scales_gate=scales_gate)
    return (residual_work(load, PART, hidden_size), *ops, *inner, down)


SELECTIVE = Selective("contract", frozenset({"scale gate", "activation", INNER_NORM}))


def dense_selective(_mlp: Mlp, _variant: int | None) -> Selective:
    """Operations of a D block that selective recompute runs again."""
    return SELECTIVE


def dense_program(dims: Dims, mlp: Mlp, variant: int | None, _operations: None, _parameters: DType) -> tuple[BlockProgram, Shapes]:
    """One D block."""
    tensors = storages(dims.dtype, Column.ACTIVATIONS, dict.fromkeys(("normed", "mlp", "out"), dims.residual))
    tensors |= storages(dims.stat_dtype, Column.ACTIVATIONS, {"rstd": dims.residual[:2], "inner_rstd": dims.wide()})
    tensors |= mlp_storages(dims, variant or mlp.ffn_hidden_size)
    flags = mlp.activation in GATED, dims.tp > 1, mlp.bias, mlp.gate_multiplier != 1, mlp.activation == "xielu", mlp.inner_norm
    return _program(*flags), residual(tensors)


@cache
def _program(gated: bool, sharded: bool, bias: bool, scaled: bool, learned: bool, normed: bool) -> BlockProgram:
    first = norm("norm", "x", "normed", "rstd", "norm.weight")
    inner = mlp_ops(gated, sharded, bias=bias, scaled=scaled, normed=normed)
    if learned:
        inner = tuple(op._replace(params=("alphas",)) if op.name == "activation" else op for op in inner)
    return SELECTIVE.program(first, *inner, add("residual", ("x", "mlp"), "out"))


def mlp_ops(
    gated: bool,
    sharded: bool,
    prefix: str = "",
    made: str = "mlp",
    *,
    bias: bool = False,
    scaled: bool = False,
    normed: bool = False,
) -> tuple[Op, ...]:
    """Operations of an MLP on its normed input, as `Mlp.body` runs it.

    Args:
        gated: True if it has three matrices.
        sharded: True if TP is more than one rank.
        prefix: Beginning of the names of storages and parameters.
        made: Name of its output.
        bias: True if projections have a bias.
        scaled: True if the gate has a factor.
        normed: True if its inner values have a norm.
    """

    def bias_of(name: str) -> str | None:
        return f"{prefix}{name}_proj.bias" if bias else None

    names = ("gate", "up") if gated else ("up",)
    inner = tuple(f"{prefix}{name}" for name in names)
    expanding = (Projection(f"{prefix}{name}_proj", f"{prefix}{name}", f"{prefix}{name}_proj.weight", bias_of(name)) for name in names)
    holds = ("normed", *inner)
    read = (f"{prefix}scaled_gate", *inner[1:]) if scaled else inner
    return (
        *project("normed", f"{prefix}gathered", *expanding, sharded=sharded),
        *((Op(f"{prefix}scale gate", inner[:1], read[:1], holds=inner),) if scaled else ()),
        Op(f"{prefix}activation", read, (f"{prefix}activation",), keeps=read, holds=inner),
        *((norm(INNER_NORM, f"{prefix}activation", "inner_normed", "inner_rstd", f"{INNER_NORM}.weight"),) if normed else ()),
        linear(
            f"{prefix}down_proj",
            "inner_normed" if normed else f"{prefix}activation",
            f"{prefix}partial" if sharded else made,
            f"{prefix}down_proj.weight",
            bias=bias_of("down"),
            holds=holds,
        ),
        *((Op(f"{prefix}reduce_scatter", (f"{prefix}partial",), (made,), holds=holds),) if sharded else ()),
    )


def mlp_storages(dims: Dims, ffn_hidden_size: int, prefix: str = "") -> Shapes:
    """Storages of `mlp_ops` between its normed input and its output."""
    width = dims.wide(ffn_hidden_size // dims.tp)
    kept = {f"{prefix}{name}": width for name in ("gate", "scaled_gate", "up", "activation")} | {"inner_normed": width}
    if dims.tp == 1:
        return storages(dims.dtype, Column.ACTIVATIONS, kept)
    gathered = f"{prefix}gathered"
    moved = dict.fromkeys((gathered, partial_gradient(gathered), f"{prefix}partial"), dims.gathered)
    return storages(dims.dtype, Column.ACTIVATIONS, kept) | storages(dims.dtype, Column.COMMUNICATION, moved)
