"""Random small multimodal configs: an encoder's fields are drawn by their names, a text model as for `test_imports`."""

from random import Random
from typing import Any

from hf_configs import random_config

from megaplan.importers.defaults import class_facts
from megaplan.importers.towers import FLAT, MULTIMODAL, NAMES, TEXT

SIZES = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model"), (32, 48)),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads"), (4,)),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers"), (2, 3)),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), (24, 52)),
    **dict.fromkeys(
        ("spatial_merge_size", "temporal_patch_size", "downsample_factor", "scale_factor", "hidden_stride", "merger_times"), (1, 2)
    ),
    **dict.fromkeys(("out_hidden_size", "output_dim", "vision_output_dim", "projector_hidden_size"), (20, 36)),
    **dict.fromkeys(("num_position_embeddings", "num_patches"), (16, 25)),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim"), (28,)),
    **dict.fromkeys(("pos_emb_height", "pos_emb_width"), (3, 4)),
    **dict.fromkeys(("attention_bias", "use_qk_norm", "use_mask_token", "use_mean_pooling"), (True, False)),
    **dict.fromkeys(("use_absolute_position_embeddings", "qkv_bias", "mlp_bias", "vision_use_head"), (True, False)),
    **dict.fromkeys(("multimodal_projector_bias", "projector_bias", "projector_use_layernorm"), (True, False)),
    "patch_size": (4, 8),
    "image_size": (16, 24),
    "downsample_ratio": (0.5, 1.0),
    "deepstack_visual_indexes": ([], [0], [0, 1]),
    "num_key_value_heads": (1, 2),
    "norm_type": ("layer_norm", "rms_norm"),
    "vocab_size": (40,),
    "downsample_hidden_size": (6, 8),
    "num_mel_bins": (16, 20),
    "window_kernel_size": ([2, 2], [1, 2]),
    "merge_kernel_size": ([2, 2], [1, 2]),
}
"""Choices by the name of a field."""


def random_towers(model_type: str, seed: int) -> dict[str, Any]:
    """A small config, the same for the same seed."""
    draw, facts = Random(f"{model_type} {seed}"), class_facts(model_type)
    config = {"model_type": model_type, **_drawn(draw, facts.fields)}
    for key in NAMES:
        if key in facts.parts:
            kind = facts.parts[key].type
            config[key] = {"model_type": kind, **_drawn(draw, class_facts(kind).fields)}
        if key in config and "num_attention_heads" in facts.parts[key].init:
            config[key] |= {"num_attention_heads": 4, "hidden_size": 48}
    if model_type in FLAT:
        return config | random_config(FLAT[model_type].type, seed) | {"model_type": model_type}
    config[TEXT] = random_config(facts.parts[TEXT].type, seed)
    if "tie_word_embeddings" in facts.fields:
        config["tie_word_embeddings"] = draw.random() < 0.5
    config[TEXT].pop("tie_word_embeddings", None)
    if model_type == "ovis2":
        config |= {key: config[TEXT][key] for key in ("hidden_size", "vocab_size")}
    if model_type == "paligemma":
        config["projection_dim"] = config[TEXT]["hidden_size"]
    if model_type == "dots3_note":
        vision, audio, hidden = config["vision_config"], config["audio_config"], config[TEXT]["hidden_size"]
        layers = vision["num_hidden_layers"] = draw.choice([2, 3])
        kinds = [draw.choice(["dense", "sparse"]) for _ in range(layers)]
        bias = vision.get("mlp_bias", False) and "sparse" not in kinds
        joined = draw.choice([1, 2])
        vision |= {"mlp_layer_types": kinds, "mlp_bias": bias, "adapter_in_dim": vision["hidden_size"], "adapter_out_dim": hidden}
        vision |= {"moe_intermediate_size": 12, "num_local_experts": 4, "adapter_merge_size": joined, "spatial_merge_size": joined}
        audio |= {"adapter_input_size": audio["hidden_size"], "adapter_out_dim": hidden, "feature_size": draw.choice([16, 20])}
    if model_type == "kimi_k25":
        config["projection_hidden_size"] = config["vision_config"]["hidden_size"]
    return config


def _drawn(draw: Random, fields: Any) -> dict[str, Any]:
    return {
        name: draw.choice(SIZES[name])
        for name in fields
        if (name in SIZES and draw.random() < 0.9) or name in ("hidden_size", "num_attention_heads", "encoder_attention_heads")
    }


__all__ = ["MULTIMODAL", "random_towers"]
