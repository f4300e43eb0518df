"""Rotary embedding of a config: base, rotated width, and scaling of frequencies for a longer context."""

from collections.abc import Mapping, Sequence
from typing import Any

from megaplan.families.attention.scaling import yarn_factor
from megaplan.importers.parts import FULL, SLIDING
from megaplan.importers.reader import ConfigReader

LOCAL_BASE = 10_000.0
"""Base of layers with a window in Gemma 3, if the config does not say."""
_OTHER = "rotary angles are scaled by a rule that a spec does not have, and megarun rotates by the base alone; shapes are the same"
_PLAIN = ("default", "mrope", None)
"""`rope_type` of unscaled angles; in `mrope` a text token has one position in all sections."""


def rope(reader: ConfigReader, head_dim: int, *, partial: float = 1.0, by_window: bool = False) -> dict[str, Any]:
    """`rope_theta`, `rotary_dim` and `rope_scaling`: own fields, or inside `rope_parameters` (`rope_scaling` before transformers 5).

    Args:
        reader: Reader of the config.
        head_dim: Width of a head.
        partial: Rotated share of a head, if the config does not say.
        by_window: True if layers with a window have their own base (`window_base`).
    """
    inside = _rope_mapping(reader, by_window=by_window)
    given = reader.value("rope_parameters")
    if isinstance(given, dict) and given and all(one is None for one in given.values()):  # no kind of layer turns
        reader.skip("rope_theta", "partial_rotary_factor")
        return {}
    theta = inside.get("rope_theta")
    if theta is None:
        theta = reader.number("rope_theta")
    else:
        reader.skip("rope_theta")
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < float("inf"):
            reader.wrong("rope_parameters.rope_theta", theta, "a positive number")
            theta = 1.0
    share = inside.get("partial_rotary_factor")
    if share is None:
        share = reader.factor("partial_rotary_factor") or partial
    reader.skip("partial_rotary_factor")
    rotated = rotary_width(head_dim, share)
    if isinstance(share, int | float) and int(head_dim * share) % 2:
        reader.warn("partial_rotary_factor", share, f"{int(head_dim * share)} dims of a head are rotated, by angles of a width that is odd")
    return {"rope_theta": float(theta), **({"rotary_dim": rotated} if rotated != head_dim else {}), **rope_scaling(reader, inside)}


def window_base(reader: ConfigReader) -> float:
    """Base of the angles of layers with a window: `rope_local_base_freq`, or the value in `rope_parameters`, or Gemma's default."""
    inside = reader.mapping("rope_parameters").get(SLIDING) if reader.has("rope_parameters") else None
    value = inside.get("rope_theta") if isinstance(inside, dict) else None
    value = reader.value("rope_local_base_freq") if value is None else value
    reader.skip("rope_local_base_freq")
    value = LOCAL_BASE if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        reader.wrong("rope_local_base_freq", value, "a positive number")
        return LOCAL_BASE
    return float(value)


def rope_by_kind(reader: ConfigReader, kinds: Sequence[str]) -> dict[str, Any]:
    """`nope_layers` of the layer types whose rotary parameters are null, and the base of layers with a window, if it differs."""
    given = reader.mapping("rope_parameters")
    straight = [2 * layer for layer, kind in enumerate(kinds) if kind in given and given[kind] is None]
    inner, outer = (given[kind].get("rope_theta") if isinstance(given.get(kind), dict) else None for kind in (FULL, SLIDING))
    own = {"window_rope_theta": float(outer)} if inner is not None and outer is not None and inner != outer and SLIDING in kinds else {}
    return {**({"nope_layers": straight} if straight else {}), **own}


def rope_scaling(reader: ConfigReader, inside: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_scaling` of the rotary parameters; empty if frequencies are not scaled, or by a rule that is reported.

    Args:
        reader: Reader of the config.
        inside: The rotary parameters.

    Source: `modeling_rope_utils.py` of transformers 5.23.0.
    """
    place = "rope_parameters" if reader.has("rope_parameters") else "rope_scaling"
    kind = inside.get("rope_type", inside.get("type"))
    if kind in _PLAIN:
        return {}
    if kind not in ("linear", "llama3", "yarn"):
        reader.warn(place, dict(inside), _OTHER)
        return {}

    def positive(name: str, default: float | None = None) -> float:
        value = inside.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            reader.wrong(f"{place}.{name}", value, f"a positive number with {kind}")
            return 1.0
        return float(value)

    if kind == "linear":
        return {"rope_scaling": {"kind": kind, "factor": positive("factor")}}
    reader.skip("original_max_position_embeddings")
    length = reader.value("original_max_position_embeddings") or inside.get("original_max_position_embeddings")
    length = reader.whole("max_position_embeddings") if length is None else length
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        reader.wrong(f"{place}.original_max_position_embeddings", length, "a positive integer")
        length = 1
    if kind == "llama3":
        scaling = {name: positive(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
        return {"rope_scaling": {"kind": kind, **scaling, "original_seq_length": length}}
    longest = reader.value("max_position_embeddings")
    factor = positive("factor", longest / length if isinstance(longest, int) else None)
    scaling = {"kind": kind, "factor": factor, "original_seq_length": length}
    scaling |= {name: positive(name, default) for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))}
    if inside.get("truncate") is False:
        scaling["truncate"] = False
    if inside.get("attention_factor") is not None:
        scaling["attention_factor"] = positive("attention_factor")
    elif inside.get("mscale") and inside.get("mscale_all_dim"):
        scaling["attention_factor"] = yarn_factor(factor, positive("mscale")) / yarn_factor(factor, positive("mscale_all_dim"))
    return {"rope_scaling": scaling}


def latent_score_scale(reader: ConfigReader, attention: dict[str, Any]) -> dict[str, float]:
    """`softmax_scale` of latent attention with `mscale_all_dim` in its rotary parameters: YaRN's factor squared over sqrt(width)."""
    inside = _rope_mapping(reader)
    weight = inside.get("mscale_all_dim")
    if inside.get("rope_type", inside.get("type")) in _PLAIN or not isinstance(weight, int | float) or not weight:
        return {}
    factor = inside.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 1:
        return {}
    width = attention["qk_nope_head_dim"] + attention["qk_rope_head_dim"]
    return {"softmax_scale": width**-0.5 * yarn_factor(factor, weight) ** 2}


def rotary_width(head_dim: int, share: Any) -> int:
    """Width of the rotated part of a head."""
    width = int(head_dim * share) if isinstance(share, int | float) else head_dim
    return min(max(2, width + width % 2), head_dim)


def _rope_mapping(reader: ConfigReader, *, by_window: bool = False) -> Mapping[str, Any]:
    """The rotary parameters; if there are several, those of layers without a window; with `by_window` also the others."""
    found: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        if not reader.has(key):
            continue
        inside = reader.mapping(key)
        by_layer = {name: one for name, one in inside.items() if isinstance(one, dict)}
        if by_layer:
            whole = by_layer.get(FULL, next(iter(by_layer.values())))
            if not by_window and any(one.get("rope_theta") != whole.get("rope_theta") for one in by_layer.values()):
                reader.warn(key, inside, "layers have different rotary bases, but a spec has one; shapes are the same")
            inside = whole
        found |= inside
    return found
