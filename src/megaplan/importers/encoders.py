"""Encoders of images and sound by `model_type` of their config: the stack that a spec states, and the tensors outside it.

Together they are the tensors that transformers builds from the fields of a config. An encoder that is no such stack is a number of
parameters, and the reason.
"""

from collections.abc import Callable, Mapping
from math import isqrt
from types import MappingProxyType
from typing import Any, NamedTuple

from megaplan.importers.reader import ConfigReader


class Found(NamedTuple):
    """A part of a multimodal model.

    Attributes:
        more: Parameters of parts that a spec cannot state.
        stated: Fields of the section that states it; empty if nothing does.
        why: Reason that nothing does.
    """

    more: int
    stated: Mapping[str, Any] = MappingProxyType({})
    why: str = ""


Structure = Callable[[ConfigReader], Found]
UNSIZED = 1024
"""Patches of an image if a config has no image size."""
NO_BIAS: dict[str, Any] = {"bias": False, "output_bias": False, "mlp_bias": False}
PIXTRAL: dict[str, Any] = {"norm": "rmsnorm", "activation": "swiglu"}


def linear(inner: int, outer: int, *, bias: bool = True) -> int:
    """A matrix and its bias."""
    return outer * (inner + bias)


def layer_norm(width: int) -> int:
    """Scale and bias of a LayerNorm."""
    return 2 * width


def mlp(width: int, inner: int, outer: int | None = None, *, bias: bool = True) -> int:
    """Two matrices."""
    return linear(width, inner, bias=bias) + linear(inner, width if outer is None else outer, bias=bias)


def gated(width: int, inner: int, *, bias: bool = True) -> int:
    """Three matrices: gate, up and down."""
    return 2 * linear(width, inner, bias=bias) + linear(inner, width, bias=bias)


def attention(width: int, *, bias: bool = True) -> int:
    """Projections of queries, keys and values, and of the output."""
    return 4 * linear(width, width, bias=bias)


def pair(reader: ConfigReader, key: str) -> tuple[int, int]:
    """Two integers: a list of two, or one for both."""
    value = reader.value(key)
    if not isinstance(value, list):
        return (reader.whole(key),) * 2
    reader.skip(key)
    if len(value) != 2 or not all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in value):
        reader.wrong(key, value, "an integer, or two")
        return 1, 1
    return value[0], value[1]


def count(reader: ConfigReader, key: str) -> int:
    """The length of a list."""
    return len(reader.items(key))


def _patches(reader: ConfigReader, *, depth: int = 1, channels: str = "num_channels") -> int:
    """Values of one patch."""
    height, width = pair(reader, "patch_size")
    return reader.whole(channels) * depth * height * width


def _grid(reader: ConfigReader) -> int:
    """Patches of an image."""
    image, patch = pair(reader, "image_size"), pair(reader, "patch_size")
    return (image[0] // patch[0]) * (image[1] // patch[1])


def _rotated(patches: int) -> dict[str, Any]:
    """Rotary embedding by rows and columns of a square image, or of an image whose grid nothing says."""
    side = isqrt(patches)
    return {"rotary": True} | ({"grid": [side, side]} if side and side**2 == patches else {})


def _stack(reader: ConfigReader, patches: int, *, width: str = "hidden_size", **fields: Any) -> dict[str, Any]:
    """The fields of a stack: LayerNorms, biases and gelu unless others are given."""
    size, prefix = reader.whole(width), "num_attention_heads" in reader.facts.fields
    heads = reader.whole("num_attention_heads" if prefix else "num_heads")
    heads = 1 if size % heads else heads  # transformers refuses such a config; the number of parameters is the same
    found = {
        "num_layers": reader.whole("num_hidden_layers" if prefix else "depth"),
        "hidden_size": size,
        "num_heads": heads,
        "head_dim": size // heads,
        "patches": patches,
    }
    if "ffn_hidden_size" not in fields:
        found["ffn_hidden_size"] = reader.whole("intermediate_size")
    if "patch_values" not in fields:
        found["patch_values"] = _patches(reader)
    return found | fields


def _pooled(reader: ConfigReader) -> int:
    """A pooling head that attends with one learned query, if the encoder has it."""
    if "vision_use_head" in reader.facts.fields and not reader.flag("vision_use_head"):
        return 0
    width = reader.whole("hidden_size")
    return width + attention(width) + layer_norm(width) + mlp(width, reader.whole("intermediate_size"))


def siglip(reader: ConfigReader) -> Found:
    """siglip_vision_model: learned positions, a norm at the end, a head unless `vision_use_head` is false."""
    return _siglip_body(reader)._replace(more=_pooled(reader))


def _siglip_body(reader: ConfigReader) -> Found:
    grid = _grid(reader)
    return Found(0, _stack(reader, grid, positions=grid))


def siglip2(reader: ConfigReader) -> Found:
    """siglip2_vision_model: siglip with `num_patches` positions."""
    patches = reader.whole("num_patches")
    return Found(_pooled(reader), _stack(reader, patches, positions=patches))


def paddleocr(reader: ConfigReader) -> Found:
    """paddleocr_vl_vision: siglip's body with rotary embedding."""
    grid = _grid(reader)
    return Found(0, _stack(reader, grid, positions=grid, **_rotated(grid)))


def unplaced(reader: ConfigReader) -> Found:
    """video_llama_3_vision: siglip's body with rotary embedding and without learned positions."""
    return Found(0, _stack(reader, UNSIZED, **_rotated(UNSIZED)))


def clip(reader: ConfigReader) -> Found:
    """clip_vision_model: a class token, learned positions, norms before and after the layers, the last one over the class token alone."""
    width, grid = reader.whole("hidden_size"), _grid(reader)
    stated = _stack(reader, grid, positions=grid, patch_bias=False, first_norm=True, last_norm=False)
    return Found(2 * width + layer_norm(width), stated)


def minicpm(reader: ConfigReader) -> Found:
    """Minicpmv vision: siglip's body and a merger of windows inside it."""
    width, inner = reader.whole("hidden_size"), reader.whole("intermediate_size")
    rows, columns = pair(reader, "window_kernel_size")
    wide = width * rows * columns
    merger = attention(width) + layer_norm(width) + layer_norm(wide) + mlp(wide, inner * rows * columns, width)
    reader.skip("insert_layer_id")
    return _siglip_body(reader)._replace(more=merger, why="a merger of windows inside its stack")


def pixtral(reader: ConfigReader) -> Found:
    """pixtral: RMSNorms, no biases, an MLP of three matrices."""
    fields: dict[str, Any] = {**PIXTRAL, **NO_BIAS, "patch_bias": False, "rotary": True, "first_norm": True, "last_norm": False}
    return Found(0, _stack(reader, _grid(reader), **fields))


def ovis2(reader: ConfigReader) -> Found:
    """ovis2_vision: RMSNorms, and a head over a vocabulary of visual words."""
    width, bias = reader.whole("hidden_size"), reader.flag("qkv_bias")
    words = reader.whole("vocab_size") - reader.whole("num_visual_indicator_tokens", least=0)
    wide = width * reader.whole("hidden_stride") ** 2
    fields: dict[str, Any] = {**PIXTRAL, "bias": bias, "output_bias": bias, "mlp_bias": reader.flag("mlp_bias"), "positions": _grid(reader)}
    more = linear(wide, words, bias=False) + layer_norm(words)
    return Found(more, _stack(reader, _grid(reader), first_norm=True, **fields), "a head over visual words")


def internvl(reader: ConfigReader) -> Found:
    """internvl_vision: a class token, learned positions, factors of both branches of a layer."""
    width, grid, layers = reader.whole("hidden_size"), _grid(reader), reader.whole("num_hidden_layers")
    normed, placed = reader.flag("use_qk_norm"), reader.flag("use_absolute_position_embeddings")
    plain = reader.text("norm_type") == "layer_norm"
    pooled = reader.flag("use_mean_pooling")
    more = width + layers * (2 * width + 2 * width * normed) + width * placed + width * reader.flag("use_mask_token")
    fields: dict[str, Any] = {
        "norm": "layernorm" if plain else "rmsnorm",
        "bias": reader.flag("attention_bias"),
        "last_norm": not pooled and plain,
    }
    more += 0 if pooled or plain else layer_norm(width)
    why = "norms over the queries and keys of all heads" if normed else ""
    return Found(more, _stack(reader, grid, positions=grid if placed else None, **fields), why)


def llama4_vision(reader: ConfigReader) -> Found:
    """llama4_vision_model: a class token, learned positions; its adapter belongs to the projection."""
    width, grid = reader.whole("hidden_size"), _grid(reader)
    return Found(2 * width, _stack(reader, grid, positions=grid, patch_bias=False, rotary=True, first_norm=True))


def kimi_k25(reader: ConfigReader) -> Found:
    """kimi_k25_vision: learned positions of a grid."""
    height, columns = pair(reader, "patch_size")
    places = reader.whole("pos_emb_height") * reader.whole("pos_emb_width")
    return Found(0, _stack(reader, places, patch_values=3 * height * columns, positions=places, rotary=True))


def _qwen(reader: ConfigReader, patches: int = UNSIZED, **fields: Any) -> dict[str, Any]:
    """A stack with rotary embedding over patches of some frames, which a merger's norm ends."""
    values = _patches(reader, depth=reader.whole("temporal_patch_size"), channels="in_channels")
    return _stack(reader, patches, **(_rotated(patches) | {"last_norm": False, "patch_values": values} | fields))


def merged(reader: ConfigReader) -> int:
    """Patches that a merger joins."""
    return reader.whole("spatial_merge_size") ** 2


def qwen2_vl(reader: ConfigReader) -> Found:
    """qwen2_vl_vision: LayerNorms; its `hidden_size` is the text model's."""
    ratio = reader.value("mlp_ratio")
    reader.skip("mlp_ratio")
    inner = int(reader.whole("embed_dim") * ratio)
    return Found(0, _qwen(reader, width="embed_dim", ffn_hidden_size=inner, patch_bias=False))


def qwen2_5_vl(reader: ConfigReader) -> Found:
    """qwen2_5_vl_vision and exaone4_5_vision: RMSNorms, an MLP of three matrices with biases, windows; the latter has fewer key heads."""
    fields: dict[str, Any] = {**PIXTRAL, "patch_bias": False}
    if "num_key_value_heads" in reader.facts.fields:
        fields["num_kv_heads"] = reader.whole("num_key_value_heads")
    side = reader.whole("window_size") // reader.whole("spatial_merge_size") // reader.whole("patch_size")
    full = [layer for layer in reader.items("fullatt_block_indexes") if isinstance(layer, int) and layer < reader.whole("depth")]
    if side:
        fields |= {"window_patches": side**2 * merged(reader), "full_layers": sorted(full)}
    return Found(0, _qwen(reader, **fields))


def qwen3_vl(reader: ConfigReader) -> Found:
    """qwen3_vl_vision: LayerNorms, learned positions."""
    places = reader.whole("num_position_embeddings")
    return Found(0, _qwen(reader, places, positions=places))


def glm4v(reader: ConfigReader) -> Found:
    """glm4v_vision: RMSNorms, learned positions; `intermediate_size` is the merger's, and an MLP's is `out_hidden_size`."""
    grid, fields = _grid(reader), {**PIXTRAL, **NO_BIAS, "bias": reader.flag("attention_bias")}
    fields |= {"ffn_hidden_size": reader.whole("out_hidden_size"), "first_norm": True, "last_norm": True}
    return Found(0, _qwen(reader, grid, positions=grid, **fields))


def glm_ocr(reader: ConfigReader) -> Found:
    """glm_ocr_vision: glm4v_vision with norms over query and key heads, biases in its MLP and no learned positions."""
    bias = reader.flag("attention_bias")
    return Found(0, _qwen(reader, **PIXTRAL, bias=bias, output_bias=bias, mlp_bias=bias, qk_norm=True, last_norm=True))


def qwen_audio(reader: ConfigReader) -> Found:
    """qwen3_omni_moe_audio_encoder: three convolutions, layers with LayerNorms, two projections."""
    width, inner, channels = reader.whole("d_model"), reader.whole("encoder_ffn_dim"), reader.whole("downsample_hidden_size")
    layer = 2 * layer_norm(width) + attention(width) + mlp(width, inner)
    bins = reader.whole("num_mel_bins")
    for _ in range(3):
        bins = (bins + 1) // 2
    convolved = linear(9, channels) + 2 * linear(9 * channels, channels) + linear(channels * bins, width, bias=False)
    made = linear(width, width) + linear(width, reader.whole("output_dim"))
    return Found(convolved + reader.whole("encoder_layers") * layer + layer_norm(width) + made)


ENCODERS: dict[str, Structure] = {
    "clip_vision_model": clip,
    "exaone4_5_vision": qwen2_5_vl,
    "glm4v_moe_vision": glm4v,
    "glm4v_vision": glm4v,
    "glm_ocr_vision": glm_ocr,
    "idefics3_vision": _siglip_body,
    "internvl_vision": internvl,
    "kimi_k25_vision": kimi_k25,
    "llama4_vision_model": llama4_vision,
    "minicpm_ocr_vision": minicpm,
    "minicpmv4_6_vision": minicpm,
    "minicpmv4_7_vision": minicpm,
    "ovis2_vision": ovis2,
    "paddleocr_vl_vision": paddleocr,
    "pixtral": pixtral,
    "qianfan_ocr_vision": internvl,
    "qwen2_5_omni_vision_encoder": qwen2_5_vl,
    "qwen2_5_vl_vision": qwen2_5_vl,
    "qwen2_vl_vision": qwen2_vl,
    "qwen3_5_moe_vision": qwen3_vl,
    "qwen3_5_vision": qwen3_vl,
    "qwen3_omni_moe_audio_encoder": qwen_audio,
    "qwen3_omni_moe_vision_encoder": qwen3_vl,
    "qwen3_vl_moe_vision": qwen3_vl,
    "qwen3_vl_vision": qwen3_vl,
    "siglip2_vision_model": siglip2,
    "siglip_vision_model": siglip,
    "smolvlm_vision": _siglip_body,
    "video_llama_3_vision": unplaced,
}
"""Structure of each encoder, without the projections into the stream of text."""
