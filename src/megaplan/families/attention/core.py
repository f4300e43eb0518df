"""The core of grouped-query and latent attention, with its gate and output projection, and storages that both have."""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from megaplan.blocks.ops import CHOICE, Dims, Op, add, given, linear, norm, partial_gradient
from megaplan.blocks.storages import INSIDE, INSIDE_BACKWARD, Shapes, storages
from megaplan.columns import Column
from megaplan.families.attention.compressed import CHOSEN, COMPRESSED, O_DOWN
from megaplan.families.attention.indexer import INDEX
from megaplan.families.attention.section import GroupedQueryAttention, LatentAttention
from megaplan.families.attention.variants import KeyRole, Role


class AttentionKey(NamedTuple):
    """Fields of the section that decide the operations.

    Attributes:
        kind: gqa or mla.
        first: The kind's first option: qk_norm of GQA, low-rank queries of MLA.
        bias: True if the input projections have a bias.
        output_bias: True if the output projection has a bias.
        gate: True if a gate multiplies the heads' outputs.
        sinks: True if heads have sinks.
        relations: True if scores have a relation bias; every layer adds to its gradient.
        gates_heads: True if the gate has one value a head.
        gate_bias: True if the gate has a number a head.
        joins_gate: True if one product makes queries and gate.
        rotary_norm: True if the rotary key has a norm.
        key_bias: True if keys add a number to their scores.
        scaled: Letters of the heads, of queries and keys, whose norms have a scale.
        low_rank: True if queries come from a latent.
        compressed: True if some keys are made of several positions.
        chooses: True if an indexer chooses of these keys.
        groups_output: True if groups of heads have a projection each before the output's.
        output_norm: True if the heads' outputs have a norm.
        keys: Owner of keys and values.
        blocks: True if an indexer chooses blocks of keys.
        values: Source of values: a projection, its norm, the norm of the keys' projection, or the keys (same).
    """

    kind: str
    first: bool
    bias: bool = False
    output_bias: bool = False
    gate: bool = False
    sinks: bool = False
    relations: bool = False
    gates_heads: bool = False
    gate_bias: bool = False
    joins_gate: bool = False
    rotary_norm: bool = False
    key_bias: bool = False
    scaled: str = "qk"
    low_rank: bool = False
    compressed: bool = False
    chooses: bool = False
    groups_output: bool = False
    output_norm: bool = False
    keys: KeyRole = "own"
    blocks: bool = False
    values: Literal["projection", "normed", "keys", "same"] = "projection"


RELATIONS, O_NORM, BLOCKS = "relations part", "o_norm", "indexer.blocks"


def core_ops(
    sharded: bool, context: bool, table: tuple[str, ...] | None, kernels: bool, key: AttentionKey, role: Role = "alone"
) -> tuple[Op, ...]:
    """The core, a gate and the output projection, with the indexer's inputs and the saved rotary table; a table in a buffer is not saved.

    Under CP the indexer's normed keys are gathered. A shared choice is a result that no operation here saves.
    """
    indexed = table is not None
    gathered: tuple[str, ...] = ("k_gathered", "v_gathered") if context else ("k", "v")
    index, norm = (INDEX, ("indexer.k_norm.weight", "indexer.k_norm.bias")) if indexed else ((), ())
    made = ("attention", "lse", "indexer.threshold", "indexer.lse") if indexed else ("attention", "lse")
    chosen = _chosen(key)
    choice, handed = (given(CHOICE),) if role == "reader" else (), (CHOICE,) if role == "source" else ()
    part = (RELATIONS,) if key.relations else ()
    ops = [*_before_core(context, key, gathered)]
    keys = (*gathered, "key_scores") if key.key_bias else gathered
    reads = (*keys, *index)
    if context and indexed:
        table = table or ()
        ops += [
            Op("index keys", ("indexer.k", *table), ("indexer.keys",), keeps=("indexer.k", *table), params=norm, grads=("indexer.k",)),
            Op("gather index keys", ("indexer.keys",), ("indexer.keys_gathered",)),
        ]
        reads, norm = (*keys, "indexer.q", "indexer.keys_gathered", "indexer.weights"), ()
    return (
        *ops,
        Op(
            "attention",
            ("q", *reads, *choice, *chosen, *(table or ())),
            (*made, *handed, INSIDE) if kernels and (indexed or key.sinks) else (*made, *handed),
            keeps=("q", "k", "v", *keys[2:], *choice, *chosen, *index, *(table or ()), *made),
            params=(*norm, "sinks") if key.sinks else norm,
            grads=("q", *reads, *chosen[: key.compressed]),
            fetches=(*(name for name in reads if name.endswith("_gathered")), *((INSIDE_BACKWARD,) if kernels else ()), *part),
        ),
        *output_ops(sharded, index, key),
    )


def _chosen(key: AttentionKey) -> tuple[str, ...]:
    """Further inputs of the core: compressed keys, and choices of keys or of blocks of keys."""
    given = {COMPRESSED: key.compressed, CHOSEN: key.chooses, BLOCKS: key.blocks}
    return tuple(name for name, is_given in given.items() if is_given)


def _before_core(context: bool, key: AttentionKey, gathered: tuple[str, ...]) -> Iterator[Op]:
    """Numbers that keys add to their scores, and gathered keys and values."""
    if key.key_bias:
        yield _key_bias(key.bias)
    if context:
        yield Op("gather keys", ("k", "v"), gathered, fetches=(RELATIONS,) if key.relations else ())


def _key_bias(bias: bool) -> Op:
    """The numbers that keys add to their scores, from the values."""
    params = ("key_scale", "key_proj.weight", *(("key_proj.bias",) if bias else ()))
    return Op("key bias", ("v",), ("key_scores",), keeps=("v", "key_scores"), params=params)


def output_ops(sharded: bool, index: tuple[str, ...], key: AttentionKey) -> tuple[Op, ...]:
    """A gate on the core's output, and the output projection; the indexer's inputs are still referenced until then."""
    made = "attention_normed" if key.output_norm else "attention"
    return (
        *((norm(O_NORM, "attention", made, "o_rstd", "o_norm.weight"),) if key.output_norm else ()),
        *(_gate(key, made) if key.gate else ()),
        *((linear(O_DOWN, "gated" if key.gate else made, "o_low", f"{O_DOWN}.weight"),) if key.groups_output else ()),
        linear(
            "o_proj",
            "o_low" if key.groups_output else "gated" if key.gate else made,
            "o_partial" if sharded else "o",
            "o_proj.weight",
            bias="o_proj.bias" if key.output_bias else None,
            holds=index,
        ),
        *((Op("reduce_scatter", ("o_partial",), ("o",), holds=index),) if sharded else ()),
        add("residual", ("x", "o"), "out"),
    )


def _gate(key: AttentionKey, heads: str) -> tuple[Op, ...]:
    reads, product = (heads, "gate_sigmoid"), ("gate_product",) if key.gates_heads else ()  # this product is summed over a head
    made = "gate_biased" if key.gate_bias else "gate"
    return (
        *((Op("gate bias", ("gate",), (made,), params=("gate_bias",)),) if key.gate_bias else ()),
        Op("gate sigmoid", (made,), ("gate_sigmoid",), keeps=("gate_sigmoid",)),
        Op("gate", reads, ("gated",), keeps=reads, fetches=product),
    )


def gate_shapes(dims: Dims, attention: GroupedQueryAttention | LatentAttention, heads: int, value: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a gate of these heads with values of a width, and of the tensor that it multiplies."""
    if not attention.gate:
        return {}
    shapes = dict.fromkeys(("gate", "gate_biased", "gate_sigmoid"), dims.wide(heads, attention.gate_values))
    return shapes | dict.fromkeys(("gated", "gate_product"), dims.wide(heads, value))


def statistics_of(dims: Dims, heads: int, more: Mapping[str, tuple[int, ...]]) -> Shapes:
    """Statistics of the norm before the block and of the core, and others, in the dtype of statistics."""
    shapes = {"rstd": dims.residual[:2], "lse": (dims.batch, heads, dims.tokens), **more}
    return storages(dims.stat_dtype, Column.ACTIVATIONS, shapes)


def communicated(dims: Dims, over_ranks: Mapping[str, tuple[int, ...]]) -> Shapes:
    """Tensors gathered over TP (latents) or CP (keys and values, over the whole sequence), and partial sums before their reduction."""
    if dims.tp == dims.cp == 1:
        return {}
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("gathered", partial_gradient("gathered"), "o_partial"), dims.gathered)
    for name, width in over_ranks.items():
        positions = dims.tokens * dims.cp if name in ("k_gathered", "v_gathered") else dims.tokens
        shapes[name] = (dims.batch, positions, *width)
    return storages(dims.dtype, Column.COMMUNICATION, shapes)
