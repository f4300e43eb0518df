"""Arguments of MindSpeed that correspond to one or several arguments of Megatron-LM with other names.

Sources are files of Ascend/MindSpeed-LLM and Ascend/MindSpeed.
"""

import re
from types import MappingProxyType
from typing import Any

from megaplan.hosts.megatron.argument import flag
from megaplan.importers.megatron.deepspeed import Translated
from megaplan.spec.models import MAX_LAYERS

_BALANCING = MappingProxyType(
    {"softmax_topk": "none", "sparsemixer_topk": "none", "pai_megatron_aux_loss": "aux_loss", "group_limited_greedy": "aux_loss"}
)
"""Choices of experts of MindSpeed, which Megatron-LM names by the loss (`core/transformer/moe/router.py` of Ascend/MindSpeed-LLM)."""


def translate_mindspeed(values: dict[str, Any]) -> list[Translated]:
    """Translates arguments of MindSpeed: removes them from `values` and adds their equivalents."""
    if values.pop("o2_gradient", False):
        values["grad_reduce_in_bf16"] = True
    found = [*_gates(values), *_balancing(values), *_delta_nets(values), *_indexer(values), *_layers_of_stages(values)]
    return found + (_experts(values) if values.get("num_experts") is not None else [])


def _gates(values: dict[str, Any]) -> list[Translated]:
    """Gates of GELU, with three matrices, under the names of forks.

    Source: `core/transformer/mlp.py` of Ascend/MindSpeed-LLM; forks of Megatron-LM have `--geglu` with the same meaning.
    """
    given = [key for key in ("geglu", "gelu_tanh") if values.pop(key, False)]
    if not given or values.get("swiglu"):
        return []
    values["quick_geglu"] = True
    return [Translated("quick_geglu", f"{flag(given[0])} makes a gate of GELU, of three matrices, and is read as --quick-geglu")]


def _balancing(values: dict[str, Any]) -> list[Translated]:
    given = values.get("moe_router_load_balancing_type")
    if (balancing := _BALANCING.get(str(given))) is None:
        return []
    values["moe_router_load_balancing_type"] = balancing
    said = f"--moe-router-load-balancing-type {given} of MindSpeed balances as {balancing}"
    return [Translated("moe_router_load_balancing_type", said)]


def foreign_modules(spec: Any) -> str:
    """The modules that `--spec` names, if they are not Megatron-LM's own."""
    words = re.findall(r"[\w.]+", " ".join(map(str, spec)) if isinstance(spec, list) else str(spec or ""))
    return " ".join(words) if any("." in word and not word.startswith("megatron.") for word in words) else ""


def is_of_mindspeed(values: dict[str, Any]) -> bool:
    """True for a launch of MindSpeed, by its modules and the arguments that it adds; FlashAttention needs no Transformer Engine there.

    Source: `features_manager/transformer/flash_attention` of Ascend/MindSpeed, `features_manager` of Ascend/MindSpeed-LLM.
    """
    return "mindspeed" in foreign_modules(values.get("spec")) or any(values.get(key) for key in _OF_MINDSPEED)


_OF_MINDSPEED = ("use_fused_rmsnorm", "use_fused_swiglu", "use_fused_rotary_pos_emb", "use_ascend_mc2", "reuse_fp32_param")
"""Switches that Megatron-LM does not have and most launches of MindSpeed do."""


def _delta_nets(values: dict[str, Any]) -> list[Translated]:
    """Gated delta nets of MindSpeed, with gated attention in every n-th layer.

    Source: `core/transformer/transformer_block.py`, `tasks/models/transformer/qwen3_next_full_attention.py` and
    `qwen3_next_gated_deltanet_attention.py` of Ascend/MindSpeed-LLM.
    """
    period = values.get("full_attention_interval")
    if isinstance(period, bool) or not isinstance(period, int) or period < 1:
        return []
    values |= {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": period, "attention_output_gate": True}
    for own, name in _OF_DELTA_NETS.items():
        if values.get(own) is not None:
            values.setdefault(name, values[own])
    for key in ("full_attention_interval", "mamba_expand", "mamba_chunk_size", *_OF_DELTA_NETS):
        values.pop(key, None)
    said = (
        f"--full-attention-interval {period} of MindSpeed is read as --experimental-attention-variant gated_delta_net, with gated attention"
    )
    return [Translated("linear_attention_freq", said)]


_OF_DELTA_NETS = {"mamba_d_conv": "linear_conv_kernel_dim", "partial_rotary_factor": "rotary_percent"}
"""Arguments of MindSpeed's delta nets and of the attention between them, and Megatron-LM's names of the same values."""


def _experts(values: dict[str, Any]) -> list[Translated]:
    """Dense layers and shared experts of MindSpeed.

    Source: `core/transformer/transformer_block.py` and `features_manager/moe/shared_expert.py` of Ascend/MindSpeed-LLM.
    """
    found = _whole_experts(values)
    first, period, layers = (values.get(key) for key in ("first_k_dense_replace", "moe_layer_freq", "num_layers"))
    period = abs(period) if isinstance(period, int) and not isinstance(period, bool) else 0
    if period:
        values["moe_layer_freq"] = period  # the remainder of a layer number is 0 for either sign
    if isinstance(first, int) and isinstance(layers, int) and 0 < layers <= MAX_LAYERS:
        del values["first_k_dense_replace"]
        if first and period:
            values["moe_layer_freq"] = [int(layer >= first and layer % period == 0) for layer in range(layers)]
            said = f"--first-k-dense-replace {first}: experts from layer {max(first, 0)} on, in every {period}. by its number from 0"
            found.append(Translated("moe_layer_freq", said))
    shared, width = values.get("n_shared_experts"), values.get("moe_ffn_hidden_size") or values.get("ffn_hidden_size")
    if isinstance(shared, int) and isinstance(width, int):
        del values["n_shared_experts"]
        if shared and values.get("moe_shared_expert_intermediate_size") is None:
            values["moe_shared_expert_intermediate_size"] = shared * width
            found.append(
                Translated(
                    "moe_shared_expert_intermediate_size",
                    f"--n-shared-experts {shared} is read as one shared expert {shared} times as wide",
                )
            )
    return found


def _whole_experts(values: dict[str, Any]) -> list[Translated]:
    """Experts that are spread over tensor ranks, too, instead of being cut by them.

    Source: `features_manager/moe/tp_extend_ep.py` of Ascend/MindSpeed-LLM.
    """
    tp, ep = (values.get(f"{key}_model_parallel_size") or 1 for key in ("tensor", "expert"))
    if not values.pop("moe_tp_extend_ep", False) or not (isinstance(tp, int) and isinstance(ep, int)):
        return []
    values |= {"expert_model_parallel_size": ep * tp, "expert_tensor_parallel_size": 1}
    return [
        Translated(
            "expert_model_parallel_size", f"--moe-tp-extend-ep of MindSpeed spreads unsharded experts over ep · tp = {ep * tp} ranks"
        )
    ]


_OF_INDEXER: MappingProxyType[str, tuple[str, Any]] = MappingProxyType(
    {
        "index_n_heads": ("dsa_indexer_n_heads", 64),
        "index_head_dim": ("dsa_indexer_head_dim", 128),
        "index_topk": ("dsa_indexer_topk", 2048),
        "index_topk_freq": ("dsa_indexer_topk_freq", 1),
        "index_skip_topk_offset": ("dsa_indexer_skip_topk_offset", 2),
        "indexer_loss_coeff": ("dsa_indexer_loss_coeff", 1.0),
    }
)
"""Arguments of MindSpeed's indexer: Megatron-LM's names of the same values, and MindSpeed's defaults."""
INDEXER = "enable_dsa_indexer"
_FUSED = ("use_fused_lightning_indexer", "use_fused_lightning_indexer_loss")


def _indexer(values: dict[str, Any]) -> list[Translated]:
    """Attention to the keys that an indexer chooses, if its kernels are fused; otherwise its switch stays in `values` and is refused.

    Source: `features_manager/transformer/multi_latent_attention/dsa_indexer_feature.py` of Ascend/MindSpeed-LLM.
    """
    if not values.get(INDEXER):
        return []
    given = {name: values.pop(own, default) for own, (name, default) in _OF_INDEXER.items()}
    *fused, sparse = [values.pop(key, False) for key in (*_FUSED, "use_sparse_flash_attn")]
    if not (any(fused) and sparse):
        return []
    del values[INDEXER]
    values |= {"experimental_attention_variant": "dsa", **given, "dsa_indexer_use_sparse_loss": True, "dsa_kernel_backend": "cudnn"}
    said = f"{flag(INDEXER)} of MindSpeed is read as --experimental-attention-variant dsa, its kernels as cuDNN's"
    return [Translated("experimental_attention_variant", said, uncertain=True)]


def _layers_of_stages(values: dict[str, Any]) -> list[Translated]:
    """Layers of each pipeline rank, with commas between them; layers without an operation disable the list.

    Source: `features_manager/pipeline_parallel/num_layer_list.py` of Ascend/MindSpeed-LLM.
    """
    given = values.get("num_layer_list")
    sizes = re.findall(r"\d+", " ".join(map(str, given)) if isinstance(given, list) else str(given or ""))
    if not sizes or values.get("pipeline_model_parallel_layout") is not None:
        return []
    del values["num_layer_list"]
    if values.get("noop_layers") is not None:
        return []
    ahead = values.get("mtp_num_layers")
    stages = "|".join(f"t*{size}" for size in sizes)
    values["pipeline_model_parallel_layout"] = f"E{stages}{'m' * ahead if isinstance(ahead, int) and 0 < ahead < MAX_LAYERS else ''}L"
    said = f"--num-layer-list {','.join(sizes)} of MindSpeed is read as --pipeline-model-parallel-layout: with the same layers on each rank"
    return [Translated("pipeline_model_parallel_layout", said)]
