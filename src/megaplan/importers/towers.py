"""Multimodal configs: their text model, and the parameters of their encoders and of the projections from them (MP225)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, MegaplanError
from megaplan.importers.defaults import class_facts
from megaplan.importers.encoders import ENCODERS, count, gated, layer_norm, linear, merged, mlp, pair
from megaplan.importers.reader import ConfigReader
from megaplan.spec.document import SourceMap

TEXT, VISION, AUDIO = "text_config", "vision_config", "audio_config"
NAMES = {VISION: "vision", AUDIO: "audio"}
"""Names of the parts in a spec."""


class Parts(NamedTuple):
    """Readers of a multimodal config's own fields and of its encoders' fields.

    Attributes:
        whole: The config itself.
        vision: The encoder of images.
        hidden: Width of the stream of text.
    """

    whole: ConfigReader
    vision: ConfigReader
    hidden: int


Projection = Callable[[Parts], int]


def _gemma3(parts: Parts) -> int:
    width = parts.vision.whole("hidden_size")
    return width * parts.hidden + width


def _qwen2(parts: Parts) -> int:
    width = parts.vision.whole("embed_dim")
    wide = width * merged(parts.vision)
    return layer_norm(width) + mlp(wide, wide, parts.vision.whole("hidden_size"))


def _qwen2_5(parts: Parts) -> int:
    width = parts.vision.whole("hidden_size")
    wide = width * merged(parts.vision)
    return width + mlp(wide, wide, parts.vision.whole("out_hidden_size"))


def _hyperclovax(parts: Parts) -> int:
    return _qwen2_5(parts) + linear(parts.vision.whole("out_hidden_size"), parts.hidden)


def _qwen3_5(parts: Parts) -> int:
    width = parts.vision.whole("hidden_size")
    wide = width * merged(parts.vision)
    return layer_norm(width) + mlp(wide, wide, parts.vision.whole("out_hidden_size"))


def _qwen3(parts: Parts) -> int:
    wide = parts.vision.whole("hidden_size") * merged(parts.vision)
    deep = layer_norm(wide) + mlp(wide, wide, parts.vision.whole("out_hidden_size"))
    return _qwen3_5(parts) + count(parts.vision, "deepstack_visual_indexes") * deep


def _glm4v(parts: Parts) -> int:
    return _glm(parts, parts.vision.whole("intermediate_size"))


def _glm_ocr(parts: Parts) -> int:
    return _glm(parts, parts.vision.whole("out_hidden_size") * parts.vision.whole("in_channels"))


def _glm(parts: Parts, inner: int) -> int:
    width, made = parts.vision.whole("hidden_size"), parts.vision.whole("out_hidden_size")
    joined = linear(width * merged(parts.vision), made)
    return joined + made * made + layer_norm(made) + gated(made, inner, bias=False)


def _joined_pixels(parts: Parts) -> int:
    ratio = parts.whole.number("downsample_ratio")
    wide = parts.vision.whole("hidden_size") * int(1 / ratio) ** 2
    return layer_norm(wide) + mlp(wide, parts.hidden, parts.hidden)


def _mistral3(parts: Parts) -> int:
    width, bias = parts.vision.whole("hidden_size"), _biased(parts)
    features = parts.whole.value("vision_feature_layer")
    parts.whole.skip("vision_feature_layer")
    wide = width * (len(features) if isinstance(features, list) else 1)
    return width + width * width * merged(parts.whole) + mlp(wide, parts.hidden, parts.hidden, bias=bias)


def _lighton(parts: Parts) -> int:
    width = parts.vision.whole("hidden_size")
    return width + width * width * merged(parts.whole) + mlp(width, parts.hidden, parts.hidden, bias=False)


def _llava(parts: Parts) -> int:
    width, bias = parts.vision.whole("hidden_size"), _biased(parts)
    features = parts.whole.value("vision_feature_layer")
    parts.whole.skip("vision_feature_layer")
    wide = width * (len(features) if isinstance(features, list) else 1)
    return mlp(wide, parts.hidden, parts.hidden, bias=bias)


def _llava_next(parts: Parts) -> int:
    return parts.hidden + _llava(parts)


def _biased(parts: Parts) -> bool:
    return parts.whole.flag("multimodal_projector_bias")


def _llama4(parts: Parts) -> int:
    return parts.vision.whole("vision_output_dim") * parts.hidden


def _kimi(parts: Parts) -> int:
    rows, columns = pair(parts.vision, "merge_kernel_size")
    wide = parts.vision.whole("hidden_size") * rows * columns
    return layer_norm(parts.whole.whole("projection_hidden_size")) + mlp(wide, wide, parts.hidden)


def _ovis2(parts: Parts) -> int:
    return parts.vision.whole("vocab_size") * parts.whole.whole("hidden_size")


def _minicpm(parts: Parts) -> int:
    wide = parts.vision.whole("hidden_size") * 4  # whatever merge_kernel_size says
    further = (parts.whole.whole("merger_times") - 1) * (layer_norm(wide) + mlp(wide, wide, parts.vision.whole("hidden_size")))
    return further + layer_norm(wide) + mlp(wide, wide, parts.hidden)


def _lfm2(parts: Parts) -> int:
    wide = parts.vision.whole("hidden_size") * parts.whole.whole("downsample_factor") ** 2
    inner, bias = parts.whole.whole("projector_hidden_size"), parts.whole.flag("projector_bias")
    return (layer_norm(wide) if parts.whole.flag("projector_use_layernorm") else 0) + mlp(wide, inner, parts.hidden, bias=bias)


def _idefics3(parts: Parts) -> int:
    return parts.vision.whole("hidden_size") * parts.whole.whole("scale_factor") ** 2 * parts.hidden


def _paligemma(parts: Parts) -> int:
    return linear(parts.vision.whole("hidden_size"), parts.whole.whole("projection_dim"))


def _aligned(parts: Parts) -> int:
    return mlp(parts.vision.whole("hidden_size"), parts.hidden, parts.hidden)


def _paddle(parts: Parts) -> int:
    width = parts.vision.whole("hidden_size")
    wide = width * merged(parts.vision)
    return layer_norm(width) + mlp(wide, wide, parts.hidden)


MULTIMODAL: dict[str, Projection] = {
    "cosmos3_omni": _qwen3,
    "deepseek_vl": _aligned,
    "exaone4_5": _qwen2_5,
    "gemma3": _gemma3,
    "glm46v": _glm4v,
    "glm4v": _glm4v,
    "glm4v_moe": _glm4v,
    "glm_ocr": _glm_ocr,
    "glmga": _glm4v,
    "hyperclovax_vision_v2": _hyperclovax,
    "idefics3": _idefics3,
    "internvl": _joined_pixels,
    "kimi_k25": _kimi,
    "lfm2_vl": _lfm2,
    "lighton_ocr": _lighton,
    "llama4": _llama4,
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_next_video": _llava_next,
    "llava_onevision": _llava_next,
    "minicpm_ocr": _minicpm,
    "minicpmv4_6": _minicpm,
    "minicpmv4_7": _minicpm,
    "mistral3": _mistral3,
    "ovis2": _ovis2,
    "paddleocr_vl": _paddle,
    "paligemma": _paligemma,
    "qianfan_ocr": _joined_pixels,
    "qwen2_5_vl": _qwen2_5,
    "qwen2_vl": _qwen2,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5,
    "qwen3_omni_moe_thinker": _qwen3,
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3,
    "smolvlm": _idefics3,
    "video_llama_3": _aligned,
}
"""Parameters of the projections between encoders and text, by the model type of the whole config."""


OWN_HEAD = frozenset({"llama4"})
"""Types whose text model has the head, so that its own `tie_word_embeddings` counts."""


def split_text(config: dict[str, Any], source: SourceMap) -> tuple[dict[str, Any], SourceMap]:
    """The text model of a multimodal config as a config of its own, with the positions of its fields.

    Fields that are flat, as earlier releases wrote them, are the text model's if none is nested.
    """
    facts = class_facts(config["model_type"])
    part = facts.parts[TEXT]
    nested = config.get(TEXT)
    if isinstance(nested, dict):
        inner, source = dict(nested), inside(source, TEXT)
    elif any(key in config for key in ("hidden_size", "num_hidden_layers")):
        of_whole = (
            {key for key in facts.fields if key not in class_facts(part.type).fields} | set(facts.parts) | {"architectures", "auto_map"}
        )
        inner = {key: value for key, value in config.items() if key not in of_whole and key != "model_type"}
    else:
        inner = dict(part.init)
    given = inner.get("model_type")
    known = isinstance(given, str) and (given != f"{config['model_type']}_text" or class_facts(given).fields)  # else of no class
    inner["model_type"] = given if known and not part.fixed else part.type
    tied = config.get("tie_word_embeddings", facts.fields.get("tie_word_embeddings"))
    if "tie_embedding" in config and facts.fields.get("tie_word_embeddings") is not None:
        tied = config["tie_embedding"]
    own = inner.get("tie_word_embeddings", class_facts(inner["model_type"]).fields.get("tie_word_embeddings"))
    if facts.forwards_tie and not tied and own is not None:
        tied = own
    if tied is not None and config["model_type"] not in OWN_HEAD:
        inner.pop("tie_embedding", None)
        inner["tie_word_embeddings"] = tied
    return inner, source


def inside(source: SourceMap, key: str) -> SourceMap:
    """Positions of the fields of a nested config."""
    marks = {name.removeprefix(f"{key}."): mark for name, mark in source.marks.items() if name.startswith(f"{key}.")}
    return SourceMap(source.file, marks)


def towers_of(config: Mapping[str, Any], source: SourceMap, hidden: int) -> tuple[dict[str, Any], Sequence[Diagnostic]]:
    """`model.towers` of a multimodal config, all frozen, and notes about fields that it lacks.

    Raises:
        MegaplanError: A field is wrong, or an encoder has no structure here.
    """
    family = config["model_type"]
    facts = class_facts(family)
    whole = ConfigReader(config, source, family, facts)
    readers: dict[str, ConfigReader] = {}
    errors: list[Diagnostic] = []
    for key, name in NAMES.items():
        part = facts.parts.get(key)
        given = config.get(key)
        if part is None or (given is None and part.optional):
            continue
        fields = dict(part.init) if not isinstance(given, dict) else given
        own = fields.get("model_type")
        kind = part.type if part.fixed or not isinstance(own, str) or own == family else own
        if kind not in ENCODERS:
            what = f"{key}.model_type = {kind}: the tensors of this encoder are not known"
            hint = "--set model.towers=null cannot repair it; write the text model's fields as a config of their own"
            errors.append(diagnostic("MP805", what, source.locate(key), (hint,)))
            continue
        readers[name] = ConfigReader(fields, inside(source, key), kind, class_facts(kind))
    if errors:
        raise MegaplanError(errors)
    counted = {name: ENCODERS[reader.family](reader) for name, reader in readers.items()}
    counted["projector"] = MULTIMODAL[family](Parts(whole, readers.get("vision", whole), hidden))
    for reader in readers.values():
        reader.finish_counting()
    whole.stop_if_wrong()
    found = {name: {"parameters": size} for name, size in counted.items() if size}
    notes = [note for reader in (*readers.values(), whole) for note in reader.warnings]
    return found, notes
