"""Encoders of sound, and of dots3_note, Gemma 4 and Phi-4: only parameter counts, since a spec cannot state them."""

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


def step_vision(reader: ConfigReader) -> Found:
    """step3p5_vision: learned positions and rotary ones, a factor for each channel of a block's output, two convolutions at the end."""
    given = {key: reader.value(name) for key, name in (("hidden_size", "width"), ("num_hidden_layers", "layers"))}
    width, layers = (reader.whole(key) if value is None else value for key, value in given.items())
    reader.skip("width", "layers", "heads", "ls_init_value", "intermediate_size")
    inner, patch = int(width * reader.number("mlp_ratio")), reader.whole("patch_size")
    first = reader.whole("num_channels") * patch**2 * width + (reader.whole("image_size") // patch) ** 2 * width + layer_norm(width)
    layer = attention(width) + mlp(width, inner) + 2 * layer_norm(width) + 2 * width
    last = linear(9 * width, 2 * width) + linear(9 * 2 * width, 4 * width)
    return Found(first + layers * layer + last, why="factors for each channel of its blocks, and convolutions after them")


def omni_audio(reader: ConfigReader) -> Found:
    """qwen2_5_omni_audio_encoder: Whisper's encoder without learned positions, with two embedded marks and a projection."""
    width, made = reader.whole("d_model"), reader.whole("output_dim")
    layer = attention(width) - width + mlp(width, reader.whole("encoder_ffn_dim")) + 2 * layer_norm(width)
    convolved = linear(3 * reader.whole("num_mel_bins"), width) + linear(3 * width, width)
    return Found(convolved + 2 * made + reader.whole("encoder_layers") * layer + layer_norm(width) + linear(width, made))


def frames(_reader: ConfigReader) -> Found:
    """gemma4_unified_audio: unencoded frames of sound."""
    return Found(0)


def whisper(reader: ConfigReader) -> Found:
    """The encoder of Whisper: two convolutions, learned positions, layers with LayerNorms, keys without a bias."""
    width = reader.whole("hidden_size")
    layer = attention(width) - width + mlp(width, reader.whole("intermediate_size")) + 2 * layer_norm(width)
    convolved = linear(3 * reader.whole("num_mel_bins"), width) + linear(3 * width, width)
    placed = reader.whole("max_source_positions") * width
    return Found(convolved + placed + reader.whole("num_hidden_layers") * layer + layer_norm(width))


def phi4_vision(reader: ConfigReader) -> Found:
    """phi4_multimodal_vision: siglip with its head; the features come from an earlier layer."""
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


def dots3_vision(reader: ConfigReader) -> Found:
    """dots3_note_vision_encoder: RMSNorms, norms over heads, experts in some layers, a merger; earlier configs have other names."""
    width = reader.value("embed_dim") or reader.whole("hidden_size")
    dim = width // (reader.value("num_heads") or reader.whole("num_attention_heads"))
    bias = reader.flag("use_bias" if reader.has("use_bias") else "attention_bias")
    attends = linear(width, 3 * width, bias=bias) + linear(width, width, bias=bias) + 2 * dim
    expert = 3 * width * reader.whole("moe_intermediate_size") + width  # including its row of the router
    dense = gated(width, reader.whole("intermediate_size"), bias=reader.flag("mlp_bias"))
    fed = [count * expert or dense for count in _dots3_experts(reader)]
    first = linear(reader.whole("num_channels") * reader.whole("patch_size") ** 2, width) + width
    given = reader.whole("adapter_in_dim")
    wide = given * reader.whole("adapter_merge_size") ** 2
    last = width + layer_norm(given) + mlp(wide, wide, reader.whole("adapter_out_dim"))
    reader.skip("embed_dim", "num_heads", "hidden_size", "num_attention_heads", "attention_bias", "spatial_merge_size")
    return Found(first + len(fed) * (attends + 2 * width) + sum(fed) + last, why="experts in some of its layers")


def _dots3_experts(reader: ConfigReader) -> list[int]:
    """Experts of each layer, 0 where it has an MLP."""
    layers, counts = reader.whole("num_hidden_layers"), reader.value("pyramid_num_routed")
    kinds, usual = reader.value("mlp_layer_types"), reader.whole("num_local_experts")
    own = {int(key): one.get("num_local_experts", usual) for key, one in reader.mapping("per_layer_config").items() if key.isdigit()}
    reader.skip("pyramid_num_routed", "mlp_layer_types", "per_layer_config")
    if counts is None and kinds is None:
        counts = [*[-1] * 25, *range(4, 65, 4), 64]
    if counts is not None:
        own = own or dict(enumerate(counts))
        kinds = ["sparse" if count > 0 else "dense" for count in counts]
    if len(kinds) < layers:
        reader.wrong("mlp_layer_types", kinds, f"a list of {layers} layers")
    return [own.get(layer, usual) if kind == "sparse" else 0 for layer, kind in enumerate(kinds[:layers])]


def dots3_audio(reader: ConfigReader) -> Found:
    """dots3_note_audio_encoder: convolutions, layers with RMSNorms, keys without a bias, an adapter; earlier names are Whisper's."""
    older = reader.mapping("whisper_config")

    def size(name: str, other: str) -> int:
        return older[other] if isinstance(older.get(other), int) else reader.whole(name)

    width, inner = size("hidden_size", "d_model"), size("intermediate_size", "encoder_ffn_dim")
    channels, bands = reader.whole("downsample_hidden_size"), size("feature_size", "num_mel_bins")
    bias = reader.flag("attention_bias")
    attends = 3 * linear(width, width, bias=bias) + width * width
    layer = attends + linear(width, 2 * inner) + linear(inner, width) + 2 * width
    convolved = linear(9, channels) + 2 * linear(9 * channels, channels) + channels * ((bands + 7) // 8) * width
    given = reader.value("whisper_adapter_in_dim") or reader.whole("adapter_input_size")
    made = reader.value("whisper_adapter_out_dim") or reader.value("adapter_output_size") or reader.whole("adapter_out_dim")
    reader.skip("whisper_adapter_in_dim", "whisper_adapter_out_dim", "adapter_output_size", "adapter_input_size", "adapter_out_dim")
    adapter = layer_norm(given) + mlp(given, made, made)
    return Found(convolved + size("num_hidden_layers", "encoder_layers") * layer + width + adapter)


EVERY_ENCODER: dict[str, Structure] = ENCODERS | {
    "dots3_note_audio_encoder": dots3_audio,
    "dots3_note_vision_encoder": dots3_vision,
    "gemma4_audio": gemma4_audio,
    "gemma4_unified_audio": frames,
    "gemma4_unified_vision": gemma4_unified_vision,
    "gemma4_vision": gemma4_vision,
    "moss_transcribe_diarize_audio": whisper,
    "phi4_multimodal_audio": phi4_audio,
    "phi4_multimodal_vision": phi4_vision,
    "qwen2_5_omni_audio_encoder": omni_audio,
    "step3p5_vision": step_vision,
}
"""Structure of each encoder, those of this module included."""
