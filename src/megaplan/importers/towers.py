"""Multimodal configs: their text model, their encoders and the projections from them, stated or counted (MP225)."""

from collections.abc import Callable, Mapping, Sequence
from math import isqrt, lcm
from types import MappingProxyType
from typing import Any, NamedTuple

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, MegaplanError
from megaplan.importers.defaults import ClassFacts, PartFacts, class_facts
from megaplan.importers.encoders import Found, count, gated, layer_norm, linear, merged, mlp, pair
from megaplan.importers.reader import ConfigReader
from megaplan.importers.sound import EVERY_ENCODER
from megaplan.inventory.towers import encoder_size, projection_tensors
from megaplan.spec.document import SourceMap
from megaplan.spec.towers import Encoder, Projection, grid_fault

TEXT, VISION, AUDIO = "text_config", "vision_config", "audio_config"
NAMES = {VISION: "vision", AUDIO: "audio"}
"""Names of the parts in a spec."""


class Parts(NamedTuple):
    """Readers of a multimodal config's own fields and of its encoders' fields.

    Attributes:
        whole: The config itself.
        vision: The encoder of images.
        hidden: Width of the stream of text.
        encoders: Readers of the encoders that the config has, by the name of the part.
    """

    whole: ConfigReader
    vision: ConfigReader
    hidden: int
    encoders: Mapping[str, ConfigReader] = MappingProxyType({})


Structure = Callable[[Parts], Found]


def _stated(*widths: int, more: int = 0, why: str = "", **fields: Any) -> Found:
    """Linears of these widths, with biases by default, and the norm that `norm` names."""
    return Found(more, {"widths": [*widths], **fields}, why)


def _gemma3(parts: Parts) -> Found:
    image, patch = pair(parts.vision, "image_size")[0], pair(parts.vision, "patch_size")[0]
    pooled = (image // patch // isqrt(parts.whole.whole("mm_tokens_per_image"))) ** 2
    return _stated(parts.vision.whole("hidden_size"), parts.hidden, bias=False, norm="rmsnorm", pooled_patches=max(1, pooled))


def _merger(parts: Parts, *made: int, norm: str = "layernorm", width: str = "hidden_size", more: int = 0) -> Found:
    """A norm over patches, and two linears from concatenated patches; a third linear for two widths."""
    joined, size = merged(parts.vision), parts.vision.whole(width)
    return _stated(size * joined, size * joined, *made, norm=norm, joined_patches=joined, more=more)


def _qwen2(parts: Parts) -> Found:
    return _merger(parts, parts.vision.whole("hidden_size"), width="embed_dim")


def _qwen2_5(parts: Parts) -> Found:
    return _merger(parts, parts.vision.whole("out_hidden_size"), norm="rmsnorm")


def _hyperclovax(parts: Parts) -> Found:
    return _merger(parts, parts.vision.whole("out_hidden_size"), parts.hidden, norm="rmsnorm")


def _qwen3_5(parts: Parts) -> Found:
    return _merger(parts, parts.vision.whole("out_hidden_size"))


def _qwen3(parts: Parts) -> Found:
    """The merger, and DeepStack's mergers, which read earlier layers and are only counted."""
    wide = parts.vision.whole("hidden_size") * merged(parts.vision)
    deep = layer_norm(wide) + mlp(wide, wide, parts.vision.whole("out_hidden_size"))
    return _merger(parts, parts.vision.whole("out_hidden_size"), more=count(parts.vision, "deepstack_visual_indexes") * deep)


def _glm4v(parts: Parts) -> Found:
    return _glm(parts, parts.vision.whole("intermediate_size"))


def _glm_ocr(parts: Parts) -> Found:
    return _glm(parts, parts.vision.whole("out_hidden_size") * parts.vision.whole("in_channels"))


def _glm(parts: Parts, inner: int) -> Found:
    width, made = parts.vision.whole("hidden_size"), parts.vision.whole("out_hidden_size")
    joined = linear(width * merged(parts.vision), made)
    return Found(joined + made * made + layer_norm(made) + gated(made, inner, bias=False), why="a projection with a gated MLP")


def _joined_pixels(parts: Parts) -> Found:
    joined = int(1 / parts.whole.number("downsample_ratio")) ** 2
    wide = parts.vision.whole("hidden_size") * joined
    return _stated(wide, parts.hidden, parts.hidden, norm="layernorm", norms_joined=True, joined_patches=joined)


def _features(parts: Parts) -> tuple[int, str]:
    """Layers whose outputs are concatenated, and why a spec cannot state more than one."""
    features = parts.whole.value("vision_feature_layer")
    parts.whole.skip("vision_feature_layer")
    number = len(features) if isinstance(features, list) else 1
    return number, "a projection that reads several layers" if number > 1 else ""


def _reduced(parts: Parts, layers: int, *, bias: bool, why: str) -> Found:
    """Patches normed, joined and reduced to one of their width by a matrix without a bias, then two linears."""
    width, joined = parts.vision.whole("hidden_size"), merged(parts.whole)
    if bias or why:
        more = width + width * width * joined + mlp(width * layers, parts.hidden, parts.hidden, bias=bias)
        return Found(more, why=why or "a projection with biases on some of its linears")
    return _stated(width * joined, width, parts.hidden, parts.hidden, bias=False, norm="rmsnorm", joined_patches=joined)


def _mistral3(parts: Parts) -> Found:
    layers, why = _features(parts)
    return _reduced(parts, layers, bias=_biased(parts), why=why)


def _lighton(parts: Parts) -> Found:
    return _reduced(parts, 1, bias=False, why="")


def _llava(parts: Parts) -> Found:
    layers, why = _features(parts)
    return _stated(parts.vision.whole("hidden_size") * layers, parts.hidden, parts.hidden, bias=_biased(parts), why=why)


def _llava_next(parts: Parts) -> Found:
    return _llava(parts)._replace(more=parts.hidden)


def _biased(parts: Parts) -> bool:
    return parts.whole.flag("multimodal_projector_bias")


def _llama4(parts: Parts) -> Found:
    """The encoder's adapter, which shuffles pixels first, and the projection."""
    width, inner = parts.vision.whole("hidden_size"), parts.vision.whole("intermediate_size")
    given, made = parts.vision.whole("projector_input_dim"), parts.vision.whole("projector_output_dim")
    last = parts.vision.whole("vision_output_dim")
    if given != made:  # the second matrix is as wide on both sides
        parts.vision.contradicts("projector_output_dim", f"{made}, and projector_input_dim = {given}", "write one value for both")
    if inner % width or made != last:
        return Found(given * inner + made * given + last * parts.hidden, why="an adapter that fits no joined patches")
    return _stated(inner, given, made, parts.hidden, bias=False, joined_patches=inner // width)


def _kimi(parts: Parts) -> Found:
    rows, columns = pair(parts.vision, "merge_kernel_size")
    width, size = parts.vision.whole("hidden_size"), parts.whole.whole("projection_hidden_size")
    wide = width * rows * columns
    if size != width:
        return Found(layer_norm(size) + mlp(wide, wide, parts.hidden), why="a norm whose width is not the encoder's")
    return _stated(wide, wide, parts.hidden, norm="layernorm", joined_patches=rows * columns)


def _ovis2(parts: Parts) -> Found:
    return Found(parts.vision.whole("vocab_size") * parts.whole.whole("hidden_size"), why="an embedding of visual words")


def _minicpm(parts: Parts) -> Found:
    wide = parts.vision.whole("hidden_size") * 4  # whatever merge_kernel_size says
    further = (parts.whole.whole("merger_times") - 1) * (layer_norm(wide) + mlp(wide, wide, parts.vision.whole("hidden_size")))
    return Found(further + layer_norm(wide) + mlp(wide, wide, parts.hidden), why="a projection in steps")


def _lfm2(parts: Parts) -> Found:
    joined = parts.whole.whole("downsample_factor") ** 2
    wide = parts.vision.whole("hidden_size") * joined
    inner, bias = parts.whole.whole("projector_hidden_size"), parts.whole.flag("projector_bias")
    norm: dict[str, Any] = {"norm": "layernorm", "norms_joined": True} if parts.whole.flag("projector_use_layernorm") else {}
    return _stated(wide, inner, parts.hidden, bias=bias, joined_patches=joined, **norm)


def _idefics3(parts: Parts) -> Found:
    joined = parts.whole.whole("scale_factor") ** 2
    return _stated(parts.vision.whole("hidden_size") * joined, parts.hidden, bias=False, joined_patches=joined)


def _paligemma(parts: Parts) -> Found:
    return _stated(parts.vision.whole("hidden_size"), parts.whole.whole("projection_dim"))


def _aligned(parts: Parts) -> Found:
    return _stated(parts.vision.whole("hidden_size"), parts.hidden, parts.hidden)


def _gemma4(parts: Parts) -> Found:
    """A matrix from each encoder, whose input has a norm without a weight."""
    widths = {name: reader.whole("hidden_size") for name, reader in parts.encoders.items() if name == "vision"}
    widths |= {name: reader.whole("output_proj_dims") for name, reader in parts.encoders.items() if name == "audio"}
    return Found(sum(widths.values()) * parts.hidden, why="a norm without a weight")


def _gemma4_unified(parts: Parts) -> Found:
    """The same, from embedded patches and from frames of sound."""
    fields = {"vision": "output_proj_dims", "audio": "audio_embed_dim"}
    widths = [reader.whole(fields[name]) for name, reader in parts.encoders.items()]
    return Found(sum(widths) * parts.hidden, why="a norm without a weight")


def _moss(parts: Parts) -> Found:
    """Frames of sound joined, two linears and a norm."""
    width, bias = parts.encoders["audio"].whole("hidden_size") * parts.whole.whole("audio_merge_size"), parts.whole.flag("projector_bias")
    return Found(mlp(width, parts.hidden, parts.hidden, bias=bias) + layer_norm(parts.hidden), why="no encoder of images")


def _phi4(parts: Parts) -> Found:
    """Two linears from the image encoder, with two rows that separate its crops, and two pairs of linears from the sound encoder."""
    image, sound = (parts.encoders[name].whole("hidden_size") for name in ("vision", "audio"))
    rate = parts.encoders["audio"].whole("downsample_rate")
    sounds = 2 * mlp(sound * rate, parts.hidden, parts.hidden)
    return Found(mlp(image, parts.hidden, parts.hidden) + 2 * image + sounds, why="rows between the crops of an image")


def _step(parts: Parts) -> Found:
    """A matrix from four times the encoder's width."""
    width = parts.vision.value("width") or parts.vision.whole("hidden_size")
    return Found(linear(4 * width, parts.hidden, bias=parts.whole.flag("projector_bias")), why="convolutions in front of it")


MULTIMODAL: dict[str, Structure] = {
    "cosmos3_omni": _qwen3,
    "deepseek_vl": _aligned,
    "dots3_note": lambda _parts: Found(0, why="an encoder that ends with its own projection"),
    "exaone4_5": _qwen2_5,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_unified": _gemma4_unified,
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
    "moss_transcribe_diarize": _moss,
    "ovis2": _ovis2,
    "paddleocr_vl": lambda parts: _merger(parts, parts.hidden),
    "paligemma": _paligemma,
    "phi4_multimodal": _phi4,
    "qianfan_ocr": _joined_pixels,
    "qwen2_5_omni_thinker": _qwen2_5,
    "qwen2_5_vl": _qwen2_5,
    "qwen2_vl": _qwen2,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5,
    "qwen3_omni_moe_thinker": _qwen3,
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3,
    "smolvlm": _idefics3,
    "step3p7": _step,
    "video_llama_3": _aligned,
}
"""Structure of the projections between encoders and text, by the model type of the whole config."""


FLAT = {"phi4_multimodal": PartFacts("phi3", fixed=True, optional=False, init={})}
"""Text models of types whose top-level fields are the text model's."""
OWN_HEAD = frozenset({"llama4"})
"""Types whose text model has the head, so that its own `tie_word_embeddings` counts."""


def split_text(config: dict[str, Any], source: SourceMap) -> tuple[dict[str, Any], SourceMap]:
    """The text model of a multimodal config as a separate config, with the positions of its fields.

    Fields that are flat, as earlier releases wrote them, are the text model's if none is nested.
    """
    facts = class_facts(config["model_type"])
    part = FLAT.get(config["model_type"]) or facts.parts[TEXT]
    nested = config.get(TEXT)
    if isinstance(nested, dict):
        inner, source = dict(nested), inside(source, TEXT)
        if inner.get("architectures") == config.get("architectures"):  # some tools write the class of the whole model there, too
            inner.pop("architectures", None)
    elif config["model_type"] in FLAT or any(key in config for key in ("hidden_size", "num_hidden_layers")):
        inner = _flat(config, facts, class_facts(part.type).fields)
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
    tied = False if tied is None and not facts.forwards_tie else tied  # the class has no default
    if tied is not None and config["model_type"] not in OWN_HEAD:
        inner.pop("tie_embedding", None)
        inner["tie_word_embeddings"] = tied
    return inner, source


def _flat(config: Mapping[str, Any], facts: ClassFacts, known: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's fields of a config without a nested one, with the class's defaults if its type never nests them."""
    of_whole = {key for key in facts.fields if key not in known} | set(facts.parts) | {"architectures", "auto_map"}
    inner = {key: value for key, value in config.items() if key not in of_whole and key != "model_type"}
    own = facts.fields.items() if config["model_type"] in FLAT else ()
    return {key: value for key, value in own if key in known} | inner


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
        if kind not in EVERY_ENCODER:
            what = f"{key}.model_type = {kind}: the tensors of this encoder are not known"
            hint = "--set model.towers=null cannot repair it; write the text model's fields as a separate config"
            errors.append(diagnostic("MP805", what, source.locate(key), (hint,)))
            continue
        readers[name] = ConfigReader(fields, inside(source, key), kind, class_facts(kind))
    if errors:
        raise MegaplanError(errors)
    if not readers:
        return {}, ()
    found = {name: EVERY_ENCODER[reader.family](reader) for name, reader in readers.items()}
    found["projector"] = MULTIMODAL[family](Parts(whole, readers.get("vision", whole), hidden, readers))
    for reader in readers.values():
        reader.finish_counting()
    whole.stop_if_wrong()
    parts, why = _written(found, hidden)
    if why:
        whole.warn("vision_config", readers["vision"].family if "vision" in readers else None, f"counted and not priced: {why}")
    notes = [note for reader in (*readers.values(), whole) for note in reader.warnings]
    return parts, notes


def _written(found: Mapping[str, Found], hidden: int) -> tuple[dict[str, Any], str]:
    """The sections of the parts, and the reason that an encoder is counted; "" if it is stated."""
    vision, projector = found.get("vision", Found(0, why="no encoder of images")), found["projector"]
    sizes, sections = dict.fromkeys(found, 0), dict[str, dict[str, Any]]()
    why = vision.why or projector.why
    if vision.stated:
        stated = dict(vision.stated) | {"patches": max(1, vision.stated["patches"]), "positions": vision.stated.get("positions") or None}
        encoder = Encoder(**stated)
        sizes["vision"] = encoder_size(encoder)
    if projector.stated:
        projection = Projection(**projector.stated)
        sizes["projector"] = sum(tensor.elements for tensor in projection_tensors(projection))
    if not why:
        step = lcm(projection.patches_per_token, encoder.window_patches or 1)
        patches = encoder.patches // step * step
        if projection.widths[-1] != hidden or projection.widths[0] != encoder.hidden_size * projection.joined_patches:
            why = f"a projection of widths {', '.join(map(str, projection.widths))} between {encoder.hidden_size} and {hidden}"
        elif not patches or (encoder.rotary and encoder.head_dim % 2):
            why = f"{encoder.patches:,} patches with heads of {encoder.head_dim}, but a token takes {step}"
        else:
            sections = {"vision": {"encoder": _placed(stated | {"patches": patches}, projection)}}
            sections["projector"] = {"projection": dict(projector.stated)}
    more = {name: part.more + (0 if name in sections else sizes[name]) for name, part in found.items()}
    counted = {name: {"parameters": size} for name, size in more.items() if size}
    return {name: counted.get(name, {}) | sections.get(name, {}) for name in found if name in counted or name in sections}, why


def _placed(stated: dict[str, Any], projection: Projection) -> dict[str, Any]:
    """The fields of an encoder, without a grid that its rotary embedding cannot use."""
    return {key: value for key, value in stated.items() if key != "grid" or not grid_fault(Encoder(**stated), projection)}
