"""Models with Mamba-2 layers: mamba2, nemotron_h, granitemoehybrid, bamba, falcon_h1. Their inner width is heads · head_dim."""

from typing import Any

from megaplan.importers.experts import sigmoid_choice
from megaplan.importers.parts import (
    FULL,
    LINEAR,
    TORCH_EPS,
    biases,
    check_count,
    common,
    experts,
    heads,
    layer_kinds,
    lettered,
    mlp,
    model_of,
    positions,
    untied,
)
from megaplan.importers.reader import ConfigReader
from megaplan.importers.rotary import rope

_NEMOTRON = {"M": "M", "*": "A", "-": "D", "E": "E"}
_NEMOTRON_NAMES = {"mamba": "M", "attention": "A", "mlp": "D", "moe": "E", LINEAR: "M", FULL: "A"}
_NEMOTRON_MOE = (
    "n_routed_experts",
    "n_shared_experts",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
    "num_experts_per_tok",
    "norm_topk_prob",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
)
_INFINITE = (float("inf"), {"__float__": "Infinity"})
"""Spellings of an infinite limit in Python's JSON and in transformers 5."""
_MIXERS = {LINEAR: "M", FULL: "A"}


def mamba2(reader: ConfigReader) -> dict[str, Any]:
    """mamba2: M only."""
    model = common(reader, "layer_norm_epsilon")
    _silu(reader, "hidden_act")
    if reader.has("rms_norm"):
        reader.only("rms_norm", (True,), "a gated norm is before the output projection here")
    num_heads, head_dim, expand = reader.whole("num_heads"), reader.whole("head_dim"), reader.whole("expand")
    mamba = {
        "kind": "mamba2",
        "num_heads": num_heads,
        "head_dim": head_dim,
        "state_dim": reader.whole("state_size"),
        "num_groups": reader.whole("n_groups"),
        "conv_kernel": reader.whole("conv_kernel"),
        "conv_bias": reader.flag("use_conv_bias"),
        **({"bias": True} if reader.flag("use_bias") else {}),
        "chunk_size": reader.whole("chunk_size"),
        **_time_step_limit(reader),
    }
    inner = reader.whole("intermediate_size") if reader.has("intermediate_size") else num_heads * head_dim
    layers = reader.layers(1)
    _check_inner(reader, "expand", expand * model["hidden_size"], model["hidden_size"], ("num_heads", "head_dim"), (num_heads, head_dim))
    _check_inner(reader, "intermediate_size", inner, 1, ("num_heads", "head_dim"), (num_heads, head_dim))
    return model_of(reader, "M" * layers, model, {"M": ("mamba", mamba)})


def mamba_ssm(reader: ConfigReader) -> dict[str, Any]:
    """Configs of the package mamba_ssm: Mamba-1 or Mamba-2 in every layer, by `ssm_cfg`; the vocabulary is padded."""
    reader.only("attn_layer_idx", (None, []), "layers of attention have a convolution of queries, keys and values")
    reader.only("d_intermediate", (0,), "layers of Mamba have none of MLP behind them")
    reader.only("rms_norm", (True,), "norms are RMSNorms")
    reader.skip("ssm_cfg", "attn_cfg", "residual_in_fp32", "fused_add_norm")
    inside, layers, step = dict(reader.mapping("ssm_cfg")), reader.layers(1, "n_layer"), reader.whole("pad_vocab_size_multiple")
    second = inside.pop("layer", "Mamba1") == "Mamba2"
    names = {"expand": "expand", "d_state": "state_dim", "d_conv": "conv_kernel"}
    names |= {"headdim": "head_dim", "ngroups": "num_groups", "chunk_size": "chunk_size"} if second else {"dt_rank": "dt_rank"}
    unknown = {key: value for key, value in inside.items() if key not in names and key != "layer"}
    if unknown:
        reader.cannot("ssm_cfg", unknown, "these arguments of a layer are not read", {})
    mamba = {"kind": "mamba2" if second else "mamba1"} | {names[key]: value for key, value in inside.items() if value != "auto"}
    model = {
        "hidden_size": reader.whole("d_model"),
        "vocab_size": -(-reader.whole("vocab_size") // step) * step,
        "tie_embeddings": reader.flag("tie_embeddings"),
        "norm_eps": TORCH_EPS,
    }
    return model_of(reader, "M" * layers, model, {"M": ("mamba", mamba)})


def nemotron_h(reader: ConfigReader) -> dict[str, Any]:
    """nemotron_h: layers by letters, relu2 MLPs and experts, attention without rotary embedding."""
    model = untied(reader, common(reader, reader.same("layer_norm_epsilon", "rms_norm_eps", "norm_eps")))
    letters = _nemotron_letters(reader)
    reader.same("head_dim", "attention_head_dim")
    width = "attention_head_dim" if reader.has("attention_head_dim") and not reader.has("head_dim") else "head_dim"
    # the class declares attention_bias, but its attention has no bias
    reader.skip("attention_bias", "use_bias", "mamba_proj_bias", "sliding_window", "rope_theta", "partial_rotary_factor", "expand")
    attention = heads(reader, model["hidden_size"], head_dim=width) | {"nope_layers": positions(letters, "A")}
    if reader.has("mamba_hidden_act"):
        _silu(reader, "mamba_hidden_act")
    mamba = {
        "kind": "mamba2",
        "num_heads": reader.whole("mamba_num_heads"),
        "head_dim": reader.whole("mamba_head_dim"),
        "state_dim": reader.whole("ssm_state_size"),
        "num_groups": reader.whole(_older(reader, "n_groups", "mamba_n_groups")),
        "conv_kernel": reader.whole(_older(reader, "conv_kernel", "mamba_d_conv")),
        "conv_bias": reader.flag(_older(reader, "use_conv_bias", "mamba_conv_bias")),
        **({"bias": True} if reader.flag("use_bias") else {}),
        "chunk_size": reader.whole(_older(reader, "chunk_size", "mamba_chunk_size")),
        "time_step_min": reader.number(_older(reader, "time_step_min", "mamba_dt_min")),
    }
    reader.skip("time_step_limit", "mamba_dt_limit", "mamba_expand")  # no code of the family reads these fields
    bias = reader.flag("mlp_bias")
    dense = mlp(reader, act="mlp_hidden_act", gated=False, bias=bias)
    moe = _nemotron_moe(reader, bias=bias, used="E" in letters)
    sections = {"A": ("attention", attention), "M": ("mamba", mamba), "E": ("moe", moe), "D": ("mlp", dense)}
    return model_of(reader, letters, model, sections)


def granite_hybrid(reader: ConfigReader) -> dict[str, Any]:
    """granitemoehybrid: a layer is Mamba or attention, then experts with a shared one, or an MLP."""
    model = common(reader)
    layers, count = reader.layers(2), reader.whole("num_local_experts", least=0)
    mixers = _mixers(reader, layer_kinds(reader, (LINEAR,) * layers, listed=True))
    if reader.has("normalization_function"):
        reader.only("normalization_function", ("rmsnorm",), "every norm is RMSNorm here")
    letters = "".join(mixer + ("E" if count else "D") for mixer in mixers)
    attention = heads(reader, model["hidden_size"]) | biases(reader)
    reader.only("position_embedding_type", (None, "nope", "rope"), "positions are rotary or absent here")
    if reader.value("position_embedding_type") == "rope":
        attention |= rope(reader, attention["head_dim"])
    else:
        reader.skip("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor")  # nothing is rotated
        attention["nope_layers"] = positions(letters, "A")
    sections = {"A": ("attention", attention), "M": ("mamba", _mixer(reader, model["hidden_size"]))}
    shared = reader.whole("shared_intermediate_size", least=0)
    if count:
        moe = experts(reader, count="num_local_experts", width="intermediate_size", normalize=True)
        sections["E"] = ("moe", moe | {"shared_ffn_hidden_size": shared})
    else:  # the shared expert is the only MLP
        reader.skip("intermediate_size", "num_experts_per_tok")
        sections["D"] = ("mlp", mlp(reader, "shared_intermediate_size"))
    return model_of(reader, letters, model, sections)


def bamba(reader: ConfigReader) -> dict[str, Any]:
    """bamba: Mamba, except for the layers of `attn_layer_indices`, each with an MLP; half of each head is rotated."""
    model, layers = common(reader), reader.layers(2)
    attends = reader.items("attn_layer_indices")
    derived = tuple(FULL if layer in attends else LINEAR for layer in range(layers))
    reader.skip("layers_block_type", "layer_types", "partial_rotary_factor", "z_loss_coefficient")  # the class fixes or derives these
    letters = "".join(mixer + "D" for mixer in _mixers(reader, derived))
    attention = heads(reader, model["hidden_size"]) | biases(reader)
    attention |= rope(reader, attention["head_dim"], partial=0.5)
    dense = mlp(reader, bias=reader.flag("mlp_bias"))
    mixer = _mixer(reader, model["hidden_size"])
    return model_of(reader, letters, model, {"A": ("attention", attention), "M": ("mamba", mixer), "D": ("mlp", dense)})


def falcon_h1(reader: ConfigReader) -> dict[str, Any]:
    """falcon_h1: Mamba and attention read one norm, followed by an MLP: `MAD`."""
    model, layers = common(reader), reader.layers(3)
    reader.skip("layers_block_type", "layer_types")
    attention = heads(reader, model["hidden_size"]) | biases(reader)
    attention |= rope(reader, attention["head_dim"]) | _attention_factors(reader, attention)
    model |= _given(embedding_multiplier=reader.factor("embedding_multiplier"), logits_multiplier=reader.factor("lm_head_multiplier"))
    mixer = _mixer(reader, model["hidden_size"], inner=reader.whole_or_null("mamba_d_ssm"), output_bias="projectors_bias")
    before = reader.flag("mamba_norm_before_gate")
    if not reader.flag("mamba_rms_norm"):
        mixer["gated_norm"] = False
    elif before:
        reader.warn("mamba_norm_before_gate", True, "the original applies the gate after the norm; shapes are the same")
    mixer |= _mixer_factors(reader, biased="bias" in mixer)
    gate, down = _factors(reader, "mlp_multipliers", 2)
    dense = mlp(reader, bias=reader.flag("mlp_bias")) | _given(gate_multiplier=gate, output_multiplier=down)
    model["parallel_layers"] = list(range(1, 3 * layers, 3))
    return model_of(reader, "MAD" * layers, model, {"A": ("attention", attention), "M": ("mamba", mixer), "D": ("mlp", dense)})


def _attention_factors(reader: ConfigReader, attention: dict[str, Any]) -> dict[str, float]:
    """Factors of keys and of attention's input, expressed as factors of its scores and of its output, if no bias is between them."""
    keys, read, made = (reader.factor(key) or 1.0 for key in ("key_multiplier", "attention_in_multiplier", "attention_out_multiplier"))
    if read != 1 and "bias" in attention:
        reader.warn("attention_in_multiplier", read, "queries, keys and values have biases, which it does not multiply")
        read = 1.0
    scores = keys * read * read
    scale = {} if scores == 1 else {"softmax_scale": attention["head_dim"] ** -0.5 * scores}
    return scale | _given(output_multiplier=read * made)


def _mixer_factors(reader: ConfigReader, *, biased: bool) -> dict[str, Any]:
    """Factors of the parts of the mixer's input projection, including the factor of its input."""
    parts, read = _factors(reader, "ssm_multipliers", 5), reader.factor("ssm_in_multiplier") or 1.0
    if read != 1 and biased:
        reader.warn("ssm_in_multiplier", read, "the input projection has a bias, which it does not multiply")
        read = 1.0
    together = [part * read for part in parts]
    found = {} if together == [1.0] * len(parts) else {"part_multipliers": together}
    return found | _given(output_multiplier=reader.factor("ssm_out_multiplier"))


def _factors(reader: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    """A list of positive numbers; null means ones."""
    plain, values = (1.0,) * count, reader.items(key)
    if not values:
        return plain
    if len(values) != count or not all(isinstance(each, int | float) and not isinstance(each, bool) and each > 0 for each in values):
        reader.wrong(key, list(values), f"{count} positive numbers")
        return plain
    return tuple(map(float, values))


def _given(**factors: float | None) -> dict[str, float]:
    """Factors other than 1."""
    return {key: value for key, value in factors.items() if value not in (None, 1.0)}


def _mixer(reader: ConfigReader, hidden_size: int, *, inner: int | None = None, output_bias: str = "mamba_proj_bias") -> dict[str, Any]:
    """`mamba` from fields that begin with mamba_; `inner` is the inner width if a field gives it."""
    num_heads, expand = reader.whole("mamba_n_heads"), reader.whole("mamba_expand")
    width = expand * hidden_size if inner is None else inner
    stated = reader.value("mamba_d_head")
    head_dim = max(1, width // num_heads) if stated in ("auto", None) else reader.whole("mamba_d_head")
    reader.skip("mamba_d_head")
    key = "mamba_expand" if inner is None else "mamba_d_ssm"
    unit = hidden_size if inner is None else 1
    _check_inner(reader, key, width, unit, ("mamba_n_heads", "mamba_d_head"), (num_heads, head_dim))
    bias, output = reader.flag("mamba_proj_bias"), reader.flag(output_bias)
    if bias != output:
        why = f"in_proj.bias and out_proj.bias are given by mamba_proj_bias = {str(bias).lower()} only, and mamba.bias is both"
        reader.cannot(output_bias, output, why, bias)
    return {
        "kind": "mamba2",
        "num_heads": num_heads,
        "head_dim": head_dim,
        "state_dim": reader.whole("mamba_d_state"),
        "num_groups": reader.whole("mamba_n_groups"),
        "conv_kernel": reader.whole("mamba_d_conv"),
        "conv_bias": reader.flag("mamba_conv_bias"),
        **({"bias": True} if bias else {}),
        "chunk_size": reader.whole("mamba_chunk_size"),
        **_time_step_limit(reader),
    }


def _mixers(reader: ConfigReader, kinds: tuple[str, ...]) -> str:
    if not kinds and not reader.failed:
        reader.wrong("layer_types", [], "at least one layer")
    return lettered(reader, "layer_types", kinds, _MIXERS)


def _silu(reader: ConfigReader, key: str) -> None:
    reader.only(key, ("silu", "swish"), "the convolution and the gate are silu here")


def _time_step_limit(reader: ConfigReader) -> dict[str, Any]:
    """`time_step_limit` as the keys of a spec; absent or null is none."""
    if reader.value("time_step_limit") is None:
        reader.skip("time_step_limit")
        return {}
    limits = reader.items("time_step_limit")
    if not isinstance(reader.value("time_step_limit"), list):
        return {}  # reported
    limits = tuple("Infinity" if value in _INFINITE else value for value in limits)
    numbers = [value for value in limits if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0]
    if len(limits) != 2 or len(numbers) + (limits[1] == "Infinity") != 2:
        reader.wrong("time_step_limit", list(limits), 'two numbers; the second may be "Infinity"')
        return {}
    least, most = float(limits[0]), None if limits[1] == "Infinity" else float(limits[1])
    return {key: value for key, value in (("time_step_min", least), ("time_step_max", most)) if value}


def _older(reader: ConfigReader, key: str, older: str) -> str:
    """The older name of a field if the config has it: the class reads it first."""
    if reader.has(older):
        reader.skip(key)
        return older
    return key


def _nemotron_letters(reader: ConfigReader) -> str:
    listed = reader.value("layers_block_type")
    if listed is not None and not reader.has("hybrid_override_pattern"):
        key, names, letters = "layers_block_type", reader.items("layers_block_type"), _NEMOTRON_NAMES
    else:
        key, names, letters = "hybrid_override_pattern", tuple(reader.text("hybrid_override_pattern")), _NEMOTRON
        reader.skip("layers_block_type")  # the same list, which newer releases write in addition to the string
    found = lettered(reader, key, names, letters)
    if reader.has(key) and not found:
        reader.wrong(key, list(names), "at least one layer")
    check_count(reader, key, len(found))
    reader.skip("num_hidden_layers")
    return found or "D"


def _nemotron_moe(reader: ConfigReader, *, bias: bool, used: bool) -> dict[str, Any]:
    if not used:
        reader.skip(*_NEMOTRON_MOE)
        return {}
    if bias:
        reader.cannot("mlp_bias", True, "the shared expert and the latent's projections have biases, the routed experts none", False)
    reader.skip("n_shared_experts")  # ignored: there is one shared expert, of width moe_shared_expert_intermediate_size
    moe = experts(reader, count="n_routed_experts", width="moe_intermediate_size", act="mlp_hidden_act", gated=False)
    moe |= {"shared_ffn_hidden_size": reader.whole("moe_shared_expert_intermediate_size", least=0)}
    moe |= sigmoid_choice(reader)
    latent = reader.whole_or_null("moe_latent_size")
    return moe | ({"latent_size": latent} if latent is not None else {})


def _check_inner(reader: ConfigReader, key: str, width: int, unit: int, heads: tuple[str, str], counts: tuple[int, int]) -> None:
    """Checks that a field, in multiples of `unit`, and the heads give one inner width; the hint repairs what the config does not state."""
    product = counts[0] * counts[1]
    if width == product or reader.failed:
        return
    fix = "correct the one that is wrong"
    if not reader.has(heads[0]) and reader.has(key) and width % counts[1] == 0:
        fix = f'add "{heads[0]}": {width // counts[1]}'
    elif not reader.has(key) and product % unit == 0:
        fix = f'add "{key}": {product // unit}'
    absent = "".join(f"; {name} is the class's default" for name in heads if not reader.has(name))
    reader.contradicts(key, f"{key} gives an inner width of {width}, and {' · '.join(heads)} = {product}{absent}", fix)
