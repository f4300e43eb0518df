"""Random small configs of every model type that imports, as people and transformers write them.

The file is one table and the draws that its rows are composed of, which share the helpers at its top; it grows by a few lines a type.
"""

from collections.abc import Callable
from random import Random
from typing import Any

Config = dict[str, Any]


def _sizes(draw: Random, *, tie: bool | None = None) -> Config:
    heads = draw.choice([2, 3, 4, 6])
    kv_heads = draw.choice([count for count in (1, 2, 3, heads) if heads % count == 0])
    return {
        "vocab_size": draw.choice([97, 128, 250]),
        "hidden_size": heads * 2 * draw.randint(4, 10),
        "num_hidden_layers": draw.randint(1, 7),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": draw.randint(8, 90),
        "tie_word_embeddings": draw.random() < 0.5 if tie is None else tie,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _flag(draw: Random) -> bool:
    return draw.random() < 0.5


def _dense(*flags: str, head_dim: bool = False, always_head_dim: bool = False, **fixed: Any) -> Callable[[Random], Config]:
    """Decoders of attention and an MLP."""

    def make(draw: Random) -> Config:
        config = _sizes(draw) | {name: _flag(draw) for name in flags} | fixed
        if always_head_dim or (head_dim and _flag(draw)):
            config["head_dim"] = 2 * draw.randint(3, 20)
        return config

    return make


def _windowed(make: Callable[[Random], Config]) -> Callable[[Random], Config]:
    """The config with a list of layers, or with the one that the class derives."""

    def made(draw: Random) -> Config:
        config = make(draw)
        if _flag(draw):
            kinds = ("sliding_attention", "full_attention")
            config["layer_types"] = [draw.choice(kinds) for _ in range(config["num_hidden_layers"])]
        return config

    return made


def _qwen_window(make: Callable[[Random], Config]) -> Callable[[Random], Config]:
    def made(draw: Random) -> Config:
        return make(draw) | {"use_sliding_window": _flag(draw), "sliding_window": 16, "max_window_layers": draw.randint(0, 5)}

    return made


def _routed(
    count: str, width: str | None, top_k: str = "num_experts_per_tok", *flags: str, head_dim: bool = False
) -> Callable[[Random], Config]:
    """Decoders of attention and experts."""

    def make(draw: Random) -> Config:
        config = _dense(*flags, head_dim=head_dim)(draw)
        config |= {count: draw.randint(2, 6), top_k: draw.randint(1, 2)}
        if width is not None:
            config[width] = draw.randint(6, 40)
        return config

    return make


def _and(make: Callable[[Random], Config], more: Callable[[Random, Config], Config]) -> Callable[[Random], Config]:
    def made(draw: Random) -> Config:
        config = make(draw)
        return config | more(draw, config)

    return made


def _qwen_layers(draw: Random, config: Config) -> Config:
    layers = config["num_hidden_layers"]
    return {"decoder_sparse_step": draw.randint(1, 3), "mlp_only_layers": draw.sample(range(layers), draw.randint(0, min(2, layers)))}


def _shared(draw: Random, config: Config) -> Config:
    return {"n_shared_experts": draw.randint(1, 3), "first_k_dense_replace": draw.randint(0, config["num_hidden_layers"])}


def _latent(draw: Random) -> Config:
    config = _routed("n_routed_experts", "moe_intermediate_size")(draw)
    config["num_key_value_heads"] = config["num_attention_heads"]
    config |= {
        "kv_lora_rank": draw.randint(8, 24),
        "q_lora_rank": draw.choice([None, draw.randint(8, 24)]),
        "qk_nope_head_dim": draw.randint(4, 12),
        "qk_rope_head_dim": 2 * draw.randint(2, 6),
        "v_head_dim": draw.randint(4, 12),
        "n_group": 1,
        "topk_group": 1,
        "attention_bias": _flag(draw),
    }
    return config | _shared(draw, config)


def _sparse(draw: Random) -> Config:
    config = _latent(draw) | {"attention_bias": False, "index_n_heads": draw.randint(1, 4), "index_topk": 8}
    config["q_lora_rank"] = config["q_lora_rank"] or 8
    return config | {"index_head_dim": config["qk_rope_head_dim"] + draw.randint(0, 8)}


def _shared_indexers(draw: Random) -> Config:
    return _sparse(draw) | ({"index_topk_freq": draw.randint(1, 3)} if _flag(draw) else {})


def _mamba_sizes(draw: Random, prefix: str = "mamba_") -> Config:
    heads = draw.choice([2, 4, 6])
    groups = draw.choice([count for count in (1, 2, heads) if heads % count == 0])
    return {
        f"{prefix}n_heads": heads,
        f"{prefix}d_head": 4 * draw.randint(1, 4),
        f"{prefix}n_groups": groups,
        f"{prefix}d_state": draw.randint(4, 16),
        f"{prefix}d_conv": draw.randint(2, 4),
        f"{prefix}conv_bias": _flag(draw),
        f"{prefix}chunk_size": 16,
    }


def _mixed(draw: Random, *, expand: bool = True) -> Config:
    config = _dense("attention_bias")(draw) | _mamba_sizes(draw)
    if expand:
        config |= {"mamba_expand": 2, "mamba_d_head": "auto", "mamba_n_heads": 2 * config["num_attention_heads"], "mamba_n_groups": 1}
    return config


def _bamba(draw: Random) -> Config:
    config = _mixed(draw) | {"mlp_bias": _flag(draw), "mamba_proj_bias": _flag(draw)}
    layers = config["num_hidden_layers"]
    return config | {"attn_layer_indices": sorted(draw.sample(range(layers), draw.randint(0, layers)))}


def _granite_hybrid(draw: Random) -> Config:
    config = _mixed(draw) | {"num_local_experts": draw.choice([0, 4]), "num_experts_per_tok": 2, "mamba_proj_bias": _flag(draw)}
    kinds = draw.choice([("mamba", "attention"), ("linear_attention", "full_attention")])
    config["layer_types"] = [draw.choice(kinds) for _ in range(config["num_hidden_layers"])]
    return config | {"shared_intermediate_size": draw.randint(8, 40), "position_embedding_type": draw.choice([None, "rope"])}


_FALCON_FLAGS = "multi_query", "bias", "new_decoder_architecture"


def _falcon(draw: Random) -> Config:
    config = _mixed(draw, expand=False)
    inner = config["mamba_n_heads"] * config["mamba_d_head"]
    bias = _flag(draw)
    return config | {
        "mamba_d_ssm": inner, "mamba_rms_norm": _flag(draw), "mlp_bias": _flag(draw), "mamba_proj_bias": bias, "projectors_bias": bias,
        **({"head_dim": 2 * draw.randint(3, 9)} if _flag(draw) else {}),
        **(_falcon_factors(draw) if _flag(draw) else {}),
    }  # fmt: skip


def _falcon_factors(draw: Random) -> Config:
    """Factors of projections, each apart from the others."""
    names = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    one = {f"{name}_multiplier": draw.choice([0.25, 0.7, 1.0, 1.3]) for name in names}
    return one | {"mlp_multipliers": [0.8, 0.3], "ssm_multipliers": [0.35, 0.25, 1.2, 0.5, 0.7]}


def _mamba2(draw: Random) -> Config:
    heads = draw.choice([2, 4, 8])
    head_dim = 4 * draw.randint(1, 5)
    return {
        "vocab_size": 120, "hidden_size": heads * head_dim // 2, "num_hidden_layers": draw.randint(1, 5), "num_heads": heads,
        "head_dim": head_dim, "expand": 2, "state_size": draw.randint(4, 16), "n_groups": draw.choice([1, 2]),
        "conv_kernel": draw.randint(2, 4),
        "use_bias": _flag(draw), "use_conv_bias": _flag(draw), "tie_word_embeddings": _flag(draw),
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def _nemotron_h(draw: Random) -> Config:
    config = _dense(head_dim=True)(draw)
    pattern = "".join(draw.choice("M*-E") for _ in range(config.pop("num_hidden_layers")))
    names = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"} if _flag(draw) else {
        "M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"
    }  # fmt: skip
    layers = {"hybrid_override_pattern": pattern} if _flag(draw) else {"layers_block_type": [names[letter] for letter in pattern]}
    heads = draw.choice([2, 4])
    config |= layers
    return config | {
        "mamba_num_heads": heads, "mamba_head_dim": 4 * draw.randint(1, 5), "ssm_state_size": draw.randint(4, 16),
        "n_groups": draw.choice([1, 2]),
        "conv_kernel": draw.randint(2, 4), "use_bias": _flag(draw), "use_conv_bias": _flag(draw), "n_routed_experts": draw.randint(2, 6),
        "moe_intermediate_size": draw.randint(8, 30), "moe_shared_expert_intermediate_size": draw.randint(8, 30),
        "moe_latent_size": draw.choice([None, draw.randint(8, 30)]), "mlp_bias": "E" not in pattern and _flag(draw), "chunk_size": 16,
    }  # fmt: skip


def _ernie_moe(draw: Random) -> Config:
    config = _routed("moe_num_experts", "moe_intermediate_size", "moe_k")(draw)
    return config | {
        "moe_num_shared_experts": draw.randint(1, 3), "moe_layer_start_index": draw.randint(0, 3), "moe_layer_interval": draw.randint(1, 2),
        "moe_layer_end_index": draw.choice([-1, 4]),
    }  # fmt: skip


def _partial(draw: Random, _config: Config) -> Config:
    return {"partial_rotary_factor": draw.choice([0.5, 1.0])} if _flag(draw) else {}


def _hunyuan(draw: Random) -> Config:
    return _dense("attention_bias")(draw) | {"head_dim": 2 * draw.randint(3, 20)}


def _hunyuan_moe(draw: Random) -> Config:
    return _hunyuan(draw) | {"num_experts": draw.randint(2, 5), "moe_topk": draw.randint(1, 2)}


def _gpt2(draw: Random) -> Config:
    heads = draw.randint(1, 5)
    return {
        "vocab_size": 120, "n_embd": heads * 2 * draw.randint(2, 9), "n_layer": draw.randint(1, 6), "n_head": heads,
        "n_positions": draw.randint(16, 90), "n_inner": draw.choice([None, draw.randint(9, 60)]), "tie_word_embeddings": _flag(draw),
    }  # fmt: skip


def _older(heads: str, layers: str, width: str, inner: str, *flags: str, **more: Any) -> Callable[[Random], Config]:
    """Decoders with LayerNorm under their own names; `inner` is empty for a class whose MLP is four times as wide."""

    def make(draw: Random) -> Config:
        count = draw.choice([1, 2, 4, 6])
        config = {"vocab_size": 120, width: count * 8 * draw.randint(1, 3), layers: draw.randint(1, 6), heads: count}
        config |= {inner: draw.choice([None, draw.randint(9, 60)])} if inner else {}
        return config | {"tie_word_embeddings": _flag(draw)} | {name: _flag(draw) for name in flags} | more

    return make


def _opt(draw: Random, config: Config) -> Config:
    return {"ffn_dim": draw.randint(9, 60), "word_embed_proj_dim": draw.choice([None, config["hidden_size"]])}


def _dbrx(draw: Random, config: Config) -> Config:
    experts = {"moe_num_experts": draw.randint(2, 6), "moe_top_k": 2, "ffn_hidden_size": draw.randint(9, 60)}
    heads = {"kv_n_heads": draw.choice([1, config["n_heads"]]), "clip_qkv": 8, "rope_theta": 5e5}
    return {"tie_word_embeddings": False, "attn_config": heads} | ({"ffn_config": experts} if _flag(draw) else {})


def _even_heads(draw: Random, config: Config) -> Config:
    return {"head_dim": config["hidden_size"] // config["num_attention_heads"]}


def _neo_layers(draw: Random, config: Config) -> Config:
    names = [draw.choice(("global", "local")) for _ in range(config["num_layers"])]
    return {"attention_types": [[[name], 1] for name in names], "window_size": 16, "max_position_embeddings": draw.randint(20, 90)}


def _falcon_decoder(draw: Random, config: Config) -> Config:
    heads = config["num_attention_heads"]
    newer = config["new_decoder_architecture"]
    return {
        "num_kv_heads": draw.choice([None, *(count for count in (1, 2, heads) if heads % count == 0)]) if newer else None,
        "num_ln_in_parallel_attn": draw.choice([None, 1, 2]) if newer else None,
        "parallel_attn": newer or _flag(draw),
        "alibi": _flag(draw) and not newer,
    }


def _rotary(draw: Random, _config: Config) -> Config:
    return {"head_dim": 16, "rotary_dim": draw.choice([8, 16])}


def _mixer_types(draw: Random, layers: int, *names: str) -> list[str]:
    """Layers of two kinds, each at least once where there are two layers."""
    kinds = [draw.choice(names) for _ in range(layers)]
    if layers > 1 and len(set(kinds)) == 1:
        kinds[draw.randrange(layers)] = names[0] if kinds[0] == names[1] else names[1]
    return kinds


def _delta(draw: Random, config: Config) -> Config:
    key_heads = draw.choice([1, 2, 3])
    found = {
        "linear_num_key_heads": key_heads, "linear_num_value_heads": key_heads * draw.randint(1, 3),
        "linear_key_head_dim": draw.randint(3, 12), "linear_value_head_dim": draw.randint(3, 12),
        "linear_conv_kernel_dim": draw.randint(2, 5), "head_dim": 8 * draw.randint(1, 3),
    }  # fmt: skip
    if _flag(draw):
        found["layer_types"] = _mixer_types(draw, config["num_hidden_layers"], "linear_attention", "full_attention")
    elif _flag(draw):
        found["full_attention_interval"] = draw.randint(2, 4)
    return found


def _qwen_experts(draw: Random, _config: Config) -> Config:
    return {
        "num_experts": draw.randint(2, 6), "num_experts_per_tok": draw.randint(1, 2), "moe_intermediate_size": draw.randint(6, 40),
        "shared_expert_intermediate_size": draw.randint(6, 40),
    }  # fmt: skip


def _olmo_hybrid(draw: Random) -> Config:
    config = _dense("attention_bias", "linear_allow_neg_eigval")(draw)
    config["num_hidden_layers"] = draw.randint(2, 7)
    config |= draw.choice([{}, {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}, {"rope_parameters": None}])
    if _flag(draw):
        heads = draw.randint(1, 3)
        config |= {"linear_num_key_heads": heads, "linear_num_value_heads": heads * draw.randint(1, 2)}
        config |= {"linear_key_head_dim": draw.randint(3, 12)} if _flag(draw) else {}
        config |= {"linear_value_head_dim": draw.randint(3, 12)} if _flag(draw) else {}
    if _flag(draw):
        config["layer_types"] = _mixer_types(draw, config["num_hidden_layers"], "linear_attention", "full_attention")
    return config


def _kimi(draw: Random) -> Config:
    config = _latent(draw) | {"num_hidden_layers": draw.randint(1, 7)}
    for old, new in (
        ("n_routed_experts", "num_experts"),
        ("num_experts_per_tok", "num_experts_per_token"),
        ("n_shared_experts", "num_shared_experts"),
    ):
        config[new] = config.pop(old)
    layers, first = config["num_hidden_layers"], config.pop("first_k_dense_replace")
    config |= {"first_k_dense_replace": min(first, layers)} if _flag(draw) else {}
    inside: Config = {"num_heads": draw.randint(1, 4), "head_dim": 2 * draw.randint(2, 7), "short_conv_kernel_size": draw.randint(2, 4)}
    if not _flag(draw):
        return config | {f"linear_{name}": inside[name] for name in ("num_heads", "head_dim")}
    if _flag(draw):
        attends = draw.sample(range(1, layers + 1), draw.randint(0, layers))
        inside |= {"full_attn_layers": sorted(attends), "kda_layers": [one for one in range(1, layers + 1) if one not in attends]}
    return config | {"linear_attn_config": inside}


def _mamba1(draw: Random) -> Config:
    return {
        "vocab_size": 120, "hidden_size": 4 * draw.randint(3, 20), "num_hidden_layers": draw.randint(1, 5),
        "state_size": draw.randint(4, 16), "expand": draw.randint(1, 3), "conv_kernel": draw.randint(2, 4), "use_bias": _flag(draw),
        "use_conv_bias": _flag(draw), "time_step_rank": draw.choice(["auto", draw.randint(2, 9)]), "tie_word_embeddings": _flag(draw),
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def _jamba(draw: Random) -> Config:
    attends, routes = draw.randint(1, 4), draw.randint(1, 3)
    return _dense()(draw) | {
        "num_experts": draw.randint(1, 5), "num_experts_per_tok": 1, "attn_layer_period": attends,
        "attn_layer_offset": draw.randrange(attends), "expert_layer_period": routes, "expert_layer_offset": draw.randrange(routes),
        "mamba_d_state": draw.randint(4, 16), "mamba_d_conv": draw.randint(2, 4), "mamba_expand": draw.randint(1, 3),
        "mamba_dt_rank": draw.choice(["auto", draw.randint(2, 9)]), "mamba_conv_bias": _flag(draw), "mamba_proj_bias": _flag(draw),
    }  # fmt: skip


def _lfm2(draw: Random) -> Config:
    config = _dense("conv_bias", "block_auto_adjust_ff_dim")(draw)
    layers = config["num_hidden_layers"]
    config |= {"conv_L_cache": draw.randint(2, 5), "block_multiple_of": draw.choice([4, 7, 16])}
    config |= {"block_ffn_dim_multiplier": draw.choice([0.7, 1.0, 1.3])} if _flag(draw) else {}
    if _flag(draw):
        config["block_ff_dim"] = config.pop("intermediate_size")
    if _flag(draw):
        config["tie_embedding"] = config.pop("tie_word_embeddings")
    if _flag(draw):
        return config | {"layer_types": _mixer_types(draw, layers, "conv", "full_attention")}
    return config | ({"full_attn_idxs": sorted(draw.sample(range(layers), draw.randint(0, layers)))} if _flag(draw) else {})


def _lfm2_moe(draw: Random) -> Config:
    config = _dense("conv_bias", "use_expert_bias", "norm_topk_prob")(draw)
    layers = config["num_hidden_layers"]
    return config | {
        "conv_L_cache": draw.randint(2, 5), "num_dense_layers": draw.randint(0, layers), "num_experts": draw.randint(2, 5),
        "num_experts_per_tok": draw.randint(1, 2), "moe_intermediate_size": draw.randint(6, 40),
        "layer_types": _mixer_types(draw, layers, "conv", "full_attention"),
    }  # fmt: skip


def _listed_mlps(draw: Random, config: Config) -> Config:
    kinds = [draw.choice(("dense", "sparse")) for _ in range(config["num_hidden_layers"])]
    return {"mlp_layer_types": kinds} if _flag(draw) else {}


def _afmoe(draw: Random, config: Config) -> Config:
    dense = draw.randint(0, config["num_hidden_layers"])
    return {"num_shared_experts": draw.randint(1, 3), "num_dense_layers": dense, "global_attn_every_n_layers": draw.randint(1, 4)}


def _exaone_moe(draw: Random, config: Config) -> Config:
    return {"num_shared_experts": draw.randint(1, 3), "first_k_dense_replace": draw.randint(0, config["num_hidden_layers"])}


def _hy_v3(draw: Random, config: Config) -> Config:
    return {"num_shared_experts": draw.randint(1, 3), **_listed_mlps(draw, config)}


def _llama4(draw: Random, _config: Config) -> Config:
    return {"interleave_moe_layer_step": draw.randint(1, 3), "attention_chunk_size": draw.choice([None, 16])}


def _one_bias(draw: Random, _config: Config) -> Config:
    bias = _flag(draw)
    return {"attention_bias": bias, "mlp_bias": bias}


def _latent_dense(draw: Random) -> Config:
    named = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group", "n_shared_experts")
    return {key: value for key, value in _latent(draw).items() if key not in (*named, "first_k_dense_replace")}


def _glm_lite(draw: Random) -> Config:
    config = _latent(draw)
    del config["first_k_dense_replace"]
    return config | _listed_mlps(draw, config)


def _flint(draw: Random, config: Config) -> Config:
    dense = {"mlp_only_layers": sorted(draw.sample(range(config["num_hidden_layers"]), 1))} if _flag(draw) else {}
    return {"shared_expert_intermediate_size": draw.randint(6, 30), **dense}


def _lara(draw: Random, config: Config) -> Config:
    kinds = ("linear_attention", "sliding_attention", "full_attention")
    listed = {"layer_types": [draw.choice(kinds) for _ in range(config["num_hidden_layers"])]} if _flag(draw) else {"layer_types": None}
    return {"shared_expert_intermediate_size": draw.randint(6, 30), "sliding_window": 16, **listed}


def _cohere_moe(draw: Random, config: Config) -> Config:
    given = {"first_k_dense_replace": draw.randint(0, config["num_hidden_layers"])} if _flag(draw) else _listed_mlps(draw, config)
    given |= {"prefix_dense_intermediate_size": draw.randint(8, 60)} if _flag(draw) else {}
    return given | {
        "num_shared_experts": draw.randint(0, 2), "rms_norm_eps": draw.choice([None, 1e-6]),
        "expert_selection_fn": draw.choice(["softmax", "sigmoid"]), "shared_expert_combination_strategy": draw.choice(["average", "sum"]),
        "prefix_dense_sliding_window_pattern": draw.randint(1, 2),
    }  # fmt: skip


def _mimo(draw: Random, config: Config) -> Config:
    heads = 2 * config["num_key_value_heads"]
    listed = _listed_mlps(draw, config)
    return {"num_attention_heads": heads * draw.randint(1, 2), "head_dim": 16, "v_head_dim": draw.choice([8, 12]), **listed}


def _laguna(draw: Random, config: Config) -> Config:
    groups = config["num_key_value_heads"]
    counts = [groups * draw.randint(1, 3) for _ in range(config["num_hidden_layers"])]
    gating = draw.choice([True, "per-head", "per-element"])
    more = {"num_attention_heads_per_layer": counts} if _flag(draw) else {}
    return {"head_dim": 16, "shared_expert_intermediate_size": draw.randint(6, 30), "gating": gating, **more, **_listed_mlps(draw, config)}


def _step(draw: Random, config: Config) -> Config:
    own = {"num_sliding_attention_heads": config["num_key_value_heads"] * draw.randint(1, 3)} if _flag(draw) else {}
    return {"head_dim": 16, "share_expert_dim": draw.randint(6, 30), "sliding_window": 16, **own, **_listed_mlps(draw, config)}


def _by_kind(draw: Random, config: Config) -> Config:
    """Layers of two kinds, and rotary parameters of each, null for a kind that does not turn."""
    kinds = ("sliding_attention", "full_attention")
    bases = [draw.choice([None, {"rope_type": "default", "rope_theta": 1000.0 * draw.randint(1, 2)}]) for _ in kinds]
    listed = [draw.choice(kinds) for _ in range(config["num_hidden_layers"])]
    return {"layer_types": listed, "rope_parameters": dict(zip(kinds, bases, strict=True)), "sliding_window": 16}


def _lfm3(draw: Random) -> Config:
    config = _dense("conv_bias", "use_sandwich_norm", "use_attention_gate", "attention_bias")(draw)
    kinds = ("conv", "sliding_attention", "full_attention")
    listed = {"layer_types": [draw.choice(kinds) for _ in range(config["num_hidden_layers"])]} if _flag(draw) else {}
    return config | {"conv_L_cache": draw.randint(2, 5), "head_dim": 4 * draw.randint(2, 6), **listed}


def _minicpm3(draw: Random) -> Config:
    factors = {"scale_depth": draw.choice([None, 1.4]), "dim_model_base": draw.choice([None, 8])}
    return _latent_dense(draw) | {"mlp_bias": _flag(draw), "v_head_dim": draw.choice([None, draw.randint(4, 12)]), **factors}


def _gemma4(draw: Random, config: Config) -> Config:
    same, groups = _flag(draw), config["num_key_value_heads"]
    own = {"global_head_dim": 8 * draw.randint(4, 6)} if _flag(draw) else {}  # a saved config without a difference loads as 512
    own |= {"num_global_key_value_heads": draw.choice([1, groups])} if _flag(draw) else {}
    return {"head_dim": 8 * draw.randint(2, 3), "attention_k_eq_v": same, "sliding_window": 16, **own}


def _gemma4_plain(draw: Random, config: Config) -> Config:
    found = _gemma4(draw, config) | {"hidden_size_per_layer_input": draw.choice([0, 2 * draw.randint(1, 5)])}
    found |= {"vocab_size_per_layer_input": draw.choice([50, 97])}
    if _flag(draw):
        found |= {
            "enable_moe_block": True,
            "num_experts": draw.randint(2, 6),
            "top_k_experts": 2,
            "moe_intermediate_size": draw.randint(4, 20),
        }
    return found | _shared_keys(draw, config, doubled=not found.get("enable_moe_block"))


def _shared_keys(draw: Random, config: Config, *, doubled: bool) -> Config:
    """Layers whose last ones read the keys of earlier ones; each kind has one with keys of its own."""
    layers = config["num_hidden_layers"] + 4
    kinds = ["full_attention", "sliding_attention", *(draw.choice(("full_attention", "sliding_attention")) for _ in range(layers - 2))]
    shared = {"num_kv_shared_layers": draw.randint(0, layers - 2), "use_double_wide_mlp": doubled and _flag(draw)}
    return {"num_hidden_layers": layers, "layer_types": kinds, **shared}


def _axk1(draw: Random) -> Config:
    return _latent(draw) | {"q_lora_rank": draw.randint(8, 24)}


def _longcat(draw: Random) -> Config:
    config = _latent(draw)
    names = ("n_shared_experts", "first_k_dense_replace", "moe_intermediate_size", "num_experts_per_tok", "n_group", "topk_group")
    config = {key: value for key, value in config.items() if key not in (*names, "num_hidden_layers", "intermediate_size")}
    sizes = {"num_layers": draw.randint(1, 4), "ffn_hidden_size": draw.randint(8, 60), "expert_ffn_hidden_size": draw.randint(6, 40)}
    rank, turned = config["q_lora_rank"] or 8, config["qk_rope_head_dim"]
    return config | sizes | {"q_lora_rank": rank, "head_dim": turned, "moe_topk": draw.randint(1, 2), "zero_expert_num": draw.randint(0, 2)}


def _hy_v4(draw: Random, config: Config) -> Config:
    layers = config["num_hidden_layers"]
    kinds = ["full", *(draw.choice(("full", "shared")) for _ in range(layers - 1))]
    return {"hc_mult": draw.randint(2, 4), **({"indexer_types": kinds} if _flag(draw) else {}), **_listed_mlps(draw, config)}


def _without(make: Callable[[Random], Config], *names: str) -> Callable[[Random], Config]:
    return lambda draw: {key: value for key, value in make(draw).items() if key not in names}


def _axk2(draw: Random) -> Config:
    config = _without(_sparse, "first_k_dense_replace", "mlp_bias")(draw)
    return config | {"gated_norm_rank": draw.randint(2, 9), "n_group": None, "topk_group": None, **_listed_mlps(draw, config)}


def _beam(draw: Random, config: Config) -> Config:
    kinds = ("sliding_attention", "full_attention")
    listed = {"layer_types": [draw.choice(kinds) for _ in range(config["num_hidden_layers"])]} if _flag(draw) else {}
    dense = [draw.choice(("dense", "sparse")) for _ in range(config["num_hidden_layers"])]
    return {"n_group": 1, "topk_group": 1, **listed, **({"mlp_layer_types": dense} if _flag(draw) else {})}


def _bailing(draw: Random) -> Config:
    config = _latent(draw)
    config |= {"num_experts": config.pop("n_routed_experts"), "num_shared_experts": config.pop("n_shared_experts")}
    sizes = {"head_dim": 2 * draw.randint(2, 9), "short_conv_kernel_size": draw.randint(2, 4), "layer_group_size": draw.randint(1, 4)}
    return config | sizes | _listed_mlps(draw, config)


def _dots3(draw: Random) -> Config:
    config = _without(_sparse, "first_k_dense_replace", "mlp_bias")(draw)
    layers, heads = config["num_hidden_layers"], draw.choice([1, 2, 4])
    nope, turned = draw.randint(4, 12), 2 * draw.randint(2, 6)
    own = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": draw.randint(8, 24),
        "v_head_dim": draw.randint(4, 12),
    }
    own |= {"kv_lora_rank": draw.randint(8, 24), "qk_nope_head_dim": nope, "head_dim": nope + turned}
    kinds = ("indexed_attention", "sliding_attention", "full_attention")
    config |= {f"swa_{name}": value for name, value in own.items()} | {"shared_experts_intermediate_size": draw.randint(6, 30)}
    config |= {"layer_types": [draw.choice(kinds) for _ in range(layers)]} if _flag(draw) else {}
    config |= {"use_dsa": False} if _flag(draw) else {}
    return config | {"n_shared_experts": draw.randint(1, 3), "attention_bias": _flag(draw), **_listed_mlps(draw, config)}


def _minimax(draw: Random, config: Config) -> Config:
    kinds = ("linear_attention", "full_attention")
    listed = {"layer_types": [draw.choice(kinds) for _ in range(config["num_hidden_layers"])]} if _flag(draw) else {}
    return {"block_size": draw.randint(4, 32), "sliding_window": draw.choice([None, 8]), **listed}


def _minimax_m3(draw: Random, config: Config) -> Config:
    layers, groups = config["num_hidden_layers"], config["num_key_value_heads"]
    sizes = {"head_dim": 8 * draw.randint(1, 3), "rotary_dim": 4, "index_n_heads": groups, "index_head_dim": 4 * draw.randint(2, 5)}
    sizes |= {"dense_intermediate_size": draw.randint(8, 60), "shared_intermediate_size": draw.randint(4, 30), "index_block_size": 4}
    marks = [draw.randint(0, 1) for _ in range(layers)]
    if _flag(draw):
        return sizes | {"layer_types": ["minimax_m3_sparse" if mark else "full_attention" for mark in marks], **_listed_mlps(draw, config)}
    older = {"sparse_attention_freq": marks, "sparse_num_index_heads": groups, "sparse_index_dim": 12}
    return sizes | {"sparse_attention_config": older, "moe_layer_freq": [draw.randint(0, 1) for _ in range(layers)]}


def _deepseek_v4(draw: Random, config: Config) -> Config:
    kinds = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    sizes = {"head_dim": 8 * draw.randint(2, 4), "q_lora_rank": draw.randint(8, 24), "o_lora_rank": draw.randint(4, 12), "hc_mult": 3}
    sizes |= {"o_groups": draw.choice([1, heads]), "index_n_heads": draw.randint(1, 4), "index_head_dim": 16, "num_key_value_heads": 1}
    sizes |= {"n_shared_experts": 1, "sliding_window": 8, "index_topk": 4, "qk_rope_head_dim": 8}
    if _flag(draw):
        listed = {"layer_types": [draw.choice(kinds) for _ in range(layers)]}
        rates = {"compressed_sparse_attention": draw.randint(2, 5), "heavily_compressed_attention": draw.randint(6, 9)}
        return sizes | listed | {"compress_rates": rates, "mlp_layer_types": [draw.choice(("hash_moe", "moe")) for _ in range(layers)]}
    return sizes | ({"compress_ratios": [draw.choice([0, 4, 128]) for _ in range(layers)]} if _flag(draw) else {})


_MOE = ("num_experts", "moe_intermediate_size", "num_experts_per_tok", "attention_bias")
_DEEPSEEK = ("n_routed_experts", "moe_intermediate_size", "num_experts_per_tok", "attention_bias")


def _modernbert_decoder(draw: Random) -> Config:
    heads = draw.choice([2, 3, 4])
    flags = ("norm_bias", "attention_bias", "mlp_bias", "decoder_bias", "classifier_bias", "tie_word_embeddings")
    config: Config = {name: _flag(draw) for name in flags} | {
        "vocab_size": draw.choice([97, 128]),
        "hidden_size": heads * 2 * draw.randint(4, 10),
        "num_attention_heads": heads,
        "num_hidden_layers": draw.randint(1, 7),
        "intermediate_size": draw.randint(8, 90),
        "local_attention": draw.choice([None, 16, 128]),
        "pad_token_id": 0,
    }
    if _flag(draw):
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [draw.choice(kinds) for _ in range(config["num_hidden_layers"])]
    elif _flag(draw):
        config["global_attn_every_n_layers"] = draw.randint(1, 4)
    return config


def _xlstm(draw: Random) -> Config:
    heads = draw.choice([2, 4])
    config: Config = {
        "vocab_size": draw.choice([97, 128]),
        "hidden_size": heads * 4 * draw.randint(2, 9),
        "num_heads": heads,
        "num_hidden_layers": draw.randint(1, 5),
        "qk_dim_factor": draw.choice([0.5, 1.0]),
        "v_dim_factor": draw.choice([1.0, 2.0]),
        "ffn_proj_factor": draw.choice([2.667, 2.0, 1.3]),
        "ffn_round_up_to_multiple_of": draw.choice([1, 8, 64]),
        "add_out_norm": _flag(draw),
        "weight_mode": draw.choice(["single", "fused"]),
    }
    return config


CONFIGS: dict[str, Callable[[Random], Config]] = {
    "axk1": _axk1,
    "bitnet": _dense("attention_bias", hidden_act="relu2"),
    "nanochat": _dense("attention_bias", hidden_act="relu2"),
    "bailing_hybrid": _bailing,
    "beam": _and(_routed("num_experts", "moe_intermediate_size", "num_experts_per_tok", "attention_bias", head_dim=True), _beam),
    "hy_v4": _and(_without(_sparse, "first_k_dense_replace"), _hy_v4),
    "axk2": _axk2,
    "doge": _dense("attention_bias", "mlp_bias"),
    "dots3_note_text": _dots3,
    "longcat_flash": _longcat,
    "apertus": _dense("attention_bias"),
    "apertus1p5_text": _dense("attention_bias"),
    "arcee": _dense("attention_bias", "mlp_bias", head_dim=True),
    "bamba": _bamba,
    "deepseek_v2": _latent,
    "deepseek_v3": _latent,
    "deepseek_v32": _sparse,
    "deepseek_v4": _and(_without(_routed(*_DEEPSEEK), "intermediate_size"), _deepseek_v4),
    "ernie4_5": _dense(head_dim=True, use_bias=False),
    "ernie4_5_moe": _ernie_moe,
    "exaone4": _windowed(_dense(head_dim=True)),
    "falcon": _and(
        _older("num_attention_heads", "num_hidden_layers", "hidden_size", "ffn_hidden_size", *_FALCON_FLAGS),
        _falcon_decoder,
    ),
    "falcon_h1": _falcon,
    "falcon_mamba": _mamba1,
    "gemma": _dense("attention_bias", head_dim=True),
    "gemma2": _windowed(_dense("attention_bias", head_dim=True)),
    "gemma3_text": _windowed(_dense("attention_bias", head_dim=True)),
    "glm": _and(_dense("attention_bias", head_dim=True), _partial),
    "glm4": _and(_dense("attention_bias", head_dim=True), _partial),
    "glm4_moe": _and(_routed("n_routed_experts", "moe_intermediate_size", "num_experts_per_tok", "attention_bias", "use_qk_norm"), _shared),
    "glm_moe_dsa": _shared_indexers,
    "gpt2": _gpt2,
    "helium": _and(_dense("attention_bias", "mlp_bias"), _even_heads),
    "mpt": _older("n_heads", "n_layers", "d_model", "", attn_config={"attn_pdrop": 0, "clip_qkv": 6.0}, no_bias=True),
    "olmo": _dense("attention_bias", clip_qkv=8.0),
    "opt": _and(_older("num_attention_heads", "num_hidden_layers", "hidden_size", "", "enable_bias", max_position_embeddings=40), _opt),
    "gpt_bigcode": _older("n_head", "n_layer", "n_embd", "n_inner", "multi_query", n_positions=40),
    "gpt_neo": _and(_older("num_heads", "num_layers", "hidden_size", "intermediate_size"), _neo_layers),
    "gpt_neox": _dense("use_parallel_residual", "attention_bias", num_key_value_heads=None),
    "gptj": _older("n_head", "n_layer", "n_embd", "n_inner", rotary_dim=4, tie_word_embeddings=False),
    "gpt_oss": _windowed(_routed("num_local_experts", None, "num_experts_per_tok", "attention_bias", head_dim=True)),
    "granite": _dense("attention_bias", "mlp_bias"),
    "granitemoe": _routed("num_local_experts", None, "num_experts_per_tok", "attention_bias"),
    "granitemoehybrid": _granite_hybrid,
    "bloom": _older("n_head", "n_layer", "hidden_size", ""),
    "codegen": _older("n_head", "n_layer", "n_embd", "n_inner", rotary_dim=4, tie_word_embeddings=False),
    "cohere": _dense("attention_bias"),
    "cohere2": _windowed(_dense("attention_bias")),
    "cohere2_moe": _and(
        _windowed(_routed("num_experts", None, "num_experts_per_tok", "attention_bias", "norm_topk_prob", head_dim=True)), _cohere_moe
    ),
    "gemma4_text": _and(_dense("attention_bias"), _gemma4_plain),
    "gemma4_unified_text": _and(
        _dense("attention_bias"), lambda draw, config: _gemma4(draw, config) | _shared_keys(draw, config, doubled=True)
    ),
    "cohere_compass_text": _and(_dense("attention_bias"), _by_kind),
    "lfm3": _lfm3,
    "minicpm3": _minicpm3,
    "laguna": _windowed(_and(_routed(*_MOE), _laguna)),
    "mimo_v2_flash": _windowed(_and(_routed(*_DEEPSEEK), _mimo)),
    "step3p5": _windowed(_and(_routed(*_DEEPSEEK), _step)),
    "granitemoeshared": _routed("num_local_experts", "shared_intermediate_size", "num_experts_per_tok", "attention_bias"),
    "hunyuan_v1_dense": _hunyuan,
    "hunyuan_v1_moe": _hunyuan_moe,
    "jamba": _jamba,
    "modernbert-decoder": _modernbert_decoder,
    "xlstm": _xlstm,
    "kimi_linear": _kimi,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "llama": _dense("attention_bias", "mlp_bias", head_dim=True),
    "mamba": _mamba1,
    "mamba2": _mamba2,
    "minimax": _and(_routed("num_local_experts", None, head_dim=True), _minimax),
    "minimax_m3_vl_text": _and(_routed("num_local_experts", None), _minimax_m3),
    "minimax_m2": _and(_routed("num_local_experts", None), _rotary),
    "ministral": _windowed(_dense(always_head_dim=True)),
    "mistral": _dense(head_dim=True),
    "mixtral": _routed("num_local_experts", None, head_dim=True),
    "nemotron": _and(_dense("attention_bias", "mlp_bias", head_dim=True), _partial),
    "nemotron_h": _nemotron_h,
    "olmo2": _dense("attention_bias"),
    "olmo3": _windowed(_dense("attention_bias")),
    "olmo_hybrid": _olmo_hybrid,
    "olmoe": _routed("num_experts", None, "num_experts_per_tok", "attention_bias"),
    "dbrx": _and(_older("n_heads", "n_layers", "d_model", ""), _dbrx),
    "persimmon": _and(_dense(num_key_value_heads=None, qk_layernorm=False, hidden_act="relu2"), _partial),
    "phi": _and(_dense(tie_word_embeddings=False), _partial),
    "phi3": _and(_dense(), _partial),
    "phimoe": _routed("num_local_experts", None, "num_experts_per_tok", "attention_bias"),
    "qwen2": _qwen_window(_dense()),
    "qwen2_moe": _and(_routed("num_experts", "moe_intermediate_size", "num_experts_per_tok", "qkv_bias"), _qwen_layers),
    "qwen3": _qwen_window(_dense("attention_bias", head_dim=True)),
    "qwen3_moe": _and(
        _routed("num_experts", "moe_intermediate_size", "num_experts_per_tok", "attention_bias", head_dim=True), _qwen_layers
    ),
    "qwen3_5_moe_text": _and(_and(_dense(), _delta), _qwen_experts),
    "qwen3_5_text": _and(_dense(), _delta),
    "qwen3_next": _and(_and(_and(_dense(), _delta), _qwen_experts), _qwen_layers),
    "seed_oss": _dense("attention_bias", "attention_out_bias", "mlp_bias", head_dim=True),
    "smollm3": _dense("attention_bias", "mlp_bias"),
    "stablelm": _dense("use_qkv_bias", "use_parallel_residual"),
    "starcoder2": _dense("use_bias"),
    "afmoe": _windowed(_and(_routed(*_MOE, "mup_enabled", head_dim=True), _afmoe)),
    "cwm": _windowed(_dense("mlp_bias", head_dim=True)),
    "dots1": _windowed(_and(_routed(*_DEEPSEEK, head_dim=True), _shared)),
    "exaone": _dense("attention_bias", "mlp_bias", head_dim=True),
    "exaone_moe": _windowed(_and(_routed(*_MOE[:3], head_dim=True), _exaone_moe)),
    "flex_olmo": _routed("num_experts", None, "num_experts_per_tok", "attention_bias"),
    "glm4_moe_lite": _glm_lite,
    "granite_swa": _windowed(_dense("attention_bias", "mlp_bias")),
    "granitemoe_swa": _windowed(_routed("num_local_experts", "shared_intermediate_size", "num_experts_per_tok", "attention_bias")),
    "hy_v3": _and(_routed(*_MOE, head_dim=True), _hy_v3),
    "hyperclovax": _dense("attention_bias", "mlp_bias", "use_post_norm", head_dim=True),
    "internlm3": _and(_dense(head_dim=True), _one_bias),
    "iquestcoder": _dense("attention_bias", "mlp_bias", head_dim=True),
    "jais2": _dense("attention_bias", "mlp_bias", head_dim=True),
    "llama4_text": _and(
        _routed("num_local_experts", "intermediate_size_mlp", "num_experts_per_tok", "attention_bias", head_dim=True), _llama4
    ),
    "mellum": _windowed(_and(_routed(*_MOE, head_dim=True), _listed_mlps)),
    "ministral3": _dense(head_dim=True),
    "qwen2_5_vl_text": _qwen_window(_dense()),
    "qwen2_vl_text": _qwen_window(_dense()),
    "qwen3_vl_moe_text": _and(_routed(*_MOE, head_dim=True), _qwen_layers),
    "qwen3_vl_text": _dense("attention_bias", head_dim=True),
    "cosmos3_edge_text": _and(_dense("attention_bias", "mlp_bias"), lambda _draw, _: {"head_dim": 128}),
    "flint": _windowed(_and(_routed(*_MOE, head_dim=True), _flint)),
    "granite_docling_text": _dense("attention_bias", "mlp_bias"),
    "hunyuan_vl_text": _hunyuan,
    "kolibri1": _windowed(
        _and(_routed(*_MOE[:3], head_dim=True), lambda draw, _: {"shared_expert_intermediate_size": draw.randint(6, 30)})
    ),
    "lara_mini": _and(_and(_routed(*_MOE, head_dim=True), _delta), _lara),
    "mistral4": _latent,
    "qwen2_5_omni_text": _qwen_window(_dense()),
    "qwen3_omni_moe_text": _and(_routed(*_MOE, head_dim=True), _qwen_layers),
    "paddleocr_vl_text": _dense(head_dim=True, use_bias=False),
    "glm4v_text": _dense(),
    "glm4v_moe_text": _and(_routed(*_DEEPSEEK), _shared),
    "glm_ocr_text": _dense(head_dim=True),
    "sarvam_mla": _latent,
    "sarvam_moe": _and(_routed(*_DEEPSEEK, "use_qk_norm"), _shared),
    "solar_open": _and(_routed(*_DEEPSEEK), lambda draw, _: {"n_shared_experts": draw.randint(1, 3)}),
    "vaultgemma": _windowed(_dense("attention_bias", head_dim=True)),
    "youtu": _latent_dense,
}


def random_config(model_type: str, seed: int) -> Config:
    """A small config, the same for the same seed."""
    return {"model_type": model_type, **CONFIGS[model_type](Random(f"{model_type} {seed}"))}
