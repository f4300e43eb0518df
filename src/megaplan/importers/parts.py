"""Parts that several architectures share: heads, rotary embedding, windows, MLPs, experts, patterns."""

from collections.abc import Mapping, Sequence
from typing import Any

from megaplan.importers.reader import ConfigReader

SLOPES = "scores fall with distance by fixed slopes (ALiBi), which have no parameter"
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
LAYER_NAMES = {"mamba": LINEAR, "attention": FULL, "global": FULL, "local": SLIDING, "deepseek_sparse_attention": "indexed_attention"}
"""Names of layers before transformers 5, each with its current name."""
GATED_ACTIVATIONS = dict.fromkeys(("silu", "swish", "swigluoai"), "swiglu") | dict.fromkeys(
    ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python", "gegelu"), "geglu"
)
PLAIN_ACTIVATIONS = {"relu2": "relu2"} | dict.fromkeys(("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python"), "gelu")

DENSE_ACTIVATIONS = PLAIN_ACTIVATIONS | {"xielu": "xielu"}
"""Activations of a dense MLP with two matrices."""
DENSE_GATED = GATED_ACTIVATIONS | {"relu2": "relu2glu"}
"""Activations of a dense MLP with three matrices."""


TORCH_EPS = 1e-5
"""Epsilon of torch's LayerNorm, in classes without a field for it."""


def common(reader: ConfigReader, eps: str | float = "rms_norm_eps") -> dict[str, Any]:
    """Keys of `model` that every architecture has, without the pattern; `eps` is the epsilon or its field."""
    return {
        "hidden_size": reader.whole("hidden_size"),
        "vocab_size": reader.whole("vocab_size"),
        "tie_embeddings": reader.flag("tie_word_embeddings"),
        "norm_eps": reader.number(eps) if isinstance(eps, str) else eps,
    }


def connections(reader: ConfigReader, mixing: str) -> dict[str, Any]:
    """The section `streams`; a class without a step count, or without a factor, has the section's own."""
    optional = {"sinkhorn_steps": ("hc_sinkhorn_iters", reader.whole), "post_scale": ("hc_magnitude", reader.number)}
    given = {name: read(key) for name, (key, read) in optional.items() if reader.value(key) is not None}
    return {"count": reader.whole("hc_mult", least=2), "mixing": mixing, "eps": reader.number("hc_eps"), **given}


def side_by_side(layers: int) -> dict[str, Any]:
    """Keys of `model` for pairs of attention and MLP of which both read one norm."""
    return {"parallel_layers": list(range(1, 2 * layers, 2))}


def minicpm_factors(reader: ConfigReader, hidden_size: int, layers: int) -> tuple[dict[str, float], dict[str, float]]:
    """MiniCPM's factors: keys of `model` for the embeddings and the head's input, and of a block for its output."""
    depth, base = reader.factor("scale_depth"), reader.factor("dim_model_base")
    model = {"embedding_multiplier": reader.number("scale_emb")} | ({} if base is None else {"logits_multiplier": base / hidden_size})
    return model, {} if depth is None else {"output_multiplier": depth / layers**0.5}


def untied(reader: ConfigReader, model: dict[str, Any]) -> dict[str, Any]:
    """Keys of a class that never ties the head, whatever the config says."""
    if model["tie_embeddings"]:
        reader.warn("tie_word_embeddings", True, "the class never ties the head, and the spec follows it")
    return model | {"tie_embeddings": False}


def activation(reader: ConfigReader, key: str = "hidden_act", *, gated: bool = True, known: Mapping[str, str] | None = None) -> str:
    """The activation of the MLP or experts, one of `known`: three matrices if gated, else two."""
    known = (GATED_ACTIVATIONS if gated else PLAIN_ACTIVATIONS) if known is None else known
    value = reader.text(key)
    if value not in known and (reader.has(key) or value):
        matrices = "three matrices" if gated else "two matrices"
        reader.cannot(key, reader.value(key), f"an MLP with {matrices} takes one of {', '.join(known)}", next(iter(known)))
    return known.get(value, next(iter(known.values())))


def mlp(reader: ConfigReader, width: str = "intermediate_size", act: str = "hidden_act", *, gated: bool = True, bias: bool = False) -> Any:
    """The section `mlp`."""
    name = activation(reader, act, gated=gated, known=DENSE_GATED if gated else DENSE_ACTIVATIONS)
    section: dict[str, Any] = {"ffn_hidden_size": reader.whole(width), "activation": name}
    return section | ({"bias": True} if bias else {})


def heads(reader: ConfigReader, hidden_size: int, *, head_dim: str | None = "head_dim") -> dict[str, Any]:
    """Counts and width of heads of grouped-query attention; absent widths are hidden_size / num_attention_heads."""
    num_heads = reader.whole("num_attention_heads")
    stated = reader.whole_or_null(head_dim) if head_dim is not None and _given(reader, head_dim) else None
    grouped = "num_key_value_heads" in reader.facts.fields or (reader.has("num_key_value_heads") and not reader.facts.version)
    kv_heads = reader.whole_or_null("num_key_value_heads") if grouped else None
    width = stated if stated is not None else even_head_dim(reader, hidden_size, num_heads, head_dim)
    return {
        "kind": "gqa",
        "num_heads": num_heads,
        "num_kv_heads": num_heads if kv_heads is None else kv_heads,
        "head_dim": width,
        **score_scale(reader, "attention_multiplier", width),
    }


def biases(reader: ConfigReader, key: str | None = "attention_bias", *, output: bool = True) -> dict[str, Any]:
    """Biases on queries, keys and values, and on the output projection."""
    if key is not None and not reader.flag(key):
        return {}
    return {"bias": True, **({"output_bias": True} if output else {})}


def even_head_dim(reader: ConfigReader, hidden_size: int, num_heads: int, head_dim: str | None = "head_dim") -> int:
    """hidden_size / num_attention_heads; rounded down for a class that has a field for it."""
    if hidden_size % num_heads and not reader.failed:
        detail = f"hidden_size / num_attention_heads = {hidden_size} / {num_heads} is not a whole number, and no head_dim is given"
        reader.contradicts("num_attention_heads", detail, f'add "{head_dim}"' if head_dim else "correct the one that is wrong")
    return max(1, hidden_size // num_heads)


def layer_kinds(reader: ConfigReader, derived: Sequence[str], key: str = "layer_types", *, listed: bool = False) -> tuple[str, ...]:
    """Kind of each decoder layer: from the config's list, else as its class derives it; `listed` if no other field decides it."""
    if listed and reader.strict:
        reader.items(key)
    if not reader.has(key) or reader.value(key) is None:
        reader.skip(key)
        return tuple(derived)
    names = tuple(LAYER_NAMES.get(name, name) if isinstance(name, str) else name for name in reader.items(key))
    check_count(reader, key, len(names))
    return names


def windows(reader: ConfigReader, kinds: Sequence[str], letters: str, key: str = "sliding_window") -> dict[str, Any]:
    """`window_size` and `full_layers`; `letters` has one A per decoder layer."""
    if SLIDING not in kinds and key in reader.facts.fields:
        reader.skip(key)
    size = reader.whole_or_null(key, least=0) if SLIDING in kinds and _given(reader, key) else None
    for index, kind in enumerate(kinds):
        if kind not in (SLIDING, FULL):
            reader.cannot("layer_types", kind, f"layer {index} is neither {SLIDING} nor {FULL}", FULL)
            return {}
    if not size or SLIDING not in kinds:
        return {}
    attends = positions(letters, "A")
    full = [layer for layer, kind in zip(attends, kinds, strict=False) if kind == FULL]
    return {"window_size": size, **({"full_layers": full} if full else {})}


def experts(
    reader: ConfigReader,
    *,
    count: str,
    width: str,
    top_k: str = "num_experts_per_tok",
    normalize: str | bool = "norm_topk_prob",
    act: str = "hidden_act",
    gated: bool = True,
) -> dict[str, Any]:
    """The section `moe` without a shared expert."""
    return {
        "num_experts": reader.whole(count),
        "top_k": reader.whole(top_k),
        "ffn_hidden_size": reader.whole(width),
        "activation": activation(reader, act, gated=gated),
        "normalize_top_k": reader.flag(normalize) if isinstance(normalize, str) else normalize,
    }


def score_scale(reader: ConfigReader, key: str, head_dim: int, *, width: bool = False) -> dict[str, float]:
    """`softmax_scale` from a field that is the factor of the scores, or the width whose inverse root is; empty for 1 / sqrt(head_dim)."""
    value = reader.factor(key) if _given(reader, key) else None
    factor = value**-0.5 if value is not None and width else value
    return {} if factor is None or factor == head_dim**-0.5 else {"softmax_scale": factor}


def model_of(
    reader: ConfigReader, letters: str, model: dict[str, Any], sections: Mapping[str, tuple[str, dict[str, Any]]]
) -> dict[str, Any]:
    """The section `model` of a spec, after every field is judged: the sections of the letters that occur.

    Args:
        reader: Reader of the config.
        letters: One letter per layer.
        model: Keys in addition to the sections.
        sections: Key and value of the section of each letter.

    Raises:
        MegaplanError: Everything that is wrong with the config.
    """
    for letter, key, names in _STATED:
        section = sections.get(letter, ("", {}))[1]
        reader.skip(*(name for name in names if section.get(key) and reader.value(name) is True))
    reader.finish_reading()
    used = dict(section for letter, section in sections.items() if letter in letters)
    return {**cycled(letters), **model, **used}


_STATED = (
    ("A", "bias", ("attention_bias", "qkv_bias", "use_qkv_bias", "add_qkv_bias")),
    ("A", "qk_norm", ("use_qk_norm", "qk_norm", "qk_layernorm")),
    ("A", "gate", ("attn_output_gate", "use_output_gate", "gated_attention")),
    ("A", "sinks", ("attention_sink", "use_sinks")),
    ("E", "shared_gate", ("use_shared_expert_gate",)),
    ("E", "num_experts", ("use_moe",)),
)
"""Letter and key of a part, and switches that say no more than that it is there, of classes that always have it."""


def cycled(letters: str) -> dict[str, Any]:
    """`pattern` and `num_layers`: the shortest text that gives the letters when it is repeated."""
    size = next(n for n in range(1, len(letters) + 1) if letters.startswith(letters[n:]))
    return {"pattern": letters[:size], "num_layers": len(letters)}


def lettered(reader: ConfigReader, key: str, names: Sequence[Any], letters: dict[str, str]) -> str:
    """The letters for a list of names of layers."""
    for index, name in enumerate(names):
        if not isinstance(name, str) or name not in letters:
            reader.cannot(key, name, f"layer {index} is not one of {', '.join(letters)}", next(iter(letters)))
            break
    return "".join(letters.get(str(name), "D") for name in names)


def check_count(reader: ConfigReader, key: str, count: int) -> None:
    """Checks that the list of layers is as long as `num_hidden_layers`, if the config has that."""
    if not reader.has("num_hidden_layers"):
        return
    layers = reader.layers(1)
    if count and layers != count:
        reader.contradicts(key, f"{key} names {count} layers, and num_hidden_layers = {layers}", "correct the one that is wrong")


def uniform(reader: ConfigReader, key: str) -> int:
    """A count that is one value, or a list of it layer by layer."""
    value = reader.value(key)
    if isinstance(value, list) and value and len(set(map(str, value))) == 1 and isinstance(value[0], int):
        reader.skip(key)
        return value[0]
    return reader.whole(key)


def positions(letters: str, letter: str) -> list[int]:
    """0-based indices of a letter's layers."""
    return [index for index, one in enumerate(letters) if one == letter]


def _given(reader: ConfigReader, key: str) -> bool:
    """True if the config or its class has the field."""
    return reader.has(key) or key in reader.facts.fields
