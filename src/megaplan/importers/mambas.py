"""Families with Mamba-2 layers: mamba2, nemotron_h, granitemoehybrid. Heads are their own count: d_inner = heads · head_dim."""

from __future__ import annotations

from typing import Any

from megaplan.importers.parts import (
    check_count,
    common,
    cycled,
    even_head_dim,
    gated_silu,
    heads,
    lettered,
    positions,
    rope_theta,
    stated_head_dim,
)
from megaplan.importers.reader import ConfigReader

_NO_BIAS = "Mamba's projections have no bias here"
_NEMOTRON = {"M": "M", "*": "A", "-": "D", "E": "E"}
_NEMOTRON_NAMES = {"mamba": "M", "attention": "A", "mlp": "D", "moe": "E"}
NEMOTRON_TIME_STEP_MIN = 0.001
"""Below which the family's code takes no step, where the config does not say. Source: transformers, `NemotronHConfig.time_step_min`."""
_NEMOTRON_MOE = (
    "n_routed_experts",
    "n_shared_experts",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "num_experts_per_tok",
    "norm_topk_prob",
)


def mamba2(reader: ConfigReader) -> dict[str, Any]:
    """`model` of a mamba2 config: M only."""
    model = common(reader, "layer_norm_epsilon")
    reader.only("hidden_act", ("silu",), "the convolution and the gate are silu here")
    reader.only("rms_norm", (True,), "a gated norm stands before the output projection here")
    reader.only("use_bias", (False,), _NO_BIAS)
    num_heads, head_dim, expand = reader.whole("num_heads"), reader.whole("head_dim"), reader.whole("expand")
    mamba = {
        "kind": "mamba2",
        "num_heads": num_heads,
        "head_dim": head_dim,
        "state_dim": reader.whole("state_size"),
        "num_groups": reader.whole("n_groups"),
        "conv_kernel": reader.whole("conv_kernel"),
        "conv_bias": reader.flag("use_conv_bias"),
        "chunk_size": reader.whole("chunk_size"),
        **_time_step_limit(reader),
    }
    inner = reader.whole("intermediate_size") if reader.has("intermediate_size") else num_heads * head_dim
    layers = reader.layers(1)
    reader.finish_reading()
    _check_inner(reader, "expand", expand * model["hidden_size"], "num_heads · head_dim", num_heads * head_dim)
    _check_inner(reader, "intermediate_size", inner, "num_heads · head_dim", num_heads * head_dim)
    return {**cycled("M" * layers), **model, "mamba": mamba}


def nemotron_h(reader: ConfigReader) -> dict[str, Any]:
    """`model` of a nemotron_h config: layers by letters, relu2 MLPs and experts, attention without rotary embedding."""
    model = common(reader, reader.same("layer_norm_epsilon", "rms_norm_eps"))
    letters = _nemotron_letters(reader)
    attention = heads(reader) | {
        "head_dim": reader.whole(reader.same("head_dim", "attention_head_dim")),
        "nope_layers": positions(letters, "A"),
    }
    reader.only("mlp_bias", (False,), "the MLP's matrices have no bias here")
    reader.only("mlp_hidden_act", ("relu2",), "an MLP of two matrices is read as relu2")
    reader.only("use_bias", (False,), _NO_BIAS)
    if reader.has("mamba_proj_bias"):
        reader.only("mamba_proj_bias", (False,), _NO_BIAS)
    if reader.has("mamba_hidden_act"):
        reader.only("mamba_hidden_act", ("silu",), "the convolution and the gate are silu here")
    reader.skip("expand", "rope_theta")  # wrong in several releases, where heads · head_dim is right; and there is no rotary embedding
    mamba = {
        "kind": "mamba2",
        "num_heads": reader.whole("mamba_num_heads"),
        "head_dim": reader.whole("mamba_head_dim"),
        "state_dim": reader.whole("ssm_state_size"),
        "num_groups": reader.whole("n_groups"),
        "conv_kernel": reader.whole("conv_kernel"),
        "conv_bias": reader.flag("use_conv_bias"),
        "chunk_size": reader.whole("chunk_size"),
        "time_step_min": reader.number("time_step_min") if reader.has("time_step_min") else NEMOTRON_TIME_STEP_MIN,
    }
    reader.skip("time_step_limit")  # no code of the family reads it
    mlp = {"ffn_hidden_size": reader.whole("intermediate_size"), "activation": "relu2"}
    moe = _nemotron_moe(reader, "E" in letters)
    reader.finish_reading()
    given = {"A": ("attention", attention), "M": ("mamba", mamba), "E": ("moe", moe), "D": ("mlp", mlp)}
    return {**cycled(letters), **model, **dict(section for letter, section in given.items() if letter in letters)}


def granite_hybrid(reader: ConfigReader) -> dict[str, Any]:
    """`model` of a granitemoehybrid config: a layer is Mamba or attention, then experts with a shared one, or the MLP."""
    model = common(reader)
    gated_silu(reader)
    names, experts = reader.items("layer_types"), reader.whole("num_local_experts", least=0)
    if reader.value("layer_types") == []:
        reader.wrong("layer_types", [], "at least one layer")
    mixers = lettered(reader, "layer_types", names, {"mamba": "M", "attention": "A"})
    check_count(reader, "layer_types", len(names))
    if reader.has("normalization_function"):
        reader.only("normalization_function", ("rmsnorm",), "every norm is RMSNorm here")
    reader.only("mamba_proj_bias", (False,), _NO_BIAS)
    num_heads, head_dim, expand = reader.whole("mamba_n_heads"), reader.whole("mamba_d_head"), reader.whole("mamba_expand")
    mamba = {
        "kind": "mamba2",
        "num_heads": num_heads,
        "head_dim": head_dim,
        "state_dim": reader.whole("mamba_d_state"),
        "num_groups": reader.whole("mamba_n_groups"),
        "conv_kernel": reader.whole("mamba_d_conv"),
        "conv_bias": reader.flag("mamba_conv_bias"),
        "chunk_size": reader.whole("mamba_chunk_size"),
        **_time_step_limit(reader),
    }
    letters = "".join(mixer + ("E" if experts else "D") for mixer in mixers)
    attention = heads(reader) | _granite_positions(reader, letters)
    stated = stated_head_dim(reader)
    shared = reader.whole("shared_intermediate_size", least=0)
    channel = _granite_channel(reader, experts, shared)
    reader.finish_reading()
    attention["head_dim"] = stated or even_head_dim(reader, model["hidden_size"], attention["num_heads"])
    _check_inner(reader, "mamba_expand", expand * model["hidden_size"], "mamba_n_heads · mamba_d_head", num_heads * head_dim)
    given = {"A": ("attention", attention), "M": ("mamba", mamba)}
    return {**cycled(letters), **model, **dict(section for letter, section in given.items() if letter in letters), **channel}


def _time_step_limit(reader: ConfigReader) -> dict[str, Any]:
    """`time_step_limit` as the keys of a spec; absent or null is none."""
    if reader.value("time_step_limit") is None:
        reader.skip("time_step_limit")
        return {}
    limits = reader.items("time_step_limit")
    if not isinstance(reader.value("time_step_limit"), list):
        return {}  # told
    numbers = [value for value in limits if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0]
    if len(limits) != 2 or len(numbers) + (limits[1] == "Infinity") != 2:
        reader.wrong("time_step_limit", list(limits), 'two numbers, the second of them perhaps "Infinity"')
        return {}
    least, most = float(limits[0]), None if limits[1] == "Infinity" else float(limits[1])
    return {key: value for key, value in (("time_step_min", least), ("time_step_max", most)) if value}


def _nemotron_letters(reader: ConfigReader) -> str:
    if reader.has("layers_block_type") and not reader.has("hybrid_override_pattern"):
        key, names, letters = "layers_block_type", reader.items("layers_block_type"), _NEMOTRON_NAMES
    else:
        key, names, letters = "hybrid_override_pattern", tuple(reader.text("hybrid_override_pattern")), _NEMOTRON
        reader.skip("layers_block_type")  # the same list, as newer releases write it beside the text
    found = lettered(reader, key, names, letters)
    if reader.has(key) and not found:
        reader.wrong(key, list(names), "at least one layer")
    check_count(reader, key, len(found))
    return found


def _nemotron_moe(reader: ConfigReader, used: bool) -> dict[str, Any]:
    if not used:
        reader.skip(*_NEMOTRON_MOE)
        return {}
    reader.only("n_shared_experts", (1,), "the shared expert is one, moe_shared_expert_intermediate_size wide")
    reader.tell("hybrid_override_pattern", "E", "experts are scored by sigmoid with a correction bias, a buffer; shapes are the same")
    return {
        "num_experts": reader.whole("n_routed_experts"),
        "top_k": reader.whole("num_experts_per_tok"),
        "ffn_hidden_size": reader.whole("moe_intermediate_size"),
        "shared_ffn_hidden_size": reader.whole("moe_shared_expert_intermediate_size", least=0),
        "activation": "relu2",
        "normalize_top_k": reader.flag("norm_topk_prob"),
    }


def _granite_positions(reader: ConfigReader, letters: str) -> dict[str, Any]:
    """Rotary embedding in all A layers or in none."""
    reader.only("position_embedding_type", ("nope", "rope", None), "positions are rotary or absent here")
    if reader.value("position_embedding_type") == "rope":
        return {"rope_theta": rope_theta(reader)}
    reader.skip("rope_theta", "rope_parameters", "rope_scaling")  # nothing is rotated
    return {"nope_layers": positions(letters, "A")}


def _granite_channel(reader: ConfigReader, experts: int, shared: int) -> dict[str, Any]:
    """`intermediate_size` is one expert's width; without experts the shared expert is the whole MLP."""
    if not experts:
        reader.skip("intermediate_size", "num_experts_per_tok")
        return {"mlp": {"ffn_hidden_size": shared, "activation": "swiglu"}}
    moe = {
        "num_experts": experts,
        "top_k": reader.whole("num_experts_per_tok"),
        "ffn_hidden_size": reader.whole("intermediate_size"),
        "shared_ffn_hidden_size": shared,
        "activation": "swiglu",
        "normalize_top_k": True,
    }
    return {"moe": moe}


def _check_inner(reader: ConfigReader, key: str, one: int, name: str, other: int) -> None:
    if one != other:
        reader.contradicts(key, f"{key} gives an inner width of {one}, and {name} = {other}", "correct the one that is wrong")
