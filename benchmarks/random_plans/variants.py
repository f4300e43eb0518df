"""Variants of blocks that came after the pinned plans: kinds of norms, heads of single layers, gates of one value a head."""

from typing import Any

from random_plans.choices import Draw

NORM_SHARE, HEADS_SHARE, STREAMS_SHARE, CONNECTIONS_SHARE = 0.05, 0.3, 0.04, 0.12


def add_variants(draw: Draw, model: dict[str, Any]) -> None:
    """Write variants into the sections of a drawn model of megarun."""
    plain = model.get("norm", "rmsnorm") == "rmsnorm" and not model.get("zero_centered_norm")
    if model.get("norm") == "layernorm" or (plain and "mtp" not in model.get("features", {}) and draw.chance(NORM_SHARE)):
        draw.maybe(model, 0.5 if model.get("norm") else 1.0, norm="layernorm_no_bias")
    attention = model.get("attention", {})
    if attention.get("kind") == "gqa" and draw.chance(HEADS_SHARE):
        _add_heads(draw, model, attention)
    if attention.get("kind") == "mla" and "mtp" not in model.get("features", {}):
        draw.maybe(attention, HEADS_SHARE, output_multiplier=0.8)


def add_later_variants(draw: Draw, model: dict[str, Any]) -> None:
    """Gates and sinks of latent attention, biases of gates, whole gates of Kimi delta attention, and norms on what single layers add."""
    attention, delta = model.get("attention", {}), model.get("linear_attention", {})
    if attention.get("kind") == "mla" and draw.chance(HEADS_SHARE):
        attention |= {"gate": True, "gate_width": draw.choice(["channel", "head"])}
        attention |= {"sinks": True} if draw.chance(0.3) else {}
    elif attention.get("gate"):
        draw.maybe(attention, 0.5, gate_bias=True)
    if delta.get("kind") == "kda":
        draw.maybe(delta, HEADS_SHARE, full_gates=True)
    if not model.keys() & {"norm_placement", "post_norm_layers", "parallel_layers"}:
        draw.maybe(model, NORM_SHARE, added_norm_layers=lambda: draw.some(range(model["num_layers"])) or [0])


def add_learned(draw: Draw, model: dict[str, Any]) -> None:
    """Write activations with parameters into the MLPs of a drawn model of megarun."""
    if "mlp" in model and model["mlp"].get("gate_multiplier", 1) == 1:
        draw.maybe(model["mlp"], 0.1, activation="xielu")


def add_norms(draw: Draw, model: dict[str, Any]) -> None:
    """Norms without scales, of the embedding, of the heads' outputs, and of an MLP's inner values."""
    alone = not model.keys() & {"norm", "parallel_layers", "post_norm_layers", "added_norm_layers"}
    if alone and "mtp" not in model.get("features", {}) and not model.get("zero_centered_norm"):
        draw.maybe(model, NORM_SHARE, norm="rmsnorm_no_scale")
    if not model.get("tie_embeddings") and "mtp" not in model.get("features", {}):
        draw.maybe(model, NORM_SHARE, embedding_norm=True)
    attention = model.get("attention", {})
    if attention.get("kind") == "gqa":
        draw.maybe(attention, NORM_SHARE, output_norm=True)
        if attention.get("qk_norm") and attention.get("qk_norm_width", "head") == "head":
            draw.maybe(attention, HEADS_SHARE, qk_norm_scale=False)
    if "mlp" in model:
        draw.maybe(model["mlp"], NORM_SHARE, inner_norm=True)


def add_connections(draw: Draw, model: dict[str, Any]) -> None:
    """Write hyper-connections into a drawn model of megarun whose other parts know one stream."""
    others = model.get("features", {}).keys() - {"relation_bias"} or model.keys() & {"towers", "parallel_layers", "learned_positions"}
    if not others and draw.chance(CONNECTIONS_SHARE):
        model["streams"] = {"count": draw.randint(2, 5), "mixing": draw.choice(["independent", "constrained"])}
        draw.maybe(model["streams"], 0.5, sinkhorn_steps=draw.randint(1, 30), eps=draw.choice([1e-4, 1e-8]), post_scale=1.25)


def add_attention_residuals(draw: Draw, document: dict[str, Any]) -> None:
    """Write attention residuals into a drawn plan of megarun without parts that need a residual stream."""
    model = document["model"]
    barred = model.get("features", {}).keys() & {"mtp", "layer_embeddings"} or model.keys() & {"parallel_layers", "streams", "stream_scale"}
    barred = barred or document.get("host", {}).get("activation_offload")
    if not barred and draw.chance(CONNECTIONS_SHARE):
        model["attention_residuals"] = {"group_layers": draw.randint(1, max(2, model["num_layers"]))}


def add_streams(draw: Draw, model: dict[str, Any]) -> None:
    """Options that megarun does not build: factors of the stream, gates of norms and queries, scores of keys."""
    if not model.get("features", {}).keys() - {"relation_bias"} and "streams" not in model:
        draw.maybe(model, STREAMS_SHARE, stream_scale=True)
    alone = not model.keys() & {"parallel_layers", "post_norm_layers"} and model.get("norm_placement") != "post"
    if alone and model.get("norm") != "rmsnorm_no_scale" and draw.chance(STREAMS_SHARE):
        layers = draw.some(range(model["num_layers"])) or [0]
        model["norm_gate"] = {"rank": draw.wide(2, 20), "layers": layers}
    attention = model.get("attention", {})
    if attention.get("gate") and attention.get("q_lora_rank") and attention.get("gate_width", "channel") == "channel":
        draw.maybe(attention, HEADS_SHARE, gate_source="query")
    elif attention.get("kind") == "gqa":
        draw.maybe(attention, STREAMS_SHARE, key_bias=True)


KEYS_SHARE = 0.25


def add_shared_keys(draw: Draw, model: dict[str, Any]) -> None:
    """Write layers that read the keys and values of earlier ones, in their stage or after it, of one or of two groups."""
    attention, attends = model.get("attention", {}), _attends(model)
    if _has_equal_keys(attention) and len(attends) > 1 and draw.chance(KEYS_SHARE):
        source, *rest = attends[draw.randint(0, len(attends) - 2) :]
        readers = draw.some(rest) or rest[:1]
        attention["shared_keys"] = [{"source": source, "layers": readers}]
        others = [layer for layer in rest if layer not in readers]
        if len(others) > 1 and draw.chance(0.5):
            attention["shared_keys"].append({"source": others[0], "layers": draw.some(others[1:]) or others[1:2]})


def _attends(model: dict[str, Any]) -> list[int]:
    letters = model["pattern"].upper().replace("|", "")
    letters = (letters * model["num_layers"])[: model["num_layers"]]
    return [layer for layer, letter in enumerate(letters) if letter == "A"]


def _has_equal_keys(attention: dict[str, Any]) -> bool:
    """True if all layers of grouped-query attention have equal keys, each head for itself."""
    own = {"key_bias", "layer_heads", "windows"} | ({"full_layers"} if attention.get("full_layers") else set())
    return attention.get("kind") == "gqa" and not attention.keys() & own and attention.get("qk_norm_width", "head") == "head"


def add_shared(draw: Draw, model: dict[str, Any], *, stages: int) -> None:
    """Options that megarun does not build: chosen or compressed keys, a layer before the head."""
    letters = model["pattern"].upper().replace("|", "")
    letters = (letters * model["num_layers"])[: model["num_layers"]]
    attention, attends = model.get("attention", {}), _attends(model)
    dense = [layer for layer, letter in enumerate(letters) if letter == "D"]
    if dense and draw.chance(STREAMS_SHARE):
        width = 2 * model["mlp"]["ffn_hidden_size"]
        model["mlp"]["layer_widths"] = [{"layers": draw.some(dense) or dense[:1], "ffn_hidden_size": width}]
    moe = model.get("moe", {})
    if moe.get("shared_ffn_hidden_size") and not moe.get("null_experts"):
        draw.maybe(moe, HEADS_SHARE, own_norms=True)
    if _has_equal_keys(attention) and "shared_keys" not in attention:
        _add_chosen(draw, attention, attends)
    placed = {"norm", "norm_placement", "parallel_layers", "post_norm_layers", "added_norm_layers", "norm_gate", "streams"}
    if "mtp" not in model.get("features", {}):
        head_layer = {"activation": draw.choice(["gelu", "silu", "relu"]), "bias": draw.chance(0.5)}
        head_layer["logits_bias"] = bool(model.get("tie_embeddings")) and draw.chance(0.5)
        draw.maybe(model, STREAMS_SHARE, head_layer=head_layer)
        if not model.keys() & placed:
            draw.maybe(model, STREAMS_SHARE, unnormed_layers=draw.some(range(model["num_layers"])) or [0])
    features = model.setdefault("features", {})
    if stages == 1 and not features.keys() - {"relation_bias"} and not model.keys() & {"streams", "parallel_layers"}:
        layers = draw.some(range(model["num_layers"])) or [0]
        rows = {"num_rows": model["vocab_size"], "dim": draw.wide(2, 9), "layers": layers}
        draw.maybe(features, STREAMS_SHARE * 2, layer_embeddings=rows)
    if not features:
        del model["features"]


def _add_chosen(draw: Draw, attention: dict[str, Any], attends: list[int]) -> None:
    """Blocks of keys that an indexer chooses, or compressed keys with latent queries and outputs of groups."""
    if draw.chance(STREAMS_SHARE * 2):
        sizes = {"num_heads": attention["num_kv_heads"], "head_dim": draw.wide(2, 9), "block_size": 4, "top_blocks": 2}
        attention["block_indexer"] = sizes | {"layers": draw.some(attends) or attends[:1]}
    elif draw.chance(STREAMS_SHARE * 2) and not attention.keys() & {"value_norm", "value_head_dim"} and not attention.get("bias"):
        attention |= {"query_rank": draw.wide(2, 20), "output_groups": attention["num_kv_heads"], "output_rank": draw.wide(2, 9)}
        attention |= {"values_are_keys": True, "qk_norm": True, "query_norm_scale": False, "qk_norm_scale": True}
        chosen = {"overlaps": True, "top_k": 3, "index_heads": 2, "index_dim": 4} if draw.chance(0.5) else {}
        attention["compressors"] = [{"layers": draw.some(attends) or attends[:1], "rate": draw.choice([2, 4]), **chosen}]


def add_latents(draw: Draw, model: dict[str, Any]) -> None:
    """Options that megarun does not build: norms of rotary keys, and other heads and latents of single layers."""
    attention = model.get("attention", {})
    if attention.get("kind") != "mla" or not draw.chance(HEADS_SHARE):
        return
    draw.maybe(attention, 0.5, rotary_norm=True)
    letters = model["pattern"].upper().replace("|", "")
    letters = (letters * model["num_layers"])[: model["num_layers"]]
    layers = draw.some([layer for layer, letter in enumerate(letters) if letter == "A"])
    if not layers:
        return
    own: dict[str, Any] = {"layers": layers, "kv_lora_rank": attention["kv_lora_rank"] + 2}
    if "relation_bias" not in model.get("features", {}):
        draw.maybe(own, 0.5, num_heads=2 * attention["num_heads"])
    draw.maybe(own, 0.5, v_head_dim=attention["v_head_dim"] + 1)
    draw.maybe(own, 0.5, qk_nope_head_dim=attention["qk_nope_head_dim"] + 3)
    if attention["q_lora_rank"]:
        draw.maybe(own, 0.5, q_lora_rank=attention["q_lora_rank"] + 1)
    if "indexer" not in attention:
        draw.maybe(own, 0.5, qk_rope_head_dim=attention["qk_rope_head_dim"] + 2)
    attention["layer_latents"] = [own]


def _add_heads(draw: Draw, model: dict[str, Any], attention: dict[str, Any]) -> None:
    """Heads of single layers, widths of values, and gates and rotated parts that differ from the layers' first form."""
    width, groups = attention["head_dim"], attention["num_kv_heads"]
    draw.maybe(attention, 0.5, value_head_dim=lambda: max(1, width + draw.randint(-2, 3)))
    if draw.chance(0.5):
        attention |= {"gate": True, "gate_width": "head"}
    takes = draw.chance(0.6)
    attention |= {"value_norm": True} if takes else {}
    if takes and "value_head_dim" not in attention:
        attention |= {"qk_norm": True, "qk_norm_width": "head"}
        attention["values_from_keys"] = draw.chance(0.5)
    takes = takes and "value_head_dim" not in attention
    if attention.get("window_size") and width >= 2 and width % 2 == 0 and draw.chance(0.5):
        attention["window_rope_theta"] = 500.0
        attention["window_rotary_dim"] = 2 * draw.randint(1, width // 2)
    letters = model["pattern"].upper().replace("|", "")
    letters = (letters * model["num_layers"])[: model["num_layers"]]
    layers = draw.some([layer for layer, letter in enumerate(letters) if letter == "A"])
    if not layers:
        return
    own: dict[str, Any] = {"layers": layers}
    if "relation_bias" not in model.get("features", {}):
        own |= {"num_kv_heads": 2 * groups, "num_heads": 2 * groups * draw.randint(1, 3)} if draw.chance(0.6) else {}
    draw.maybe(own, 0.5, head_dim=width + 2, sinks=lambda: draw.chance(0.5))
    if takes:
        own["values_from_keys"] = draw.chance(0.6)
    else:
        draw.maybe(own, 0.3, value_head_dim=lambda: width + draw.randint(1, 4))
    attention["layer_heads"] = [own]
