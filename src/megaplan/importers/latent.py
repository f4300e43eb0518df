"""Decoders of latent attention: DeepSeek's from v2 on, glm_moe_dsa, glm4_moe_lite, youtu, minicpm3. Dense layers first, experts after."""

from typing import Any

from megaplan.importers.experts import first_dense, grouped_choice, sigmoid_choice
from megaplan.importers.layer_heads import listed_dense
from megaplan.importers.parts import common, connections, experts, minicpm_factors, mlp, model_of, positions
from megaplan.importers.reader import ConfigReader
from megaplan.importers.rotary import latent_score_scale, rope

LATENT_EPS = 1e-6
"""Epsilon of the norms over latents, which no config has: the default of the classes' norm."""
OWN_HEAD_DIM = ("glm_moe_dsa", "mistral4", "bailing_hybrid", "hy_v4", "axk2")
"""Types whose class writes its own `head_dim` over the config's."""
_DIMS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def deepseek_v2(reader: ConfigReader) -> dict[str, Any]:
    """deepseek_v2: experts in every `moe_layer_freq`-th layer after the dense ones."""
    reader.only("mlp_bias", (False, None), "the MLP's matrices have no bias here")
    grouped = grouped_choice(reader)
    if reader.value("topk_method") != "group_limited_greedy":
        grouped = {key: value for key, value in grouped.items() if key == "routed_scale"}
    if reader.value("topk_method") in ("greedy", "group_limited_greedy"):
        reader.skip("topk_method")
    return _decoder(reader, grouped)


def deepseek_v3(reader: ConfigReader) -> dict[str, Any]:
    """deepseek_v3: experts are chosen by corrected sigmoid scores."""
    return _decoder(reader, sigmoid_choice(reader))


def glm4_moe_lite(reader: ConfigReader) -> dict[str, Any]:
    """glm4_moe_lite: one dense layer unless `mlp_layer_types` says otherwise."""
    listed = reader.value("mlp_layer_types") is not None
    reader.skip("first_k_dense_replace")  # a field of the published config; the class always has one dense layer
    return _decoder(reader, sigmoid_choice(reader), dense=None if listed else {0})


def axk1(reader: ConfigReader) -> dict[str, Any]:
    """axk1: deepseek_v3 with a norm on the experts' output."""
    return _decoder(reader, sigmoid_choice(reader), experts_norm=True)


def axk2(reader: ConfigReader) -> dict[str, Any]:
    """axk2: deepseek_v32 with gates on the norms before attention and experts; one product of the query latent makes queries and gate."""
    layers, first = reader.layers(2), reader.value("first_k_dense_replace")
    dense = listed_dense(reader, set(range(first if isinstance(first, int) else 1)))
    reader.skip("layer_types", "first_k_dense_replace")
    indexer = _indexer(reader, layers, ["full"] * layers)
    gated = [at for layer in range(layers) for at in ((2 * layer,) if layer in dense else (2 * layer, 2 * layer + 1))]
    model = {"norm_gate": {"rank": reader.whole("gated_norm_rank"), "layers": gated}}
    attention = {"gate": True, "gate_source": "query"}
    return _decoder(reader, sigmoid_choice(reader), indexer, dense=dense, attention=attention, model=model)


def longcat_flash(reader: ConfigReader) -> dict[str, Any]:
    """longcat_flash: two attentions and two dense MLPs per layer, and a bank that reads the first MLP's input."""
    layers, key = reader.layers(5, "num_layers"), reader.same("num_layers", "num_hidden_layers")
    if key == "num_layers" and reader.has("num_hidden_layers") and reader.value("num_hidden_layers") != 2 * layers:
        reader.contradicts("num_hidden_layers", f"num_layers = {layers}: a layer has two attention blocks", f"write {2 * layers}")
    model = common(reader) | {"parallel_layers": [5 * layer + 2 for layer in range(layers)]}
    attention = latent_attention(reader)
    moe = experts(reader, count="n_routed_experts", width="expert_ffn_hidden_size", top_k="moe_topk", normalize=False)
    moe |= {"expert_bias": True, "null_experts": reader.whole_or_null("zero_expert_num", least=0) or 0}
    moe |= {"routed_scale": reader.number("routed_scaling_factor")}
    if reader.value("router_bias"):
        moe["router_bias"] = reader.flag("router_bias")
    reader.warn("zero_expert_num", moe["null_experts"], "in the original these experts return their input, and here zeros")
    reader.warn("num_layers", layers, "the experts' output is added before the second attention, not after it; latents have no factor")
    sections = {"A": ("attention", attention), "E": ("moe", moe), "D": ("mlp", mlp(reader, "ffn_hidden_size"))}
    return model_of(reader, "AEDAD" * layers, model, sections)


def longcat_ngram(reader: ConfigReader) -> dict[str, Any]:
    """longcat_flash_ngram: longcat_flash with embeddings of hashed n-grams, each order in several tables (arXiv:2601.21204)."""
    ratio, order, split = reader.number("ngram_vocab_size_ratio"), reader.whole("emb_neighbor_num", least=2), reader.whole("emb_split_num")
    reader.warn("emb_neighbor_num", order, "the sum of embeddings is divided by their number in the original; shapes are the same")
    model, tables = longcat_flash(reader), split * (order - 1)
    rows = sum(int(ratio * model["vocab_size"]) + 2 * table + 1 for table in range(tables))
    return model | {
        "features": {"ngram": {"num_tables": tables, "num_rows": rows, "dim": model["hidden_size"] // tables, "max_order": order}}
    }


def mistral4(reader: ConfigReader) -> dict[str, Any]:
    """mistral4: experts are chosen by softmax scores in groups; `head_dim` is the whole width of a query head."""
    return _decoder(reader, grouped_choice(reader))


def dense(reader: ConfigReader) -> dict[str, Any]:
    """youtu: latent attention and dense MLPs."""
    reader.skip("embedding_initializer_range")
    model, attention = common(reader), latent_attention(reader)
    return model_of(reader, "AD" * reader.layers(2), model, {"A": ("attention", attention), "D": ("mlp", mlp(reader))})


def minicpm3(reader: ConfigReader) -> dict[str, Any]:
    """minicpm3: latent attention and dense MLPs; a factor each for embeddings, a block's output, and the head's input."""
    model, layers = common(reader), reader.layers(2)
    attention = latent_attention(reader)
    factors, added = minicpm_factors(reader, model["hidden_size"], layers)
    model |= factors
    sections = {"A": ("attention", attention | added), "D": ("mlp", mlp(reader, bias=reader.flag("mlp_bias")) | added)}
    return model_of(reader, "AD" * layers, model, sections)


def sparse(reader: ConfigReader) -> dict[str, Any]:
    """deepseek_v32 and glm_moe_dsa: an indexer chooses the keys; a layer with a shared one reads the choice of the last one before."""
    reader.only("mlp_bias", (False, None), "the MLP's matrices have no bias here")
    layers = reader.layers(2)
    sparse_kinds = ("indexed_attention", "deepseek_sparse_attention")
    if reader.has("layer_types") and any(kind not in sparse_kinds for kind in reader.items("layer_types")):
        reader.cannot("layer_types", reader.value("layer_types"), "every layer has an indexer here", None)
    return _decoder(reader, sigmoid_choice(reader), _indexer(reader, layers, None))


def hy_v4(reader: ConfigReader) -> dict[str, Any]:
    """hy_v4: deepseek_v32 on several streams, with a gate and sinks; every fourth layer chooses keys if the config does not say."""
    layers = reader.layers(2)
    reader.skip("layer_types", "learnable_sink_init")
    derived = ["full" if layer == 0 or layer % 4 == 1 else "shared" for layer in range(layers)]
    listed = reader.value("mlp_layer_types") is not None
    limit = reader.value("swiglu_limit")
    if isinstance(limit, int | float) and limit > 0:
        reader.warn("swiglu_limit", limit, "values inside the experts are clamped; shapes are the same")
    reader.skip("swiglu_limit")
    return _decoder(
        reader,
        sigmoid_choice(reader),
        _indexer(reader, layers, derived),
        dense=None if listed else {0},
        attention={"gate": True, "sinks": True},
        model={"streams": connections(reader, "independent")},
    )


def _indexer(reader: ConfigReader, layers: int, derived: list[str] | None) -> dict[str, Any]:
    """The section of the indexers, `derived` if no field lists their kinds."""
    kinds = _indexers(reader, layers, derived)
    indexer = {
        "num_heads": reader.whole("index_n_heads"),
        "head_dim": reader.whole("index_head_dim"),
        "layers": [2 * layer for layer in range(layers) if kinds[layer] == "full"],
        "top_k": reader.whole("index_topk"),
    }
    if "shared" in kinds:
        indexer["shared_layers"] = [2 * layer for layer in range(layers) if kinds[layer] == "shared"]
    return indexer


def _indexers(reader: ConfigReader, layers: int, derived: list[str] | None) -> list[str]:
    """Kind of each layer's indexer: its own (full), or shared with the last layer that has one."""
    keys = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
    given = {key: reader.value(key) for key in keys}
    reader.skip(*keys)
    listed = given["indexer_types"] or given["index_topk_pattern"]
    if listed is not None:
        names = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}
        kinds = [names.get(str(one), "") for one in listed] if isinstance(listed, str | list) else []
        if len(kinds) != layers or "" in kinds:
            reader.wrong("indexer_types", listed, f"a list of {layers} of full and shared")
            return ["full"] * layers
    elif derived is not None:
        kinds = derived
    else:
        step, offset = (value if isinstance(value, int) else default for value, default in ((given[keys[2]], 1), (given[keys[3]], 2)))
        kinds = ["full" if max(layer - offset + 1, 0) % max(step, 1) == 0 else "shared" for layer in range(layers)]
    return kinds


def latent_attention(reader: ConfigReader) -> dict[str, Any]:
    """The section of latent attention with its rotary embedding."""
    attention = latent_widths(reader)
    attention |= {key: value for key, value in rope(reader, attention["qk_rope_head_dim"]).items() if key != "rotary_dim"}
    attention |= latent_score_scale(reader, attention)
    _check_heads(reader, attention)
    return attention


def _decoder(
    reader: ConfigReader,
    choice: dict[str, Any],
    indexer: dict[str, Any] | None = None,
    dense: set[int] | None = None,
    *,
    experts_norm: bool = False,
    attention: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The section `model` of a decoder of latent attention.

    Args:
        reader: Reader of the config.
        choice: Keys of the experts' choice.
        indexer: Section of the indexers; None for none.
        dense: Layers with a dense MLP, if no field says so.
        experts_norm: True if the experts' output has a norm.
        attention: More keys of attention.
        model: More keys of `model`.
    """
    model, attention = common(reader) | (model or {}), latent_attention(reader) | (attention or {})
    if indexer is not None:
        attention["indexer"] = indexer
    moe = experts(reader, count="n_routed_experts", width="moe_intermediate_size") | choice
    moe["shared_ffn_hidden_size"] = (reader.whole_or_null("n_shared_experts", least=0) or 0) * moe["ffn_hidden_size"]
    layers, dense = reader.layers(2), first_dense(reader) if dense is None else dense
    reader.skip("mlp_layer_types")
    step = reader.whole("moe_layer_freq") if reader.has("moe_layer_freq") else 1
    letters = "".join("AD" if layer in dense or layer % step else "AE" for layer in range(layers))
    if experts_norm and "E" in letters:
        model["added_norm_layers"] = positions(letters, "E")
    sections = {"A": ("attention", attention), "E": ("moe", moe), "D": ("mlp", mlp(reader))}
    return model_of(reader, letters, model, sections)


def latent_widths(reader: ConfigReader) -> dict[str, Any]:
    """Heads, widths and biases of latent attention."""
    attention: dict[str, Any] = {"kind": "mla", "num_heads": reader.whole("num_attention_heads")}
    attention["q_lora_rank"] = reader.whole_or_null("q_lora_rank")
    attention |= {name: reader.whole(name) for name in _DIMS[:-1]}
    attention["v_head_dim"] = _value_width(reader, attention["num_heads"])
    if reader.number("rms_norm_eps") != LATENT_EPS:
        attention["latent_norm_eps"] = LATENT_EPS
    return attention | ({"bias": True} if reader.flag("attention_bias") else {})


def _value_width(reader: ConfigReader, num_heads: int) -> int:
    """Width of a value head; null is hidden_size / num_attention_heads in a class that has such a default."""
    width = reader.whole_or_null("v_head_dim") if reader.family == "minicpm3" else reader.whole("v_head_dim")
    return width or max(1, reader.whole("hidden_size") // num_heads)


def _check_heads(reader: ConfigReader, attention: dict[str, Any]) -> None:
    """Fields that repeat others: key-value heads equal the heads, `head_dim` is the rotated part."""
    heads, rope_dim = attention["num_heads"], attention["qk_rope_head_dim"]
    whole = attention["qk_nope_head_dim"] + rope_dim
    for key, meant in (("num_key_value_heads", (heads,)), ("head_dim", (rope_dim,)), ("qk_head_dim", (whole,))):
        if not reader.has(key) or (key == "head_dim" and reader.family in OWN_HEAD_DIM):
            reader.skip(key)
        elif (value := reader.whole_or_null(key)) is not None and value not in meant:
            reader.contradicts(key, f"{key} = {value}, and latent attention has {meant[0]}", f"write {meant[0]}")
