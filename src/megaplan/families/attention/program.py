"""Saved tensors of A blocks: grouped-query and multi-head latent attention, and the sparse-attention indexer.

Under TP with SP a projection's gathered input is not kept but gathered again in backward (arXiv:2205.05198, section 4.2.2). MLA's down
projections run on the rank's own tokens; its narrow latents are gathered instead of the residual stream. Under CP keys and values are
gathered for the core and kept as the rank's own part. The indexer's inputs get no gradient from it; the core keeps the indexer's outputs
for all tokens, and two fp32 numbers per token, never a T × T score. Scratch of the core's kernels is workspace.

A choice that other layers share is a bit per query and key; the layer that chose runs its backward without it. Layers that read another
one's keys and values have no storages for them: their backward makes gradients of them that leave the block.
"""

from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import Any, Literal

from megaplan.blocks.ops import (
    CHOICE,
    BlockProgram,
    Dims,
    Op,
    Projection,
    UpProjection,
    cut,
    given,
    linear,
    norm,
    partial_gradient,
    plain_norm,
    project,
    reshape,
)
from megaplan.blocks.storages import Shapes, Stored, inside_storages, residual, storages
from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.families.attention.composition import core_inside, head_widths, indexed_inside
from megaplan.families.attention.compressed import compress_ops, more_storages, query_ops
from megaplan.families.attention.core import (
    O_NORM,
    RELATIONS,
    AttentionKey,
    communicated,
    core_ops,
    gate_shapes,
    output_ops,
    statistics_of,
)
from megaplan.families.attention.expanding import expanding_core, expanding_storages
from megaplan.families.attention.indexer import block_ops, block_storages, indexer_ops, indexer_storages
from megaplan.families.attention.section import GroupedQueryAttention, LatentAttention
from megaplan.families.attention.variants import AttentionPlace, AttentionVariant, Role, choice_shape
from megaplan.families.family import Selective

SELECTIVE = Selective("core", frozenset({"attention"}))
GATED = SELECTIVE._replace(reruns=frozenset({"attention", "gate bias", "gate sigmoid", "gate"}))
GATHERED = frozenset({"gather keys", "index keys", "gather index keys"})  # under CP the core gathers them once more
HELD = frozenset({"normed", "q", "k", "v", "gate"})  # locals of forward
UNROTATED = "unrotated_cos", "unrotated_sin"
LATENT_HELD = HELD | {CHOICE, "q_flat", "q_latent_normed", "kv_latent", *UNROTATED}


def attention_selective(attention: GroupedQueryAttention | LatentAttention, variant: AttentionVariant) -> Selective:
    """Operations of an A block that selective recompute runs again."""
    selective = GATED if attention.gate else SELECTIVE
    if isinstance(attention, GroupedQueryAttention) and attention.output_norm:
        selective = selective._replace(reruns=selective.reruns | {O_NORM})
    return selective._replace(method="indexed_core") if variant.indexed else selective


def attention_program(
    dims: Dims, attention: GroupedQueryAttention | LatentAttention, variant: AttentionVariant, place: AttentionPlace, parameters: DType
) -> tuple[BlockProgram, Shapes]:
    """One A block."""
    attention = variant.section(attention)
    if dims.gathers_latents and isinstance(attention, LatentAttention) and not variant.chooses:
        return _expanding_program(dims, attention, variant, place, parameters)
    role = place.role
    if variant.indexed and isinstance(attention, LatentAttention):
        inside = indexed_inside(dims, attention, parameters, returns_choice=role == "source")
    else:
        inside = core_inside(dims, attention, variant._replace(heads=None), parameters)
    core = place.rotates, variant.indexed, dims.tp > 1, dims.cp > 1, inside is not None, role
    key = attention_key(attention)._replace(relations=dims.relations > 0, keys=variant.keys, blocks=variant.blocks)
    tensors = {**attention_storages(dims, attention), **inside_storages(dims, inside)}
    if variant.keys == "given":
        tensors |= {given(name): tensors[name] for name in ("k", "v")}
    if isinstance(attention, GroupedQueryAttention):
        own = None if variant.compressor is None else attention.compressors[variant.compressor]
        key = key._replace(compressed=own is not None, chooses=own is not None and own.top_k is not None)
        tensors |= more_storages(dims, attention, own)
        tensors |= block_storages(dims, attention.block_indexer) if variant.blocks and attention.block_indexer is not None else {}
    if role != "alone":
        tensors |= storages(DType.INT32, Column.ACTIVATIONS, {CHOICE if role == "source" else given(CHOICE): choice_shape(dims)})
    if key.relations:
        tensors |= _relations(dims, attention, parameters)
    return _program(key, *core), residual(tensors)


def _relations(dims: Dims, attention: GroupedQueryAttention | LatentAttention, parameters: DType) -> Shapes:
    return storages(parameters, Column.ACTIVATIONS, {RELATIONS: (dims.relations, attention.num_heads // dims.tp)})


def attention_key(attention: GroupedQueryAttention | LatentAttention) -> AttentionKey:
    """Fields of the section that decide the operations."""
    gates = AttentionKey("", False, gate=attention.gate, sinks=attention.sinks, gates_heads=attention.gate_width == "head")
    if isinstance(attention, GroupedQueryAttention):
        values: Literal["projection", "normed", "keys", "same"] = "keys" if attention.values_from_keys else "normed"
        values = "same" if attention.values_are_keys else values if attention.value_norm else "projection"
        own: dict[str, Any] = {"output_bias": attention.output_bias, "gate_bias": attention.gate_bias, "key_bias": attention.key_bias}
        scaled = ("qk" if attention.query_norm_scale else "k") if attention.qk_norm_scale else ""
        own |= {"scaled": scaled, "output_norm": attention.output_norm, "low_rank": attention.query_rank is not None}
        own |= {"groups_output": attention.output_groups > 0}
        return gates._replace(kind="gqa", first=attention.qk_norm, bias=attention.bias, values=values, **own)
    low_rank, joins = attention.q_lora_rank is not None, attention.gate_source == "query"
    output = attention.bias or attention.output_bias
    gates = gates._replace(joins_gate=joins, rotary_norm=attention.rotary_norm)
    return gates._replace(kind="mla", first=low_rank, bias=attention.bias, output_bias=output)


def attention_ops(
    key: AttentionKey, *, rotates: bool, indexed: bool, sharded: bool, context: bool, kernels: bool, role: Role = "alone"
) -> tuple[tuple[Op, ...], frozenset[str]]:
    """Program and retained locals of an A block; `kernels` is true if Triton's kernels run the core."""
    if key.kind == "gqa":
        ops = grouped_ops(key, rotates, sharded, context, kernels)
        names = {name: given(name) for name in ("k", "v")} if key.keys == "given" else {}
        return tuple(op.renamed(names) for op in ops), HELD
    return latent_ops(key, rotates, indexed, sharded, context, kernels, role), LATENT_HELD


@lru_cache(maxsize=1)  # a model's A blocks and MTP depths, one after another
def attention_storages(dims: Dims, attention: GroupedQueryAttention | LatentAttention) -> Mapping[str, Stored]:
    """Storages of an A block, in a mapping that callers share."""
    if isinstance(attention, GroupedQueryAttention):
        return grouped_storages(dims, attention)
    return latent_storages(dims, attention)


@cache
def _program(key: AttentionKey, rotates: bool, indexed: bool, sharded: bool, context: bool, kernels: bool, role: Role) -> BlockProgram:
    ops, held = attention_ops(key, rotates=rotates, indexed=indexed, sharded=sharded, context=context, kernels=kernels, role=role)
    more = (GATHERED if context else frozenset()) | ({O_NORM} if key.output_norm else frozenset())
    return (GATED if key.gate else SELECTIVE).program(*ops, held=held, more=more)


def grouped_ops(key: AttentionKey, rotates: bool, sharded: bool, context: bool, kernels: bool) -> tuple[Op, ...]:
    """GQA, as `GroupedQueryAttention.forward` runs it; a gate is another projection of the queries' input."""
    qk_norm, bias = key.first, key.bias
    q, k = ("q", "k") if not (qk_norm or rotates) else ("q_proj", "k_proj")
    linears = [
        Projection(f"{name}_proj", made, f"{name}_proj.weight", f"{name}_proj.bias" if bias else None)
        for name, made in (("q", q), ("k", k), ("v", "v" if key.values == "projection" else "v_proj"))
        if name == "q" or (key.keys != "given" and (name == "k" or key.values not in ("keys", "same")))
    ]
    query = linears.pop(0) if key.low_rank else None
    if key.gate:
        linears.append(Projection("gate_proj", "gate", "gate_proj.weight"))
    ops = [norm("norm", "x", "normed", "rstd", "norm.weight"), *project("normed", "gathered", *linears, sharded=sharded)]
    ops += () if query is None else query_ops(query.makes, query.bias, sharded=sharded)
    reads = key.keys == "given"
    if qk_norm:
        after = ("q_normed", "k_normed") if rotates else ("q", "k")
        ops += _head_norms(key, {"q": (q, after[0])} | ({} if reads else {"k": (k, after[1])}))
        q, k = after
    ops += () if reads else _values(key)
    if rotates:
        # q and k are rebound together, so the unrotated q lives until k is rotated
        ops += [Op("rope q", (q,), ("q",)), *(() if reads else (Op("rope k", (k, q), ("k",), grads=(k,)),))]
    return (*ops, *_before_core(key), *core_ops(sharded, context, None, kernels, key))


def _before_core(key: AttentionKey) -> Iterator[Op]:
    """Views of keys that are values, and choices of keys."""
    if key.values == "same" and key.keys != "given":
        yield reshape("values", "k", "v")
    if key.blocks:
        yield from block_ops()
    if key.compressed:
        yield from compress_ops(chooses=key.chooses)


def _values(key: AttentionKey) -> tuple[Op, ...]:
    """The norm that makes values, from their own projection or the keys'; none if a projection makes them."""
    flat = "k_proj" if key.values == "keys" else "v_proj"
    reads = (flat, "v_ones")
    normed = Op("v ones", (), ("v_ones",)), Op("v_norm", reads, ("v", "v_rstd"), keeps=(*reads, "v_rstd"), grads=(flat,))
    return normed if key.values in ("normed", "keys") else ()


def _head_norms(key: AttentionKey, heads: Mapping[str, tuple[str, str]]) -> Iterator[Op]:
    """Norms over each head of these letters (q, k or v), each from its input to its output."""
    for name, (reads, made) in heads.items():
        scaled = norm(f"{name}_norm", reads, made, f"{name}_rstd", f"{name}_norm.weight")
        yield scaled if name in key.scaled else plain_norm(f"{name}_norm", reads, made, f"{name}_")


def grouped_storages(dims: Dims, attention: GroupedQueryAttention) -> Shapes:
    """Storages of a GQA block."""
    query, key = attention.num_heads // dims.tp, max(1, attention.num_kv_heads // dims.tp)
    wide, (width, value) = dims.wide, head_widths(attention)
    shapes = {name: wide(query, width) for name in ("q", "q_proj", "q_normed")}
    shapes |= {name: wide(key, width) for name in ("k", "k_proj", "k_normed")}
    shapes |= {"attention": wide(query, value), "v": wide(key, value), "v_proj": wide(key, value), "v_ones": (value,)}
    shapes |= {"q_ones": (width,), "k_ones": (width,), "attention_normed": wide(query, value)}
    shapes |= {"key_scores": wide(key)} if attention.key_bias else {}
    shapes |= gate_shapes(dims, attention, query, value)
    whole = attention.qk_norm_width == "all_heads"
    return {
        **storages(dims.dtype, Column.ACTIVATIONS, {**shapes, "normed": dims.residual, "o": dims.residual, "out": dims.residual}),
        **statistics_of(
            dims,
            query,
            {"q_rstd": wide() if whole else wide(query), "k_rstd": wide() if whole else wide(key), "v_rstd": wide(key), "o_rstd": wide()},
        ),
        **communicated(dims, {"k_gathered": (key, width), "v_gathered": (key, value)}),
    }


def latent_ops(
    key: AttentionKey, rotates: bool, indexed: bool, sharded: bool, context: bool, kernels: bool, role: Role = "alone"
) -> tuple[Op, ...]:
    """MLA, as `LatentAttention.forward` runs it."""
    ops = _latents(key, rotates, sharded)
    ops += project("latent_normed", "latent_gathered", Projection("kv_up", "kv_up", "kv_up.weight"), sharded=sharded)
    k_rope = "k_rope_gathered" if sharded else "k_rope"
    if sharded:
        ops.append(_gathered_rope(key))
    table = () if rotates else UNROTATED
    if table:
        ops.insert(0, Op("unrotated", (), table))
    ops += [
        Op("mla_kv", ("kv_up", k_rope, *table), ("k", "v"), keeps=table, grads=("kv_up", k_rope)),
    ]
    if indexed:
        ops += indexer_ops(sharded)
    return (*ops, *core_ops(sharded, context, table if indexed else None, kernels, key, role))


def _gathered_rope(key: AttentionKey) -> Op:
    """The rotary key of all tokens; a collective reads no view, which the key is without a norm."""
    own = () if key.rotary_norm else ("k_rope_own",)
    return Op("gather k_rope", ("k_rope",), (*own, "k_rope_gathered"), grads=("k_rope",))


def _latents(key: AttentionKey, rotates: bool, sharded: bool) -> list[Op]:
    """Queries, rotated, and the normed latent with the rotary key."""
    low_rank = key.first
    q_bias, kv_bias = ("q_down.bias", "kv_down.bias") if key.bias else (None, None)
    query = "q_flat" if rotates else "q"
    ops = [norm("norm", "x", "normed", "rstd", "norm.weight")]
    gate = (Projection("gate_proj", "gate", "gate_proj.weight"),) if key.gate and not key.joins_gate else ()
    latents, up = ("q_joined", "q_gate") if key.joins_gate else ("q_latent_normed", query)
    if low_rank:
        ops += [
            *(project("normed", "gathered", *gate, sharded=sharded) if gate else ()),
            linear("q_down", "normed", "q_latent", "q_down.weight", bias=q_bias),
            norm("q_latent_norm", "q_latent", "q_latent_normed", "q_latent_rstd", "q_latent_norm.weight"),
            *((Op("join latents", ("q_latent_normed", "q_latent"), ("q_joined",)),) if key.joins_gate else ()),
            *project(latents, "q_latent_gathered", Projection("q_up", up, "q_up.weight"), sharded=sharded),
            *((Op("split gate", ("q_gate",), (query, "gate")),) if key.joins_gate else ()),
        ]
    else:
        ops += project("normed", "gathered", Projection("q_proj", query, "q_proj.weight"), *gate, sharded=sharded)
    if rotates:
        ops.append(Op("rope q", ("q_flat",), ("q",)))
    ops += [
        linear("kv_down", "normed", "kv_latent", "kv_down.weight", bias=kv_bias),
        cut("split kv", "kv_latent", ("latent", "k_rope_unnormed" if key.rotary_norm else "k_rope")),
        *((norm("rotary_norm", "k_rope_unnormed", "k_rope", "k_rope_rstd", "rotary_norm.weight"),) if key.rotary_norm else ()),
        norm("kv_latent_norm", "latent", "latent_normed", "latent_rstd", "kv_latent_norm.weight"),
    ]
    return ops


def _expanding_program(
    dims: Dims, attention: LatentAttention, variant: AttentionVariant, place: AttentionPlace, parameters: DType
) -> tuple[BlockProgram, Shapes]:
    """MLA under `mesh.context_exchange: latents`: the core makes keys and values of a group of heads from gathered latents."""
    key = attention_key(attention)._replace(relations=dims.relations > 0)
    tensors = {
        **attention_storages(dims, attention),
        **expanding_storages(dims, attention, variant, parameters),
        **(_relations(dims, attention, parameters) if key.relations else {}),
    }
    return _expanding(key, place.rotates, dims.tp > 1, dims.up), residual(tensors)


@cache
def _expanding(key: AttentionKey, rotates: bool, sharded: bool, up: UpProjection) -> BlockProgram:
    ops = _latents(key, rotates, sharded)
    k_rope = "k_rope_gathered" if sharded else "k_rope"
    if sharded:
        ops.append(_gathered_rope(key))
    if rotates:
        ops.append(Op("rope k", (k_rope,), ("k_rotated",)))
        k_rope = "k_rotated"
    else:
        ops.insert(0, Op("unrotated", (), UNROTATED))
    core = expanding_core(key, k_rope, up)
    return (GATED if key.gate else SELECTIVE).program(*ops, core, *output_ops(sharded, core.reads[1:], key), held=LATENT_HELD)


def latent_storages(dims: Dims, attention: LatentAttention) -> Shapes:
    """Storages of an MLA block; nope and rope widths are per head."""
    heads, rope = attention.num_heads // dims.tp, attention.qk_rope_head_dim
    (key, value), latent = head_widths(attention), attention.kv_lora_rank
    wide, own = dims.wide, dims.residual[:2]
    shapes: dict[str, tuple[int, ...]] = {name: wide(heads, key) for name in ("q", "q_flat", "k")}
    shapes |= {name: wide(heads, value) for name in ("v", "attention")}
    shapes |= {"kv_up": wide(heads, attention.qk_nope_head_dim + value), "kv_latent": (*own, latent + rope)}
    shapes |= {"latent": (*own, latent), "latent_normed": (*own, latent)} | dict.fromkeys(
        ("k_rope", "k_rope_own", "k_rope_unnormed"), (*own, rope)
    )
    shapes |= dict.fromkeys(("normed", "o", "out"), dims.residual) | gate_shapes(dims, attention, heads, value)
    statistics = {"latent_rstd": own, "k_rope_rstd": own, "unrotated_cos": (1, 1), "unrotated_sin": (1, 1)}
    gathered: dict[str, tuple[int, ...]] = {"latent_gathered": (latent,), "k_rope_gathered": (rope,)}
    gathered[partial_gradient("latent_gathered")] = (latent,)
    if attention.q_lora_rank is not None:
        shapes |= {"q_latent": (*own, attention.q_lora_rank), "q_latent_normed": (*own, attention.q_lora_rank)}
        statistics["q_latent_rstd"] = own
        up = attention.q_lora_rank * (2 if attention.gate_source == "query" else 1)
        shapes |= {"q_joined": (*own, up), "q_gate": wide(heads, key + value)} if attention.gate_source == "query" else {}
        gathered |= dict.fromkeys(("q_latent_gathered", partial_gradient("q_latent_gathered")), (up,))
    found = {
        **storages(dims.dtype, Column.ACTIVATIONS, shapes),
        **statistics_of(dims, heads, statistics),
        **communicated(dims, {**gathered, "k_gathered": (heads, key), "v_gathered": (heads, value)}),
    }
    return found | indexer_storages(dims, attention.indexer) if attention.indexer is not None else found
