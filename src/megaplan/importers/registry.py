"""The architectures that can be imported, by `model_type`. A new one is an entry here, and a function next to similar ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megaplan.importers import decoders, experts, hybrids, latent, linear_attention, mamba1, short_convolution
from megaplan.importers.reader import ConfigReader

ARCHITECTURES: dict[str, Callable[[ConfigReader], dict[str, Any]]] = {
    "arcee": decoders.arcee,
    "bamba": hybrids.bamba,
    "deepseek_v2": latent.deepseek_v2,
    "deepseek_v3": latent.deepseek_v3,
    "deepseek_v32": latent.sparse,
    "ernie4_5": decoders.ernie4_5,
    "ernie4_5_moe": experts.ernie4_5_moe,
    "exaone4": decoders.exaone4,
    "falcon_h1": hybrids.falcon_h1,
    "falcon_mamba": mamba1.falcon_mamba,
    "gemma": decoders.gemma,
    "gemma2": decoders.gemma2,
    "gemma3_text": decoders.gemma3,
    "glm": decoders.glm,
    "glm4": decoders.glm4,
    "glm4_moe": experts.glm4_moe,
    "glm_moe_dsa": latent.sparse,
    "gpt2": decoders.gpt2,
    "gpt_oss": experts.gpt_oss,
    "granite": decoders.llama,
    "granitemoe": experts.granite_moe,
    "granitemoehybrid": hybrids.granite_hybrid,
    "granitemoeshared": experts.granite_moe_shared,
    "hunyuan_v1_dense": decoders.hunyuan,
    "hunyuan_v1_moe": experts.hunyuan_moe,
    "jamba": mamba1.jamba,
    "kimi_linear": linear_attention.kimi_linear,
    "lfm2": short_convolution.lfm2,
    "lfm2_moe": short_convolution.lfm2_moe,
    "llama": decoders.llama,
    "mamba": mamba1.mamba,
    "mamba2": hybrids.mamba2,
    "minimax_m2": experts.minimax_m2,
    "ministral": decoders.ministral,
    "mistral": decoders.mistral,
    "mixtral": experts.mixtral,
    "nemotron": decoders.nemotron,
    "nemotron_h": hybrids.nemotron_h,
    "olmo2": decoders.olmo2,
    "olmo3": decoders.olmo3,
    "olmo_hybrid": linear_attention.olmo_hybrid,
    "olmoe": experts.olmoe,
    "phi": decoders.phi,
    "phi3": decoders.phi3,
    "phimoe": experts.phimoe,
    "qwen2": decoders.qwen2,
    "qwen2_moe": experts.qwen2_moe,
    "qwen3": decoders.qwen3,
    "qwen3_moe": experts.qwen3_moe,
    "qwen3_5_moe_text": linear_attention.qwen3_5_moe,
    "qwen3_5_text": linear_attention.qwen3_5,
    "qwen3_next": linear_attention.qwen3_next,
    "seed_oss": decoders.seed_oss,
    "smollm3": decoders.smollm3,
    "starcoder2": decoders.starcoder2,
}
"""Import function of each `model_type`, from a config to `model` of a spec."""

REFUSED: dict[str, tuple[str, str]] = {
    "gemma4_text": ("global_head_dim", "layers without a window have other heads, and experts in addition to the MLP have their own norms"),
    "minimax": ("layer_types", "most of its blocks are lightning attention (qkv_proj, output_gate, norm), which no letter is"),
    "recurrent_gemma": ("lru_width", "two blocks in three are RG-LRU recurrences (rg_lru, linear_x, linear_y, conv_1d)"),
    "zamba2": ("hybrid_layer_ids", "its attention blocks share parameters (shared_transformer), and every layer of a spec has its own"),
}  # fmt: skip
"""Model types whose blocks have no letter: the field that says so, and the tensors that are missing."""

RENAMED = {"kimi_k2": "deepseek_v3"}
"""Model types that are the class of another one under a new name: fields, blocks and names of tensors are the same."""

LIKE = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}
"""Model types whose text blocks are those of another one; fields that a config omits have other defaults."""
