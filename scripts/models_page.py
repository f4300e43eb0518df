"""Write docs/reference/models.md: well-known models, a command each, and what it answers. `--check` compares instead.

The configs are the fields that decide a shape and differ from the class's default, as the models' pages give them.
"""

import json
import sys
from pathlib import Path
from typing import Any

from megaplan.api.estimate import estimate
from megaplan.importers.hf import ImportedConfig, import_hf
from megaplan.spec.not_built_yet import megarun_refuses
from megarun.huggingface.names import NAMES

PAGE = Path(__file__).parents[1] / "docs/reference/models.md"
GIB = 2**30
HEAD = """# Well-known models

This page lists the results of `megaplan estimate` for well-known models, from their `config.json` alone. MODEL is the path of the config,
or the model's name if its config is in the local cache (`hf download NAME config.json` puts it there). Every estimate takes less than a
second. The batch
is one sequence of 4,096 tokens per GPU, the GPUs are H200s, the optimizer is AdamW, and parameters are unique ones.
`scripts/models_page.py` writes this page.

The last column states whether megarun trains the model, or which options it refuses (MP790); whether its weights can be imported and
exported, with logits equal to those of transformers for random weights; and which fields change values but are not computed (MP820).

| Model | `megaplan estimate MODEL` … | Parameters | Peak of a GPU (GiB) | Fits | megarun |
|---|---|---|---|---|---|
"""
TAIL = """
A model whose blocks megarun does not build yet is still priced, and a note names the options (MP790).
[What is read](hf-import.md) lists the model types.

Open points: an imported config has no prediction modules of DeepSeek-V3, GLM and Qwen, since transformers builds none. A plan that adds
them (`model.features.mtp`) counts and trains them, and their weights can be imported and exported
([weights](../guides/huggingface.md)).
"""
_NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_GRANITE = ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)]

_KIMI = [*range(4, 27, 4), 27]
_LFM2 = ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)]


def _sizes(hidden: int, width: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, **more,
    }  # fmt: skip


MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "meta-llama/Llama-3.1-8B": ({"model_type": "llama", **_sizes(4096, 14336, 32, 32, 8, 128256)}, ("mesh.dp_shard=8",)),
    "meta-llama/Llama-3.1-70B": (
        {"model_type": "llama", **_sizes(8192, 28672, 80, 64, 8, 128256)},
        ("mesh.dp_shard=32",),
    ),
    "mistralai/Mistral-7B-v0.1": ({"model_type": "mistral", **_sizes(4096, 14336, 32, 32, 8, 32000)}, ("mesh.dp_shard=8",)),
    "mistralai/Mixtral-8x7B-v0.1": ({"model_type": "mixtral", **_sizes(4096, 14336, 32, 32, 8, 32000)}, ("mesh.dp_shard=16", "mesh.ep=8")),
    "Qwen/Qwen2.5-0.5B": ({"model_type": "qwen2", **_sizes(896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True)}, ()),
    "Qwen/Qwen3-8B": ({"model_type": "qwen3", **_sizes(4096, 12288, 36, 32, 8, 151936, head_dim=128)}, ("mesh.dp_shard=8",)),
    "Qwen/Qwen3-235B-A22B": (
        {"model_type": "qwen3_moe", **_sizes(4096, 12288, 94, 64, 4, 151936, head_dim=128, moe_intermediate_size=1536)},
        ("mesh.dp_shard=128", "mesh.ep=32", "recompute.blocks={A: full, E: selective}"),
    ),
    "deepseek-ai/DeepSeek-V3": (
        {"model_type": "deepseek_v3"},
        ("mesh.dp_shard=256", "mesh.ep=64", "recompute.blocks={A: full, D: full, E: selective}"),
    ),
    "openai/gpt-oss-20b": ({"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32}, ("mesh.dp_shard=8", "mesh.ep=8")),
    "zai-org/GLM-4.5-Air": ({"model_type": "glm4_moe", "head_dim": 128, "attention_bias": True}, ("mesh.dp_shard=64", "mesh.ep=16")),
    "openai/gpt-oss-120b": (
        {"model_type": "gpt_oss", "num_hidden_layers": 36, "num_local_experts": 128},
        ("mesh.dp_shard=32", "mesh.ep=32"),
    ),
    "google/gemma-3-27b-pt": (
        {
            "model_type": "gemma3_text", **_sizes(5376, 21504, 62, 32, 16, 262208, head_dim=128, sliding_window=1024),
            "query_pre_attn_scalar": 168, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        ("mesh.dp_shard=32",),
    ),
    "google/gemma-3-1b-pt": ({"model_type": "gemma3_text", **_sizes(1152, 6912, 26, 4, 1, 262144, head_dim=256, sliding_window=512)}, ()),
    "allenai/OLMo-2-1124-7B": ({"model_type": "olmo2", **_sizes(4096, 11008, 32, 32, 32, 100352)}, ("mesh.dp_shard=8",)),
    "microsoft/Phi-3-mini-4k-instruct": ({"model_type": "phi3"}, ("mesh.dp_shard=4",)),
    "nvidia/Nemotron-H-8B-Base-8K": (
        {"model_type": "nemotron_h", "hybrid_override_pattern": _NEMOTRON, "intermediate_size": 21504},
        ("mesh.dp_shard=8",),
    ),
    "ibm-granite/granite-4.0-h-tiny": (
        {
            "model_type": "granitemoehybrid", "layer_types": _GRANITE, **_sizes(1536, 512, 40, 12, 4, 100352), "num_local_experts": 64,
            "num_experts_per_tok": 6, "shared_intermediate_size": 1024, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128,
            "tie_word_embeddings": True, "position_embedding_type": "nope",
        },
        ("mesh.dp_shard=8",),
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": ({"model_type": "qwen3_next"}, ("mesh.dp_shard=64", "mesh.ep=16", "recompute.default=selective")),
    "Qwen/Qwen3.5-27B": (
        {"model_type": "qwen3_5_text", **_sizes(5120, 17408, 64, 24, 4, 248320), "linear_num_value_heads": 48},
        ("mesh.dp_shard=32",),
    ),
    "Qwen/Qwen3.5-35B-A3B": (
        {
            "model_type": "qwen3_5_moe_text", **_sizes(2048, 5632, 40, 16, 2, 248320), "linear_num_value_heads": 32, "num_experts": 256,
            "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        },
        ("mesh.dp_shard=32", "mesh.ep=16", "recompute.default=selective"),
    ),
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": (
        {
            "model_type": "kimi_linear",
            "linear_attn_config": {
                "full_attn_layers": _KIMI, "kda_layers": [layer for layer in range(1, 28) if layer not in _KIMI], "head_dim": 128,
                "num_heads": 32, "short_conv_kernel_size": 4,
            },
        },
        ("mesh.dp_shard=32", "mesh.ep=16"),
    ),
    "ai21labs/AI21-Jamba-1.5-Mini": ({"model_type": "jamba"}, ("mesh.dp_shard=32", "mesh.ep=16", "recompute.default=selective")),
    "deepseek-ai/DeepSeek-V3.2": (
        {"model_type": "deepseek_v32"},
        ("mesh.dp_shard=256", "mesh.ep=64", "recompute.blocks={A: full, D: full, E: selective}"),
    ),
    "zai-org/GLM-5": (
        {"model_type": "glm_moe_dsa"},
        ("mesh.dp_shard=256", "mesh.ep=64", "recompute.blocks={A: full, D: full, E: selective}"),
    ),
    "allenai/Olmo-Hybrid-7B": (
        {"model_type": "olmo_hybrid", **_sizes(3840, 11008, 32, 30, 30, 100352), "linear_allow_neg_eigval": True},
        ("mesh.dp_shard=16", "recompute.default=selective"),
    ),
    "tiiuae/Falcon-H1-0.5B-Base": (
        {
            "model_type": "falcon_h1", **_sizes(1024, 2048, 36, 8, 2, 32784, head_dim=64), "mamba_d_ssm": 1536, "mamba_n_heads": 24,
            "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_rms_norm": False, "projectors_bias": False,
        },
        (),
    ),
    "LiquidAI/LFM2-1.2B": (
        {
            "model_type": "lfm2", **_sizes(2048, 12288, 16, 32, 8, 65536), "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "block_multiple_of": 256, "tie_word_embeddings": True,
        },
        (),
    ),
    "LiquidAI/LFM2-8B-A1B": (
        {"model_type": "lfm2_moe", "num_hidden_layers": 24, "layer_types": _LFM2},
        ("mesh.dp_shard=8", "mesh.ep=8"),
    ),
}  # fmt: skip
"""Fields of the config, and the changes that the command makes."""


SILENT = {"num_nextn_predict_layers", "attention_dropout", "residual_in_fp32", "tie_word_embeddings", "text_config", "use_mamba_kernels"}
"""Fields that are reported and change no value of what is trained."""


def trained(imported: ImportedConfig) -> str:
    """Support of a model in megarun."""
    refused = [line.partition(" = ")[0] for item in megarun_refuses(imported.loaded.spec) for line in item.detail.splitlines()]
    reported = [
        line.partition(" = ")[0] for item in imported.loaded.diagnostics if item.code == "MP820" for line in item.detail.splitlines()
    ]
    lacking = sorted({*reported} - SILENT)
    said = [f"refuses {', '.join(f'`{key}`' for key in refused)}" if refused else "trains"]
    said += ["weights in and out" if imported.family in NAMES and not refused else "no weights"]
    return "; ".join([*said, *([f"without {', '.join(f'`{key}`' for key in lacking)}"] if lacking else [])])


def row(name: str) -> str:
    """A line of the table."""
    fields, changes = MODELS[name]
    given = ("optimizer.matrix=adamw", *changes)
    imported = import_hf(json.dumps(fields), name, given)
    found = estimate(imported.loaded.spec.as_document())
    said = " ".join(f"--set '{change}'" if " " in change else f"--set {change}" for change in given)
    peak = found.peak_bytes / GIB
    return f"| {name} | `{said}` | {found.parameters:,} | {peak:.1f} | {'yes' if found.fits else 'no'} | {trained(imported)} |\n"


def page() -> str:
    """The page's text."""
    return HEAD + "".join(row(name) for name in MODELS) + TAIL


def main() -> int:
    """Write the page, or compare it."""
    text = page()
    if "--check" in sys.argv:
        return 0 if PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
