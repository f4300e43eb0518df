"""Encoders of images and sound as numbers of parameters, by `model_type` of their config.

A structure sums the tensors that transformers builds from the fields of a config. Nothing of an encoder is priced but what it stores.
"""

from __future__ import annotations

from collections.abc import Callable

from megaplan.importers.reader import ConfigReader

Structure = Callable[[ConfigReader], int]


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


def _plain(reader: ConfigReader) -> tuple[int, int, int]:
    """Width, and the parameters of all layers of LayerNorms, attention and an MLP with biases; inner width."""
    width, inner = reader.whole("hidden_size"), reader.whole("intermediate_size")
    layer = 2 * layer_norm(width) + attention(width) + mlp(width, inner)
    return width, reader.whole("num_hidden_layers") * layer, inner


def _pooled(reader: ConfigReader, width: int, inner: int) -> int:
    """A head that attends with one learned query, where the encoder has it."""
    if "vision_use_head" in reader.facts.fields and not reader.flag("vision_use_head"):
        return 0
    return width + attention(width) + layer_norm(width) + mlp(width, inner)


def siglip(reader: ConfigReader) -> int:
    """siglip_vision_model: learned positions, a norm at the end, a head unless `vision_use_head` is false."""
    return _siglip_body(reader) + _pooled(reader, reader.whole("hidden_size"), reader.whole("intermediate_size"))


def _siglip_body(reader: ConfigReader) -> int:
    width, layers, _ = _plain(reader)
    return linear(_patches(reader), width) + _grid(reader) * width + layers + layer_norm(width)


def siglip2(reader: ConfigReader) -> int:
    """siglip2_vision_model: siglip with `num_patches` positions."""
    width, layers, inner = _plain(reader)
    positions = reader.whole("num_patches") * width
    return linear(_patches(reader), width) + positions + layers + layer_norm(width) + _pooled(reader, width, inner)


def unplaced(reader: ConfigReader) -> int:
    """video_llama_3_vision: siglip's body without learned positions."""
    width, layers, _ = _plain(reader)
    return linear(_patches(reader), width) + layers + layer_norm(width)


def clip(reader: ConfigReader) -> int:
    """clip_vision_model: a class token, learned positions, norms before and after the layers."""
    width, layers, _ = _plain(reader)
    places = width + (_grid(reader) + 1) * width
    return linear(_patches(reader), width, bias=False) + places + layers + 2 * layer_norm(width)


def minicpm(reader: ConfigReader) -> int:
    """Minicpmv vision: siglip's body and a merger of windows inside it."""
    width, inner = reader.whole("hidden_size"), reader.whole("intermediate_size")
    rows, columns = pair(reader, "window_kernel_size")
    wide = width * rows * columns
    merger = attention(width) + layer_norm(width) + layer_norm(wide) + mlp(wide, inner * rows * columns, width)
    reader.skip("insert_layer_id")
    return _siglip_body(reader) + merger


def pixtral(reader: ConfigReader) -> int:
    """pixtral: RMSNorms, no biases, an MLP of three matrices."""
    width, layers = reader.whole("hidden_size"), reader.whole("num_hidden_layers")
    layer = 2 * width + attention(width, bias=False) + gated(width, reader.whole("intermediate_size"), bias=False)
    return linear(_patches(reader), width, bias=False) + width + layers * layer


def ovis2(reader: ConfigReader) -> int:
    """ovis2_vision: RMSNorms, and a head over a vocabulary of visual words."""
    width, layers, inner = reader.whole("hidden_size"), reader.whole("num_hidden_layers"), reader.whole("intermediate_size")
    layer = 2 * width + attention(width, bias=reader.flag("qkv_bias")) + gated(width, inner, bias=reader.flag("mlp_bias"))
    words = reader.whole("vocab_size") - reader.whole("num_visual_indicator_tokens", least=0)
    stride = reader.whole("hidden_stride") ** 2
    body = linear(_patches(reader), width) + _grid(reader) * width + width + layers * layer + width
    return body + linear(width * stride, words, bias=False) + layer_norm(words)


def internvl(reader: ConfigReader) -> int:
    """internvl_vision: a class token, learned positions, factors of both branches of a layer."""
    width, inner = reader.whole("hidden_size"), reader.whole("intermediate_size")
    per_norm = layer_norm(width) if reader.text("norm_type") == "layer_norm" else width
    projected = 3 * linear(width, width, bias=reader.flag("attention_bias")) + linear(width, width)
    layer = 2 * per_norm + projected + mlp(width, inner) + 2 * width + (2 * width if reader.flag("use_qk_norm") else 0)
    places = (_grid(reader) + 1) * width if reader.flag("use_absolute_position_embeddings") else 0
    mask = width if reader.flag("use_mask_token") else 0
    last = 0 if reader.flag("use_mean_pooling") else layer_norm(width)
    embedded = linear(_patches(reader), width) + width + places + mask
    return embedded + reader.whole("num_hidden_layers") * layer + last


def llama4_vision(reader: ConfigReader) -> int:
    """llama4_vision_model: a class token, learned positions, and an adapter of two matrices without biases."""
    width, inner = reader.whole("hidden_size"), reader.whole("intermediate_size")
    layer = 2 * layer_norm(width) + attention(width) + mlp(width, inner)
    embedded = linear(_patches(reader), width, bias=False) + width + (_grid(reader) + 1) * width + 2 * layer_norm(width)
    given, made = reader.whole("projector_input_dim"), reader.whole("projector_output_dim")
    return embedded + reader.whole("num_hidden_layers") * layer + given * inner + made * given


def kimi_k25(reader: ConfigReader) -> int:
    """kimi_k25_vision: learned positions of a grid."""
    width, layers, _ = _plain(reader)
    height, columns = pair(reader, "patch_size")
    places = reader.whole("pos_emb_height") * reader.whole("pos_emb_width") * width
    return linear(3 * height * columns, width) + places + layers + layer_norm(width)


def qwen_patches(reader: ConfigReader, width: int, *, bias: bool) -> int:
    """Embedding of patches of some frames."""
    return linear(_patches(reader, depth=reader.whole("temporal_patch_size"), channels="in_channels"), width, bias=bias)


def merged(reader: ConfigReader) -> int:
    """Patches that a merger joins."""
    return reader.whole("spatial_merge_size") ** 2


def qwen2_vl(reader: ConfigReader) -> int:
    """qwen2_vl_vision: LayerNorms; its `hidden_size` is the text model's."""
    width = reader.whole("embed_dim")
    ratio = reader.value("mlp_ratio")
    reader.skip("mlp_ratio")
    layer = 2 * layer_norm(width) + attention(width) + mlp(width, int(width * ratio))
    return qwen_patches(reader, width, bias=False) + reader.whole("depth") * layer


def qwen2_5_vl(reader: ConfigReader) -> int:
    """qwen2_5_vl_vision: RMSNorms, an MLP of three matrices with biases."""
    return _qwen2_5_vl(reader, 4)


def exaone4_5(reader: ConfigReader) -> int:
    """exaone4_5_vision: qwen2_5_vl_vision with fewer key-value heads."""
    heads = reader.whole("num_heads")
    return _qwen2_5_vl(reader, 2 + 2 * reader.whole("num_key_value_heads") / heads)


def _qwen2_5_vl(reader: ConfigReader, projections: float) -> int:
    width = reader.whole("hidden_size")
    layer = 2 * width + int(projections * linear(width, width)) + gated(width, reader.whole("intermediate_size"))
    return qwen_patches(reader, width, bias=False) + reader.whole("depth") * layer


def qwen3_vl(reader: ConfigReader) -> int:
    """qwen3_vl_vision: LayerNorms, learned positions."""
    width, inner = reader.whole("hidden_size"), reader.whole("intermediate_size")
    layer = 2 * layer_norm(width) + attention(width) + mlp(width, inner)
    places = reader.whole("num_position_embeddings") * width
    return qwen_patches(reader, width, bias=True) + places + reader.whole("depth") * layer


def glm4v(reader: ConfigReader) -> int:
    """glm4v_vision: RMSNorms, learned positions; `intermediate_size` is the merger's, and an MLP's is `out_hidden_size`."""
    width, made, bias = reader.whole("hidden_size"), reader.whole("out_hidden_size"), reader.flag("attention_bias")
    projected = 3 * linear(width, width, bias=bias) + linear(width, width, bias=False)
    layer = 2 * width + projected + gated(width, made, bias=False)
    return qwen_patches(reader, width, bias=True) + _grid(reader) * width + 2 * width + reader.whole("depth") * layer


def glm_ocr(reader: ConfigReader) -> int:
    """glm_ocr_vision: glm4v_vision with norms over query and key heads, biases in its MLP and no learned positions."""
    width, bias = reader.whole("hidden_size"), reader.flag("attention_bias")
    head = width // reader.whole("num_heads")
    layer = 2 * width + attention(width, bias=bias) + gated(width, reader.whole("intermediate_size"), bias=bias) + 2 * head
    return qwen_patches(reader, width, bias=True) + width + reader.whole("depth") * layer


def qwen_audio(reader: ConfigReader) -> int:
    """qwen3_omni_moe_audio_encoder: three convolutions, layers with LayerNorms, two projections."""
    width, inner, channels = reader.whole("d_model"), reader.whole("encoder_ffn_dim"), reader.whole("downsample_hidden_size")
    layer = 2 * layer_norm(width) + attention(width) + mlp(width, inner)
    bins = reader.whole("num_mel_bins")
    for _ in range(3):
        bins = (bins + 1) // 2
    convolved = linear(9, channels) + 2 * linear(9 * channels, channels) + linear(channels * bins, width, bias=False)
    made = linear(width, width) + linear(width, reader.whole("output_dim"))
    return convolved + reader.whole("encoder_layers") * layer + layer_norm(width) + made


ENCODERS: dict[str, Structure] = {
    "clip_vision_model": clip,
    "exaone4_5_vision": exaone4_5,
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
    "paddleocr_vl_vision": _siglip_body,
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
