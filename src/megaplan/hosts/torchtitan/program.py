"""A transformer block as torchtitan runs it: operations, the tensors that a checkpoint saves, and their storages.

In eager mode, silu and the following product keep three tensors, and rotary embeddings are computed in fp32. Compiled, both are one kernel,
and cheap operations are recomputed in backward. Under TP a separate operation gathers the normed input, and the linears keep the gathered
tensor. Selective checkpointing saves attention, reduce-scatters and every other product, counted from the block's first, and runs
everything else again; in eager mode the saved tensors are kept even if backward does not read them. With `host.checkpoints: halves`
attention and MLP are separate checkpoints, each with its own count: eager attention is recomputed as a whole, and the tensors between the
halves are kept.

Source: torchtitan/models/llama3/model.py, models/common/{attention,feed_forward,rope}.py, distributed/activation_checkpoint.py;
`_apply_op_sac_to_transformer_block_with_flex` of the last at 0cfbd0b3 (October 2025) for the halves.
"""

from functools import cache
from typing import NamedTuple

from megaplan.blocks.ops import INPUT, OUTPUT, Dims, Op, add, linear, norm
from megaplan.blocks.storages import Shapes, residual, storages
from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.families.attention.section import GroupedQueryAttention, LatentAttention
from megaplan.families.dense.section import Mlp
from megaplan.families.moe.section import MixtureOfExperts
from megaplan.hosts.megarun.program import Replay, replay
from megaplan.hosts.torchtitan.blocks import ATTENTION, MLP
from megaplan.hosts.torchtitan.experts import GROUPED, ROUTER, ExpertKey, expert_ops, expert_shapes
from megaplan.hosts.torchtitan.latent import latent_ops, latent_shapes
from megaplan.scalars import RecomputePolicy

CHEAP = ("norm", "rope", "repeat", "activation", "cast")
"""Prefixes of the element-wise operations that a compiled block runs again in backward under every checkpoint."""
MIDDLE = "h"
"""The residual stream between the halves."""


LAST = "mlp.residual"
"""The last operation, whose result is the next block's input: compiled code does not recompute it."""
BETWEEN = frozenset({"attention.norm", "attention.residual", "mlp.norm", LAST})
"""Operations outside the checkpoints of the halves."""


class BlockKey(NamedTuple):
    """Properties that decide a block's operations.

    Attributes:
        qk_norm: Queries and keys are normed.
        rotates: True with rotary embeddings.
        repeats: Keys and values are repeated for every query head.
        sharded: TP is above 1.
        context: CP is above 1.
        compiled: torch.compile runs the block.
        low: Linears multiply in 8 bits.
        casts_weights: Weights of linears are cast on every use, because they are gathered in 16 bits.
        latent: Latent attention: True if its queries have a latent, too; None for grouped queries.
        experts: Properties of the experts in place of a dense MLP; None without.
        halves: Selective recompute has two checkpoints, one of attention and one of MLP or experts; a compiled dense block still has a
            single one.
    """

    qk_norm: bool
    rotates: bool
    repeats: bool
    sharded: bool
    context: bool
    compiled: bool
    low: bool
    casts_weights: bool
    latent: bool | None = None
    experts: ExpertKey | None = None
    halves: bool = False


@cache
def block_replay(key: BlockKey, policy: RecomputePolicy) -> Replay:
    """The replay of a block under a checkpoint policy; selective is torchtitan's per-operation policy."""
    ops = _operations(key)
    if policy == "full":
        return replay(ops, region=frozenset(op.name for op in ops))
    if policy == "none":
        cheap = frozenset(op.name for op in ops if op.name.rpartition(".")[2].startswith(CHEAP))
        return replay(ops, region=cheap if key.compiled else frozenset())
    return _selective(key, ops)


def _selective(key: BlockKey, ops: tuple[Op, ...]) -> Replay:
    """The replay of a block whose checkpoint, or each of its two checkpoints, saves some of its operations."""
    parts = _halves(ops) if key.halves and (key.experts is not None or not key.compiled) else (ops,)
    selective = parts[-1:] if not key.compiled else parts  # eager attention with its own checkpoint is recomputed as a whole
    saved = frozenset(name for part in selective for name in saved_operations(part, keeps_choices=not key.halves))
    if not key.compiled:
        ops = tuple(op._replace(keeps=(*op.keeps, *op.makes[:1])) if op.name in saved else op for op in ops)
    kept = {name for op in ops for name in op.keeps}
    cached = frozenset(name for op in ops if op.name in saved for name in op.makes if name in kept)
    ends = frozenset({LAST}) if key.compiled else frozenset[str]()
    checkpoints = tuple(frozenset(op.name for op in part) for part in parts)
    return replay(ops, region=frozenset[str]().union(*checkpoints) - saved - ends, cached=cached, parts=checkpoints)


def _halves(ops: tuple[Op, ...]) -> tuple[tuple[Op, ...], ...]:
    """Operations of attention, and of MLP or experts, each between its norm and its residual addition."""
    inner = [op for op in ops if op.name not in BETWEEN]
    return tuple(tuple(op for op in inner if op.name.startswith(half)) for half in (ATTENTION, MLP))


def saved_operations(ops: tuple[Op, ...], *, keeps_choices: bool = True) -> frozenset[str]:
    """Operations whose outputs selective checkpointing saves.

    They are attention, reduce-scatters, exchanges, routing choices, and every second product, beginning with the first.

    Args:
        ops: Operations of one checkpoint.
        keeps_choices: The router's choices are saved, as since May 2026.
    """
    products = [op.name for op in ops if op.late and op.name != ROUTER and not op.name.startswith(GROUPED)]
    ends = "reduce_scatter", ".core", "exchange", *(["choose"] if keeps_choices else [])
    return frozenset([*products[::2], *[op.name for op in ops if op.name.endswith(ends)]])


def block_shapes(
    dims: Dims, key: BlockKey, attention: GroupedQueryAttention | LatentAttention, mlp: Mlp | None, moe: MixtureOfExperts | None
) -> Shapes:
    """Storages of a block, which has an MLP or experts."""
    stream = dict.fromkeys(("normed", "o", MIDDLE, "mlp.normed", "mlp.o", OUTPUT), dims.residual)
    found = {
        **storages(dims.dtype, Column.ACTIVATIONS, stream),
        **storages(dims.stat_dtype, Column.ACTIVATIONS, {"mlp.rstd": dims.residual[:2]}),
        **(latent_shapes(dims, attention) if isinstance(attention, LatentAttention) else _grouped_shapes(dims, key, attention)),
    }
    if key.experts is not None and moe is not None:
        found |= expert_shapes(dims, moe)
    elif mlp is not None:
        inner = dict.fromkeys(("gate", "silu", "up", "product"), dims.wide(mlp.ffn_hidden_size // dims.tp))
        found |= storages(dims.dtype, Column.ACTIVATIONS, inner)
        if key.low and isinstance(attention, GroupedQueryAttention):
            found = _with_copies(found, _plain(key), dims, attention, mlp)
    return residual(found)


def _grouped_shapes(dims: Dims, key: BlockKey, attention: GroupedQueryAttention) -> Shapes:
    query, groups = attention.num_heads // dims.tp, max(1, attention.num_kv_heads // dims.tp)
    width, wide, own = attention.head_dim, dims.wide, dims.residual[:2]
    shapes: dict[str, tuple[int, ...]] = {
        name: wide(query, width) for name in ("q", "q_proj", "q_normed", "heads", "k_repeated", "v_repeated")
    }
    shapes |= {name: wide(groups, width) for name in ("k", "k_proj", "k_normed", "v")}
    statistics: dict[str, tuple[int, ...]] = {
        "rstd": own,
        "q_rstd": wide(query),
        "k_rstd": wide(groups),
        "lse": (dims.batch, query, dims.tokens),
    }
    statistics |= dict.fromkeys(("q_wide", "q_turned", "heads_wide"), wide(query, width))
    statistics |= dict.fromkeys(("k_wide", "k_turned"), wide(groups, width))
    heads = query if key.repeats else groups
    moved: dict[str, tuple[int, ...]] = dict.fromkeys(("gathered", "o_partial", "mlp.gathered", "mlp.o_partial"), dims.gathered)
    moved |= {"kv_gathered": (dims.batch, dims.tokens * dims.cp, 2 * heads, width)}
    return {
        **storages(dims.dtype, Column.ACTIVATIONS, shapes),
        **storages(dims.stat_dtype, Column.ACTIVATIONS, statistics),
        **storages(dims.dtype, Column.COMMUNICATION, moved),
    }


LOW, LOW_WEIGHT, LOW_GRADIENT = ".low", ".low_weight", ".low_gradient"
"""8-bit copies for a product: of its input, of its weight, of its output's gradient."""


def _with_copies(shapes: Shapes, ops: tuple[Op, ...], dims: Dims, attention: GroupedQueryAttention, mlp: Mlp) -> Shapes:
    wide, narrow, ffn = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim, mlp.ffn_hidden_size
    rows = {"q_proj": wide, "k_proj": narrow, "v_proj": narrow, "o_proj": wide, "gate_proj": ffn, "up_proj": ffn, "down_proj": ffn}
    sizes = {}
    for op in (op for op in ops if op.late):
        sizes[op.name + LOW] = shapes[op.reads[0]][2]
        sizes[op.name + LOW_GRADIENT] = shapes[op.makes[0]][2]
        sizes[op.name + LOW_WEIGHT] = (rows[op.name.rpartition(".")[2]] * dims.hidden // dims.tp,)
    return shapes | storages(DType.FP8, Column.WORKSPACE, sizes)


@cache
def _plain(key: BlockKey) -> tuple[Op, ...]:
    attention = _attention(key) if key.latent is None else latent_ops(MIDDLE, low_rank=key.latent, compiled=key.compiled)
    ops = _mlp(key) if key.experts is None else expert_ops(key.experts, MIDDLE, compiled=key.compiled)
    return (*attention, *ops, add(LAST, (MIDDLE, "mlp.o"), OUTPUT))


@cache
def _operations(key: BlockKey) -> tuple[Op, ...]:
    """Operations of a block; under float8 a product keeps its input in 16 bits, and casts input, weight and gradient."""
    if not key.low:
        return _plain(key)
    ops = []
    for op in _plain(key):
        copies = (op.name + LOW, *([op.name + LOW_WEIGHT] if key.casts_weights else []))
        more = (*copies, op.name + LOW_GRADIENT)
        ops.append(op._replace(makes=(*op.makes, *copies), fetches=(*op.fetches, *more), grads=op.reads) if op.late else op)
    return tuple(ops)


def _attention(key: BlockKey) -> tuple[Op, ...]:
    source = "gathered" if key.sharded else "normed"
    ops = [norm("attention.norm", INPUT, "normed", "rstd", "attention.norm.weight")]
    if key.sharded:
        ops.append(Op("attention.gather", ("normed",), ("gathered",)))
    made = {"q": "q_proj", "k": "k_proj"} if key.qk_norm or key.rotates else {"q": "q", "k": "k"}
    ops += [linear(f"attention.{name}_proj", source, made.get(name, name), f"attention.{name}_proj.weight") for name in "qkv"]
    for name in "qk":
        if key.qk_norm:
            reads, made[name] = made[name], f"{name}_normed" if key.rotates else name
            ops.append(norm(f"attention.norm {name}", reads, made[name], f"{name}_rstd", f"attention.{name}_norm.weight"))
    if key.rotates:
        ops += [_rope(name, made[name], compiled=key.compiled) for name in "qk"]
    keys = ("k_repeated", "v_repeated") if key.repeats else ("k", "v")
    if key.repeats:
        ops += [Op(f"attention.repeat {name}", (name,), (f"{name}_repeated",)) for name in "kv"]
    ring = ("kv_gathered", "heads_wide") if key.context else ()
    inputs = ("q", *keys)
    ops.append(Op("attention.core", inputs, ("heads", "lse", *ring), keeps=(*inputs, "heads", "lse"), grads=inputs, fetches=ring))
    ops.append(linear("attention.o_proj", "heads", "o_partial" if key.sharded else "o", "attention.o_proj.weight"))
    if key.sharded:
        ops.append(Op("attention.reduce_scatter", ("o_partial",), ("o",)))
    return (*ops, add("attention.residual", (INPUT, "o"), MIDDLE))


def _rope(name: str, reads: str, *, compiled: bool) -> Op:
    """Rotary embeddings; in eager mode through an fp32 copy and its product with the angles, in both directions."""
    between = () if compiled else (f"{name}_wide", f"{name}_turned")
    return Op(f"attention.rope {name}", (reads,), (name, *between), fetches=between)


def _mlp(key: BlockKey) -> tuple[Op, ...]:
    source = "mlp.gathered" if key.sharded else "mlp.normed"
    ops = [norm("mlp.norm", MIDDLE, "mlp.normed", "mlp.rstd", "mlp.norm.weight")]
    if key.sharded:
        ops.append(Op("mlp.gather", ("mlp.normed",), ("mlp.gathered",)))
    gate = linear("mlp.gate_proj", source, "gate", "mlp.gate_proj.weight")
    up = linear("mlp.up_proj", source, "up", "mlp.up_proj.weight")
    if key.compiled:
        ops += [gate, up, Op("mlp.activation", ("gate", "up"), ("product",), keeps=("gate", "up"))]
    else:
        silu = Op("mlp.activation silu", ("gate",), ("silu",), keeps=("gate",))
        ops += [gate, silu, up, Op("mlp.activation product", ("silu", "up"), ("product",), keeps=("silu", "up"))]
    ops.append(linear("mlp.down_proj", "product", "mlp.o_partial" if key.sharded else "mlp.o", "mlp.down_proj.weight"))
    if key.sharded:
        ops.append(Op("mlp.reduce_scatter", ("mlp.o_partial",), ("mlp.o",)))
    return tuple(ops)
