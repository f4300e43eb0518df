"""Work of the operations of A blocks: projections, the attention core, the indexer.

Source: arXiv:2305.13245, section 2.2 (GQA); arXiv:2405.04434, equations 9 to 19 (MLA); arXiv:2512.02556, equation 1 (indexer).
"""

from megakernels.facts import KernelScratch, Work
from megakernels.ops.attention.facts import AttentionSizes
from megakernels.ops.chosen_attention.facts import MaskedSizes
from megakernels.ops.indexed_attention.facts import IndexedSizes, with_keys
from megakernels.ops.rms_norm.facts import NORM, norm
from megakernels.ops.rope.facts import MLA_KV, ROPE, mla_kv, rope
from megaplan.blocks.costs import LATE, detached_linear_work, gate_work, gathered_work, linear_work, norm_work, residual_work
from megaplan.blocks.ops import Dims
from megaplan.blocks.storages import PIECES
from megaplan.blocks.work import OpWork, Workload, Works
from megaplan.dtypes import DType
from megaplan.families.attention.compressed import compressor_works, keys_seen, output_works, query_works
from megaplan.families.attention.keys import BlockIndexer
from megaplan.families.attention.latents import GroupBytes, group_bytes, head_groups, of_group
from megaplan.families.attention.section import GroupedQueryAttention, Indexer, LatentAttention
from megaplan.families.attention.variants import PLAIN, AttentionVariant
from megaplan.families.family import Exchanges

PART = "A"


def head_widths(attention: GroupedQueryAttention | LatentAttention) -> tuple[int, int]:
    """Widths of a key and of a value."""
    if isinstance(attention, GroupedQueryAttention):
        return attention.head_dim, attention.value_width
    return attention.qk_nope_head_dim + attention.qk_rope_head_dim, attention.v_head_dim


def core_sizes(
    attention: GroupedQueryAttention | LatentAttention, batch: int, queries: int, keys: int, itemsize: int, *, tp: int, relations: bool
) -> AttentionSizes:
    """Sizes of the core over this rank's heads, without a window."""
    heads, is_grouped = attention.num_heads // tp, isinstance(attention, GroupedQueryAttention)
    groups = max(1, attention.num_kv_heads // tp) if isinstance(attention, GroupedQueryAttention) else heads
    capped = isinstance(attention, GroupedQueryAttention) and attention.score_cap is not None
    shape = batch, queries, keys, heads, groups, *head_widths(attention), itemsize
    return AttentionSizes(*shape, capped=capped, relations=relations, sinks=attention.sinks, latent=not is_grouped)


def core_inside(
    dims: Dims, attention: GroupedQueryAttention | LatentAttention, variant: AttentionVariant, parameters: DType
) -> KernelScratch | None:
    """Kernel scratch of the core without an indexer, in bytes; None if plain torch runs: `host.kernels: reference`, or too wide heads.

    The dtype of sinks is `parameters`.
    """
    sizes = sizes_of_layer(dims, attention, variant)
    return sizes.inside(parameters.bytes) if dims.kernels and sizes.accepted else None


def expanding_bytes(dims: Dims, attention: LatentAttention, variant: AttentionVariant, parameters: DType) -> GroupBytes:
    """Bytes that the core holds for one group of heads under `mesh.context_exchange: latents`."""
    whole = sizes_of_layer(dims, attention, variant)
    core = of_group(whole, dims.cp)
    inside = core.inside(parameters.bytes) if dims.kernels and core.accepted else KernelScratch(0, 0)
    widths = attention.kv_lora_rank, attention.qk_rope_head_dim
    return group_bytes(core, *widths, inside, dims.up, cp=dims.cp, groups=whole.heads // core.heads)


def library_refusal(dims: Dims, attention: GroupedQueryAttention | LatentAttention, variant: AttentionVariant) -> str | None:
    """Reason why FlashAttention-4 does not support the core of a layer; None if it does."""
    sizes = sizes_of_layer(dims, attention, variant)
    return sizes._replace(masked=sizes.masked or variant.indexed).refusal


def sizes_of_layer(dims: Dims, attention: GroupedQueryAttention | LatentAttention, variant: AttentionVariant) -> AttentionSizes:
    """Sizes of the core of a layer without its own indexer."""
    sizes = _of_rank(dims, variant.section(attention))
    return sizes._replace(window=variant.window, packed=dims.packed, masked=variant.shares, library=dims.flash4, causal=variant.causal)


def indexed_inside(dims: Dims, attention: LatentAttention, parameters: DType, *, returns_choice: bool = False) -> KernelScratch | None:
    """Kernel scratch of the core with an indexer, in bytes; None if plain torch runs. `returns_choice` is true if forward returns its bits.

    Without CP the index keys and their gradient are included too; under CP other operations make them.
    """
    indexer = attention.indexer
    if not dims.kernels or indexer is None:
        return None
    core = _of_rank(dims, attention)._replace(relations=False)
    sizes = IndexedSizes(core, indexer.num_heads, indexer.head_dim, 1 if dims.cp == 1 else PIECES)
    if not sizes.accepted:
        return None
    own = sizes.inside(returns_choice=returns_choice, sink_bytes=parameters.bytes * attention.sinks)
    inputs = dims.dtype.bytes * dims.batch * dims.tokens * indexer.head_dim + 2 * parameters.bytes * indexer.head_dim
    return with_keys(sizes, own, inputs, parameters.bytes) if dims.cp == 1 else own


def _of_rank(dims: Dims, attention: GroupedQueryAttention | LatentAttention) -> AttentionSizes:
    sequence = dims.batch, dims.tokens, dims.tokens * dims.cp
    return core_sizes(attention, *sequence, dims.dtype.bytes, tp=dims.tp, relations=dims.relations > 0)


def attention_work(
    load: Workload, attention: GroupedQueryAttention | LatentAttention, hidden_size: int, variant: AttentionVariant = PLAIN
) -> Works:
    """One A block, pre-norm and residual included; `tp` shards its heads.

    Relation bias and NoPE change neither FLOPs nor, to first order, bytes of the ideal work, which does not count them.
    """
    first, attention = residual_work(load, PART, hidden_size), variant.section(attention)
    sequence = load.sequences, load.positions, load.seq_length
    core = core_sizes(attention, *sequence, load.itemsize, tp=load.tp, relations=load.relations)
    core = core._replace(window=variant.window, packed=load.packed, library=load.flash4, causal=variant.causal)
    if isinstance(attention, GroupedQueryAttention):
        chooses = attention.block_indexer if variant.blocks else None
        if chooses is not None:
            core = core._replace(most_keys=chooses.top_blocks * chooses.block_size)
        own = None if variant.compressor is None else attention.compressors[variant.compressor]
        if own is not None:
            core = core._replace(window=None, most_keys=keys_seen(load, variant.window, own))
        ops = _grouped_query(load, attention, hidden_size, core, attention.rotated(variant.window), variant.keys == "given")
        ops += () if own is None else compressor_works(load, attention, own, hidden_size)
        return (first, *ops, *(() if chooses is None else _block_indexer(load, chooses, hidden_size)))
    indexer = attention.indexer
    if indexer is not None and (variant.indexed or variant.shares):
        core = core._replace(most_keys=indexer.top_k)
    ops = (first, *_latent(load, attention, hidden_size, core, late=load.gathers_latents and not variant.chooses))
    if indexer is not None and variant.indexed:
        rotated = core._replace(index_heads=indexer.num_heads), attention.qk_rope_head_dim
        ops += _indexer(load, indexer, attention.q_lora_rank or hidden_size, hidden_size, *rotated)
    if variant.shares:  # keys outside the choice are not work of the model
        ops += (OpWork("masked", "attention", Work(), MaskedSizes(core), counts=("attention",)),)
    return ops


def attention_exchanges(
    attention: GroupedQueryAttention | LatentAttention, hidden_size: int, variant: AttentionVariant | None
) -> Exchanges:
    """MLA gathers its narrow latents over the tensor group; keys and values are gathered over the context group."""
    attention = attention if variant is None else variant.section(attention)
    if isinstance(attention, GroupedQueryAttention):
        return Exchanges(context_width=attention.num_kv_heads * sum(head_widths(attention)))
    joined = attention.gate_source == "query"
    whole = hidden_size if (attention.gate and not joined) or attention.q_lora_rank is None else 0
    gathered = whole + (attention.q_lora_rank or 0) * (1 + joined) + attention.kv_lora_rank + attention.qk_rope_head_dim
    widths = attention.qk_nope_head_dim + attention.qk_rope_head_dim + attention.v_head_dim
    latents = 0 if variant is not None and variant.chooses else attention.kv_lora_rank + attention.qk_rope_head_dim
    return Exchanges(
        gathered_width=gathered,
        context_width=attention.num_heads * widths,
        latent_width=latents,
        expanded_width=attention.num_heads * (widths - attention.qk_rope_head_dim),
        rotary_width=attention.qk_rope_head_dim,
    )


def _grouped_query(
    load: Workload, attention: GroupedQueryAttention, hidden_size: int, core: AttentionSizes, rotated: int, given: bool
) -> Works:
    """Projections of queries, keys and values (unless an earlier layer gives them), the core, and the operations after it."""
    heads, num_kv_heads, (width, value) = attention.num_heads // load.tp, attention.num_kv_heads // load.tp, head_widths(attention)
    query, made = heads * width, heads * value
    gate: Works = (linear_work(load, "gate_proj", PART, hidden_size, heads * attention.gate_values),) if attention.gate else ()
    gated: Works = (gate_work(load, PART, made, counts=("gate sigmoid", "gate")),) if attention.gate else ()
    if attention.gate_bias:
        row = heads * attention.gate_values * load.itemsize
        gated = (OpWork("gate bias", PART, Work(moved_forward=2 * row, moved_input=row)), *gated)
    made_keys, own = (
        0 if given else num_kv_heads,
        {"k_proj": width, **({} if attention.values_from_keys or attention.values_are_keys else {"v_proj": value})},
    )
    return (
        *query_works(load, attention, hidden_size, query),
        *(linear_work(load, name, PART, hidden_size, num_kv_heads * each) for name, each in own.items() if not given),
        *gate,
        *_qk_norms(load, attention, heads, made_keys),
        *((norm_work(load, "v_norm", PART, value, times=num_kv_heads),) if attention.value_norm and not given else ()),
        OpWork("rope", PART, rope((heads + made_keys) * rotated, load.itemsize), ROPE),
        *((linear_work(load, "key bias", PART, num_kv_heads * value, num_kv_heads),) if attention.key_bias else ()),
        OpWork("attention", "attention", core._replace(groups=num_kv_heads).work(), core),
        *((OpWork("o_norm", PART, norm(made, load.itemsize), NORM),) if attention.output_norm else ()),
        *gated,
        *output_works(load, attention, hidden_size, made),
    )


def _qk_norms(load: Workload, attention: GroupedQueryAttention, heads: int, num_kv_heads: int) -> Works:
    if not attention.qk_norm:
        return ()
    width = attention.head_dim
    if attention.qk_norm_width != "all_heads":
        return (norm_work(load, "qk_norm", PART, width, times=heads + num_kv_heads),)
    return (OpWork("qk_norm", PART, norm(heads * width, load.itemsize) + norm(num_kv_heads * width, load.itemsize), NORM),)


def _latent(load: Workload, attention: LatentAttention, hidden_size: int, core: AttentionSizes, *, late: bool) -> Works:
    """The down projections are replicated: under sequence parallelism a rank makes the latents of its local tokens.

    `late` is true if the core expands gathered latents.
    """
    heads, nope, rotated = attention.num_heads // load.tp, attention.qk_nope_head_dim, attention.qk_rope_head_dim
    value, latent = attention.v_head_dim, attention.kv_lora_rank
    query, rank, joined = heads * (nope + rotated), attention.q_lora_rank, attention.gate_source == "query"
    if rank is None:
        queries: Works = (linear_work(load, "q_proj", PART, hidden_size, query),)
    else:
        queries = (
            linear_work(load, "q_down", PART, hidden_size, rank, own_tokens=True),
            norm_work(load, "q_latent_norm", PART, rank, own_tokens=True),
            linear_work(load, "q_up", PART, rank * (1 + joined), query + joined * heads * value),
        )
    has_own = attention.gate and not joined
    gate: Works = (linear_work(load, "gate_proj", PART, hidden_size, heads * attention.gate_values),) if has_own else ()
    return (
        *queries,
        *gate,
        OpWork("rope", PART, rope(query, load.itemsize), ROPE),
        linear_work(load, "kv_down", PART, hidden_size, latent + rotated, own_tokens=True),
        norm_work(load, "kv_latent_norm", PART, latent, own_tokens=True),
        *((norm_work(load, "rotary_norm", PART, rotated, own_tokens=True),) if attention.rotary_norm else ()),
        *(_expanding(load, attention, core) if late else _expanded(load, attention, core)),
        *((gate_work(load, PART, heads * value, counts=("gate sigmoid", "gate")),) if attention.gate else ()),
        linear_work(load, "o_proj", PART, heads * value, hidden_size, closes=True),
    )


def _expanded(load: Workload, attention: LatentAttention, core: AttentionSizes) -> Works:
    """Keys and values of the rank's own tokens, and the core."""
    nope, rotated, value = attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.v_head_dim
    return (
        linear_work(load, "kv_up", PART, attention.kv_lora_rank, core.heads * (nope + value)),
        OpWork("mla_kv", PART, mla_kv(core.heads, nope, rotated, value, load.itemsize), MLA_KV),
        OpWork("attention", "attention", core.work(), core),
    )


def _expanding(load: Workload, attention: LatentAttention, core: AttentionSizes) -> Works:
    """The expansion of all tokens to keys and values, once forward and once backward, and the core: both per group of heads.

    In eight bits the gradients of the rank's own tokens multiply.
    """
    up, split, attends = _expanded(load, attention, of_group(core, load.cp))
    works = gathered_work(up.work, load.cp, own_gradients=load.low), gathered_work(split.work, load.cp)
    group = *(op._replace(work=work, counts=LATE) for op, work in zip((up, split), works, strict=True)), attends
    rotated = OpWork("rope k", PART, rope(attention.qk_rope_head_dim, load.itemsize), ROPE)
    return (rotated, *(group * head_groups(core.heads, load.cp)))


def _block_indexer(load: Workload, indexer: BlockIndexer, hidden_size: int) -> Works:
    """Projections without a gradient of their input, norms, and the scores of half of all pairs, forward alone."""
    heads, dim = indexer.num_heads, indexer.head_dim
    scores = Work(forward=heads * dim * load.seq_length, moved_forward=(heads + 1) * dim * load.itemsize)
    return (
        detached_linear_work(load, "indexer.q_proj", PART, hidden_size, heads * dim, own_tokens=True),
        detached_linear_work(load, "indexer.k_proj", PART, hidden_size, dim, own_tokens=True),
        norm_work(load, "indexer norms", PART, dim, times=heads + 1),
        OpWork("indexer", "attention", scores),
    )


def _indexer(load: Workload, indexer: Indexer, query_width: int, hidden_size: int, core: AttentionSizes, rotated: int) -> Works:
    """The indexer is replicated under TP: a rank projects its own tokens, and computes the scores of all tokens from gathered ones.

    Norm and scores are a part of the operation that attends, and run again with it. The index has its own loss: the inputs of its
    projections get no gradient.
    """
    heads, dim = indexer.num_heads, indexer.head_dim
    sizes = IndexedSizes(core, heads, dim, rotated=rotated)
    k_norm = norm_work(load, "indexer.k_norm", PART, dim)
    return (
        detached_linear_work(load, "indexer.q_up", PART, query_width, heads * dim, own_tokens=True),
        detached_linear_work(load, "indexer.k_proj", PART, hidden_size, dim, own_tokens=True),
        detached_linear_work(load, "indexer.head_weights", PART, hidden_size, heads, own_tokens=True),
        k_norm._replace(counts=("attention",), facts=NORM._replace(torch=None)),
        OpWork("indexer", "attention", sizes.work(), sizes, counts=("attention",)),
    )
