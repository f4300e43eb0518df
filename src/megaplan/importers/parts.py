"""What several families share: widths of heads, rotary base, activation, patterns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megaplan.importers.reader import ConfigReader

_BIASES = "biases on the output projection too, and attention.bias is on queries, keys and values"


def common(reader: ConfigReader, eps: str = "rms_norm_eps") -> dict[str, Any]:
    """Keys of `model` that every family has, without the pattern."""
    return {
        "hidden_size": reader.whole("hidden_size"),
        "vocab_size": reader.whole("vocab_size"),
        "tie_embeddings": reader.flag("tie_word_embeddings"),
        "norm_eps": reader.number(eps),
    }


def gated_silu(reader: ConfigReader) -> None:
    """The MLP is swiglu, and no other gated one."""
    reader.only("hidden_act", ("silu",), "a gated MLP is swiglu here, whose gate is silu")


def heads(reader: ConfigReader) -> dict[str, Any]:
    """Counts of heads of grouped-query attention, which has no bias."""
    reader.only("attention_bias", (False,), _BIASES)
    return heads_without_bias_field(reader)


def heads_without_bias_field(reader: ConfigReader) -> dict[str, Any]:
    """Counts of heads, for a family that never has a bias."""
    return {"kind": "gqa", "num_heads": reader.whole("num_attention_heads"), "num_kv_heads": reader.whole("num_key_value_heads")}


def stated_head_dim(reader: ConfigReader) -> int | None:
    """`head_dim`; None where the config has none, or null: the family's equations then say hidden_size / num_attention_heads."""
    return reader.whole_or_null("head_dim") if reader.has("head_dim") else None


def even_head_dim(reader: ConfigReader, hidden_size: int, num_heads: int) -> int:
    """hidden_size / num_attention_heads."""
    if hidden_size % num_heads:
        detail = f"hidden_size / num_attention_heads = {hidden_size} / {num_heads} is no whole number, and no head_dim is given"
        reader.contradicts("num_attention_heads", detail, 'add "head_dim"')
    return max(1, hidden_size // num_heads)


def rope_theta(reader: ConfigReader) -> float:
    """Base of the rotary angles: a field of its own, or inside `rope_parameters`, where newer configs have it."""
    inside = reader.mapping("rope_parameters")
    known = {"rope_theta", "rope_type", "partial_rotary_factor"}
    if reader.has("rope_theta") or "rope_theta" not in inside:
        theta: Any = reader.number("rope_theta")
    else:
        theta = inside["rope_theta"]
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < float("inf"):
            reader.wrong("rope_parameters.rope_theta", theta, "a positive number")
            theta = 1.0
    if inside.get("partial_rotary_factor", 1.0) != 1.0:
        reader.cannot("rope_parameters", dict(inside), "the rotated part is a whole head in gqa", {"rope_theta": theta})
    elif inside.get("rope_type", "default") != "default" or set(inside) - known:
        reader.tell(
            "rope_parameters", dict(inside), "rotary angles are stretched, and megarun turns by the base alone; shapes are the same"
        )
    return float(theta)


def cycled(letters: str) -> dict[str, Any]:
    """`pattern` and `num_layers`: the shortest text that gives the letters when it is repeated."""
    size = next(n for n in range(1, len(letters) + 1) if letters.startswith(letters[n:]))
    return {"pattern": letters[:size], "num_layers": len(letters)}


def lettered(reader: ConfigReader, key: str, names: Sequence[Any], letters: dict[str, str]) -> str:
    """The letters of a list of names of layers."""
    for index, name in enumerate(names):
        if not isinstance(name, str) or name not in letters:
            reader.cannot(key, name, f"layer {index} is none of {', '.join(letters)}", next(iter(letters)))
            break
    return "".join(letters.get(str(name), "D") for name in names)


def check_count(reader: ConfigReader, key: str, count: int) -> None:
    """The list of layers is as long as `num_hidden_layers`."""
    layers = reader.layers(1)
    if count and layers != count:
        reader.contradicts(key, f"{key} names {count} layers, and num_hidden_layers = {layers}", "correct the one that is wrong")


def positions(letters: str, letter: str) -> list[int]:
    """0-based indices of a letter's layers."""
    return [index for index, one in enumerate(letters) if one == letter]
