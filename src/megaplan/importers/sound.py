"""Encoders of sound, and of Gemma 4 and Phi-4: counts of parameters, since a spec states none of them."""

from __future__ import annotations

from math import log2

from megaplan.importers.encoders import ENCODERS, Found, Structure, attention, gated, layer_norm, linear, mlp, pair, siglip
from megaplan.importers.reader import ConfigReader


def gemma4_vision(reader: ConfigReader) -> Found:
    """gemma4_vision: norms before and after both blocks and over heads, an MLP of three matrices, positions of two axes."""
    width, dim = reader.whole("hidden_size"), reader.whole("head_dim")
    heads, groups = reader.whole("num_attention_heads"), reader.whole("num_key_value_heads")
    layer = width * dim * 2 * (heads + groups) + 2 * dim + gated(width, reader.whole("intermediate_size"), bias=False) + 4 * width
    first = 3 * reader.whole("patch_size") ** 2 * width + 2 * reader.whole("position_embedding_size") * width
    return Found(first + reader.whole("num_hidden_layers") * layer, why="norms after its blocks and positions of two axes")


def gemma4_audio(reader: ConfigReader) -> Found:
    """gemma4_audio: two convolutions, conformer layers with relative positions, a projection with a bias."""
    width, heads, taps = reader.whole("hidden_size"), reader.whole("num_attention_heads"), reader.whole("conv_kernel_size")
    inner, dim = width // heads * heads, width // heads
    attends = 4 * width * inner + width * width + dim
    convolves = 2 * width * width + width * width + taps * width + 2 * width
    layer = 2 * (mlp(width, 4 * width, bias=False) + 2 * width) + attends + convolves + 3 * width
    first, second = pair(reader, "subsampling_conv_channels")
    convolved = 9 * first + first + 9 * first * second + second + first // 4 * second * width
    made = linear(width, reader.whole("output_proj_dims"))
    return Found(convolved + reader.whole("num_hidden_layers") * layer + made)


def gemma4_unified_vision(reader: ConfigReader) -> Found:
    """gemma4_unified_vision: patches between two LayerNorms, positions of two axes, a third LayerNorm; no layers."""
    values, width = 3 * (reader.whole("patch_size") * reader.whole("pooling_kernel_size")) ** 2, reader.whole("mm_embed_dim")
    placed = 2 * reader.whole("mm_posemb_size") * width
    return Found(layer_norm(values) + linear(values, width) + 2 * layer_norm(width) + placed, why="positions of two axes, and no layers")


def frames(_reader: ConfigReader) -> Found:
    """gemma4_unified_audio: frames of sound as they are."""
    return Found(0)


def whisper(reader: ConfigReader) -> Found:
    """The encoder of Whisper: two convolutions, learned positions, layers with LayerNorms, keys without a bias."""
    width = reader.whole("hidden_size")
    layer = attention(width) - width + mlp(width, reader.whole("intermediate_size")) + 2 * layer_norm(width)
    convolved = linear(3 * reader.whole("num_mel_bins"), width) + linear(3 * width, width)
    placed = reader.whole("max_source_positions") * width
    return Found(convolved + placed + reader.whole("num_hidden_layers") * layer + layer_norm(width))


def phi4_vision(reader: ConfigReader) -> Found:
    """phi4_multimodal_vision: siglip with its head, whose features are those of an earlier layer."""
    found = siglip(reader)
    return found._replace(why="features of a layer before the last")


def phi4_audio(reader: ConfigReader) -> Found:
    """phi4_multimodal_audio: convolutions, conformer layers, and a bias of scores by distance."""
    width, inner, made = reader.whole("hidden_size"), reader.whole("intermediate_size"), reader.whole("ext_pw_out_channel")
    taps, wide = reader.whole("kernel_size"), width * reader.whole("depthwise_multiplier")
    separated = linear(taps, wide) + linear(wide, reader.whole("depthwise_separable_out_channel"))
    convolves = layer_norm(width) + linear(width, 2 * made) + 2 * made + separated + linear(width, made)
    fed = layer_norm(width) + linear(width, 2 * inner) + linear(inner, width)
    layer = 2 * fed + attention(width) + convolves + 2 * layer_norm(width)
    channels, halvings, bins = reader.whole("nemo_conv_channels"), int(log2(reader.whole("time_reduction"))), reader.whole("input_size")
    for _ in range(halvings):
        bins = -(-bins // 2)
    convolved = linear(9, channels) + (halvings - 1) * (linear(9, channels) + linear(channels, channels)) + linear(channels * bins, width)
    distances = reader.whole("bias_max_distance") * (1 if reader.flag("bias_symmetric") else 2)
    return Found(convolved + distances * reader.whole("num_attention_heads") + reader.whole("num_blocks") * layer)


EVERY_ENCODER: dict[str, Structure] = ENCODERS | {
    "gemma4_audio": gemma4_audio,
    "gemma4_unified_audio": frames,
    "gemma4_unified_vision": gemma4_unified_vision,
    "gemma4_vision": gemma4_vision,
    "moss_transcribe_diarize_audio": whisper,
    "phi4_multimodal_audio": phi4_audio,
    "phi4_multimodal_vision": phi4_vision,
}
"""Structure of each encoder, those of this module included."""
