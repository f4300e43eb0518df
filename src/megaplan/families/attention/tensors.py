"""Parameters of A blocks: grouped-query and multi-head latent attention, and the sparse-attention indexer."""

from megaplan.families.attention.compressed import compressor_tensors, output_tensors, query_tensors
from megaplan.families.attention.keys import BlockIndexer
from megaplan.families.attention.section import GroupedQueryAttention, Indexer, LatentAttention
from megaplan.families.attention.variants import PLAIN, AttentionVariant
from megaplan.inventory.makers import column, norm, per_head, replicated, row
from megaplan.inventory.tensors import Group, Init, ParamTensor


def attention_tensors(
    attention: GroupedQueryAttention | LatentAttention, hidden_size: int, variant: AttentionVariant = PLAIN
) -> tuple[ParamTensor, ...]:
    """Tensors of one A block, its pre-norm included.

    Args:
        attention: The spec's section.
        hidden_size: Width of the residual stream.
        variant: Variant of the layer.
    """
    tensors, attention = [norm("norm.weight", hidden_size)], variant.section(attention)
    if isinstance(attention, GroupedQueryAttention):
        tensors += _grouped_query(attention, hidden_size, given=variant.keys == "given")
        if variant.compressor is not None:
            tensors += compressor_tensors(attention, attention.compressors[variant.compressor], hidden_size)
        if variant.blocks and attention.block_indexer is not None:
            tensors += _block_indexer(attention.block_indexer, hidden_size)
    else:
        tensors += _latent(attention, hidden_size)
        if variant.indexed and attention.indexer is not None:
            tensors += _indexer(attention.indexer, attention.q_lora_rank or hidden_size, hidden_size)
    return tuple(tensors)


def _grouped_query(attention: GroupedQueryAttention, hidden_size: int, *, given: bool) -> list[ParamTensor]:
    """GQA (arXiv:2305.13245, section 2.2): q of every head, k and v of every kv head.

    q, k and v are orthogonalised per kv-head group, so a fused and a split projection take the same Muon step.
    """
    heads, groups = attention.num_heads, attention.num_kv_heads
    made = heads * attention.value_width
    widths = {"q_proj": heads * attention.head_dim, "k_proj": groups * attention.head_dim}
    if given:
        del widths["k_proj"]
    widths |= {} if given or attention.values_from_keys or attention.values_are_keys else {"v_proj": groups * attention.value_width}
    read = {"q_proj": attention.query_rank or hidden_size}
    tensors = query_tensors(attention, hidden_size)
    tensors += [column(f"{name}.weight", width, read.get(name, hidden_size), num_matrices=groups) for name, width in widths.items()]
    tensors += output_tensors(attention, hidden_size, made)
    if attention.bias:
        tensors += [per_head(f"{name}.bias", (width,), Init.ZEROS) for name, width in widths.items()]
    if attention.output_bias:
        tensors.append(replicated("o_proj.bias", (hidden_size,), Group.OTHER, Init.ZEROS))
    if attention.gate:
        tensors.append(column("gate_proj.weight", heads * attention.gate_values, hidden_size, num_matrices=groups))
    tensors += _of_heads(attention)
    if attention.output_norm:
        tensors.append(per_head("o_norm.weight", (made,), Init.ONES))
    if attention.key_bias:
        summed = row("key_proj.weight", groups, groups * attention.value_width)
        biased = attention.bias * (replicated("key_proj.bias", (groups,), Group.OTHER, Init.ZEROS),)
        tensors += [replicated("key_scale", (groups,), Group.OTHER, Init.ZEROS), summed, *biased]
    if attention.qk_norm and attention.qk_norm_width == "all_heads":
        tensors += [per_head(f"{name}_norm.weight", (widths[f"{name}_proj"],), Init.ONES) for name in ("q", "k")]
    elif attention.qk_norm and attention.qk_norm_scale:
        names = ("q",) * attention.query_norm_scale + ("k",) * (not given)
        tensors += [norm(f"{name}_norm.weight", attention.head_dim) for name in names]
    return tensors


def _latent(attention: LatentAttention, hidden_size: int) -> list[ParamTensor]:
    """MLA (DeepSeek-V2, arXiv:2405.04434, equations 9 to 19).

    The down projections and latent norms are replicated: their outputs are shared by all heads, and each TP rank needs them whole.
    """
    heads, joined = attention.num_heads, attention.gate_source == "query"
    query = heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
    if attention.q_lora_rank is None:
        tensors = [column("q_proj.weight", query, hidden_size)]
    else:
        tensors = [
            replicated("q_down.weight", (attention.q_lora_rank, hidden_size), Group.MATRIX),
            *((norm("q_latent_norm.weight", attention.q_lora_rank),) if attention.latent_norm else ()),
            column("q_up.weight", query + joined * heads * attention.v_head_dim, attention.q_lora_rank * (1 + joined)),
        ]
    latent = attention.kv_lora_rank
    biased = {"kv_down": latent + attention.qk_rope_head_dim, "o_proj": hidden_size} if attention.bias else {}
    if attention.bias and attention.q_lora_rank is not None:
        biased["q_down"] = attention.q_lora_rank
    if attention.output_bias:
        biased["o_proj"] = hidden_size
    return [
        *tensors,
        replicated("kv_down.weight", (latent + attention.qk_rope_head_dim, hidden_size), Group.MATRIX),
        *((norm("kv_latent_norm.weight", latent),) if attention.latent_norm else ()),
        *((norm("rotary_norm.weight", attention.qk_rope_head_dim),) if attention.rotary_norm else ()),
        column("kv_up.weight", heads * (attention.qk_nope_head_dim + attention.v_head_dim), latent),
        row("o_proj.weight", hidden_size, heads * attention.v_head_dim),
        *((column("gate_proj.weight", heads * attention.gate_values, hidden_size),) if attention.gate and not joined else ()),
        *_of_heads(attention),
        *(replicated(f"{name}.bias", (width,), Group.OTHER, Init.ZEROS) for name, width in biased.items()),
    ]


def _of_heads(attention: GroupedQueryAttention | LatentAttention) -> list[ParamTensor]:
    """Numbers of each head: of its gate, and its sink."""
    given = {"gate_bias": isinstance(attention, GroupedQueryAttention) and attention.gate_bias, "sinks": attention.sinks}
    return [per_head(name, (attention.num_heads,), Init.ZEROS) for name, has in given.items() if has]


def _block_indexer(indexer: BlockIndexer, hidden_size: int) -> list[ParamTensor]:
    """Queries of its heads, one key, and a norm for each; replicated, because every rank chooses the same keys."""
    widths = {"q": indexer.num_heads * indexer.head_dim, "k": indexer.head_dim}
    made = [replicated(f"indexer.{name}_proj.weight", (width, hidden_size), Group.MATRIX) for name, width in widths.items()]
    return [*made, *(norm(f"indexer.{name}_norm.weight", indexer.head_dim) for name in widths)]


def _indexer(indexer: Indexer, query_width: int, hidden_size: int) -> list[ParamTensor]:
    """The lightning indexer (DeepSeek-V3.2, arXiv:2512.02556, section 2.1); queries come from the q latent, or from x without q-LoRA.

    Replicated under TP: every rank must choose the same keys, and sharding the indexer's heads would mean reducing a T × T score matrix
    over the TP group to save 0.3 M parameters.
    """
    name = "indexer"
    return [
        replicated(f"{name}.q_up.weight", (indexer.num_heads * indexer.head_dim, query_width), Group.MATRIX),
        replicated(f"{name}.k_proj.weight", (indexer.head_dim, hidden_size), Group.MATRIX),
        norm(f"{name}.k_norm.weight", indexer.head_dim),
        replicated(f"{name}.k_norm.bias", (indexer.head_dim,), Group.OTHER, Init.ZEROS),
        replicated(f"{name}.head_weights.weight", (indexer.num_heads, hidden_size), Group.MATRIX),
    ]
