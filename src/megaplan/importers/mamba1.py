"""Models with Mamba-1 layers: mamba, falcon_mamba, jamba."""

from typing import Any

from megaplan.importers.parts import common, experts, heads, mlp, model_of, positions
from megaplan.importers.reader import ConfigReader

_SILU = "the convolution and the gate are silu here"


def mamba(reader: ConfigReader) -> dict[str, Any]:
    """mamba: M only."""
    return _only_mamba(reader, {})


def falcon_mamba(reader: ConfigReader) -> dict[str, Any]:
    """falcon_mamba: norms without a scale over the step's latent, B and C."""
    reader.skip("use_falcon_mambapy")
    eps = reader.number("mixer_rms_eps")
    return _only_mamba(reader, {"inner_norm": "plain"} | ({"inner_norm_eps": eps} if eps != reader.number("layer_norm_epsilon") else {}))


def jamba(reader: ConfigReader) -> dict[str, Any]:
    """jamba: Mamba with inner norms, attention without rotary embedding, and experts, each at its own period."""
    model, layers = common(reader), reader.layers(2)
    count = reader.whole("num_experts")
    attends, routes = _every(reader, "attn_layer"), _every(reader, "expert_layer")
    letters = "".join(("A" if attends(layer) else "M") + ("E" if count > 1 and routes(layer) else "D") for layer in range(layers))
    attention = heads(reader, model["hidden_size"]) | {"nope_layers": positions(letters, "A")}
    section = {
        "kind": "mamba1",
        "expand": reader.whole("mamba_expand"),
        "state_dim": reader.whole("mamba_d_state"),
        **_rank(reader, "mamba_dt_rank"),
        "conv_kernel": reader.whole("mamba_d_conv"),
        "conv_bias": reader.flag("mamba_conv_bias"),
        **({"bias": True} if reader.flag("mamba_proj_bias") else {}),
        "inner_norm": "scaled",
    }
    reader.skip("use_mambapy", "use_associative_scan", "num_experts", "num_experts_per_tok")
    sections = {"A": ("attention", attention), "M": ("mamba", section), "D": ("mlp", mlp(reader))}
    if "E" in letters:
        sections["E"] = ("moe", experts(reader, count="num_experts", width="intermediate_size", normalize=False))
    return model_of(reader, letters, model, sections)


def _only_mamba(reader: ConfigReader, options: dict[str, Any]) -> dict[str, Any]:
    model, layers = common(reader, "layer_norm_epsilon"), reader.layers(1)
    reader.only("hidden_act", ("silu", "swish"), _SILU)
    expand = reader.whole("expand")
    if reader.has("intermediate_size") and reader.whole("intermediate_size") != expand * model["hidden_size"]:
        detail = f"intermediate_size = {reader.value('intermediate_size')}, and expand · hidden_size = {expand * model['hidden_size']}"
        reader.contradicts("intermediate_size", detail, "correct the one that is wrong")
    section = {
        "kind": "mamba1",
        "expand": expand,
        "state_dim": reader.whole("state_size"),
        **_rank(reader, "time_step_rank"),
        "conv_kernel": reader.whole("conv_kernel"),
        "conv_bias": reader.flag("use_conv_bias"),
        **({"bias": True} if reader.flag("use_bias") else {}),
        **options,
    }
    reader.skip("time_step_scale", "use_mambapy", "use_associative_scan")
    return model_of(reader, "M" * layers, model, {"M": ("mamba", section)})


def _rank(reader: ConfigReader, key: str) -> dict[str, Any]:
    """Width of the step's latent; `auto` is hidden_size / 16 rounded up, the spec's default."""
    if reader.value(key) == "auto":
        reader.skip(key)
        return {}
    return {"dt_rank": reader.whole(key)}


def _every(reader: ConfigReader, prefix: str) -> Any:
    period, offset = reader.whole(f"{prefix}_period"), reader.whole(f"{prefix}_offset", least=0)
    return lambda layer: layer % period == offset
