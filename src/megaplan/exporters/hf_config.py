"""Hugging Face configs of a plan's model: one for each model type that may be it.

A config is right if reading it gives the plan's model, which the caller checks; the types here only have to name their fields.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from megaplan.spec.models import GroupedQueryAttention, LatentAttention, Mamba2, MixtureOfExperts, Mlp, Model, Spec
from megaplan.spec.pattern import parse_pattern

Config = dict[str, Any]
_Section = TypeVar("_Section")
_NEMOTRON = str.maketrans("AMED", "*ME-")


class ModelType(NamedTuple):
    """A model type of transformers.

    Attributes:
        name: `model_type`.
        architecture: Class that is named in `architectures`.
        fields: Names of the functions below whose fields the config has.
    """

    name: str
    architecture: str
    fields: tuple[str, ...]


_DECODER = ("layers_of_two", "heads")
TYPES = (
    ModelType("llama", "LlamaForCausalLM", (*_DECODER, "attention_bias", "mlp", "mlp_bias")),
    ModelType("mistral", "MistralForCausalLM", (*_DECODER, "mlp", "sliding_window")),
    ModelType("qwen2", "Qwen2ForCausalLM", (*_DECODER, "mlp", "layer_types")),
    ModelType("qwen3", "Qwen3ForCausalLM", (*_DECODER, "attention_bias", "mlp", "layer_types")),
    ModelType("olmo2", "Olmo2ForCausalLM", (*_DECODER, "attention_bias", "mlp")),
    ModelType("mixtral", "MixtralForCausalLM", (*_DECODER, "sliding_window", "mixtral_experts")),
    ModelType("olmoe", "OlmoeForCausalLM", (*_DECODER, "attention_bias", "olmoe_experts")),
    ModelType("qwen3_moe", "Qwen3MoeForCausalLM", (*_DECODER, "attention_bias", "layer_types", "qwen_experts")),
    ModelType("glm4_moe", "Glm4MoeForCausalLM", (*_DECODER, "attention_bias", "use_qk_norm", "deepseek_experts")),
    ModelType("deepseek_v3", "DeepseekV3ForCausalLM", ("layers_of_two", "latents", "deepseek_experts", "depths")),
    ModelType("mamba2", "Mamba2ForCausalLM", ("layers_of_one", "mamba2")),
    ModelType("nemotron_h", "NemotronHForCausalLM", ("letters", "heads", "nemotron")),
)
"""Earlier types are tried first, so that a plain decoder is a llama."""


def hf_configs(spec: Spec) -> Iterator[Config]:
    """The config of each model type that has the sections of a spec's model; whether it is that model is for the reader to say.

    Source: the configuration classes of transformers 5.24.
    """
    for each in TYPES:
        try:
            yield _config(each, spec)
        except _OtherModelError:
            continue


class _OtherModelError(Exception):
    """The model lacks the sections of a model type."""


def _section(value: object, kind: type[_Section]) -> _Section:
    if not isinstance(value, kind):
        raise _OtherModelError
    return value


def _config(kind: ModelType, spec: Spec) -> Config:
    model = spec.model
    fields: Config = {
        "architectures": [kind.architecture],
        "model_type": kind.name,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "tie_word_embeddings": model.tie_embeddings,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": "silu",
        "max_position_embeddings": spec.batch.seq_length,
    }
    for name in kind.fields:
        fields |= _FIELDS[name](spec)
    return fields


def _gqa(spec: Spec) -> GroupedQueryAttention:
    return _section(spec.model.attention, GroupedQueryAttention)


def _moe(spec: Spec) -> MixtureOfExperts:
    return _section(spec.model.moe, MixtureOfExperts)


def _mlp(spec: Spec) -> Mlp:
    return _section(spec.model.mlp, Mlp)


def _letters(spec: Spec) -> str:
    return "".join(parse_pattern(spec.model.pattern, spec.model.num_layers).layers)


def _heads(spec: Spec) -> Config:
    if spec.model.attention is None:
        return {}  # of a hybrid without attention
    attention = _gqa(spec)
    sizes = {"num_attention_heads": attention.num_heads, "num_key_value_heads": attention.num_kv_heads, "head_dim": attention.head_dim}
    share = {} if attention.rotary_dim is None else {"partial_rotary_factor": attention.rotary_dim / attention.head_dim}
    return sizes | share | _rotary(spec)


def _rotary(spec: Spec) -> Config:
    """Base and scaling of angles."""
    attention = spec.model.attention
    assert isinstance(attention, GroupedQueryAttention | LatentAttention)
    if attention.rope_scaling is None:
        return {"rope_theta": attention.rope_theta}
    given = attention.rope_scaling.model_dump(mode="json", exclude_none=True)
    length = given.pop("original_seq_length", None)
    scaling = {"rope_type": given.pop("kind"), **given} | ({} if length is None else {"original_max_position_embeddings": length})
    longest = max(spec.batch.seq_length, int((length or 0) * given["factor"]))
    return {"rope_theta": attention.rope_theta, "rope_scaling": scaling, "max_position_embeddings": longest}


def _latents(spec: Spec) -> Config:
    attention = _section(spec.model.attention, LatentAttention)
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    heads = {"num_attention_heads": attention.num_heads, "num_key_value_heads": attention.num_heads, "attention_bias": attention.bias}
    return {name: getattr(attention, name) for name in names} | heads | _rotary(spec)


def _layer_types(spec: Spec) -> Config:
    """Windows layer by layer."""
    attention = _gqa(spec)
    if attention.window_size is None:
        return {"use_sliding_window": False}
    full = set(attention.full_layers)
    kinds = ["full_attention" if layer in full else "sliding_attention" for layer in range(0, spec.model.num_layers, 2)]
    return {"use_sliding_window": True, "sliding_window": attention.window_size, "layer_types": kinds}


def _dense_width(model: Model) -> Config:
    return {} if model.mlp is None else {"intermediate_size": model.mlp.ffn_hidden_size}


def _chosen(spec: Spec, count: str, width: str) -> Config:
    """Number of experts, and of experts per token."""
    moe = _moe(spec)
    return {count: moe.num_experts, "num_experts_per_tok": moe.top_k, width: moe.ffn_hidden_size}


def _qwen_experts(spec: Spec) -> Config:
    moe = _moe(spec)
    dense = [layer for layer, letter in enumerate(_letters(spec)[1::2]) if letter == "D"]
    own = {"decoder_sparse_step": 1, "mlp_only_layers": dense, "norm_topk_prob": moe.normalize_top_k}
    width = {"intermediate_size": moe.ffn_hidden_size} | _dense_width(spec.model)
    return _chosen(spec, "num_experts", "moe_intermediate_size") | own | width


def _deepseek_experts(spec: Spec) -> Config:
    model, moe, feeds = spec.model, _moe(spec), _letters(spec)[1::2]
    return {
        **_chosen(spec, "n_routed_experts", "moe_intermediate_size"),
        "n_shared_experts": moe.shared_ffn_hidden_size // moe.ffn_hidden_size,
        "first_k_dense_replace": len(feeds) - len(feeds.lstrip("D")),
        "n_group": moe.num_groups or 1,
        "topk_group": moe.top_groups or 1,
        "routed_scaling_factor": moe.routed_scale,
        "norm_topk_prob": moe.normalize_top_k,
        "intermediate_size": moe.ffn_hidden_size,
        **_dense_width(model),
    }


def _mamba2(spec: Spec) -> Config:
    model, mamba = spec.model, _section(spec.model.mamba, Mamba2)
    heads = mamba.num_heads or mamba.expand * model.hidden_size // mamba.head_dim
    return {
        "layer_norm_epsilon": model.norm_eps,
        "num_heads": heads,
        "head_dim": mamba.head_dim,
        "expand": heads * mamba.head_dim // model.hidden_size,
        "state_size": mamba.state_dim,
        "n_groups": mamba.num_groups,
        "conv_kernel": mamba.conv_kernel,
        "use_conv_bias": mamba.conv_bias,
        "use_bias": mamba.bias,
        "chunk_size": mamba.chunk_size,
        "time_step_limit": [mamba.time_step_min, float("inf") if mamba.time_step_max is None else mamba.time_step_max],
    }


def _nemotron(spec: Spec) -> Config:
    model, mamba, moe = spec.model, spec.model.mamba, spec.model.moe
    fields: Config = {"layer_norm_epsilon": model.norm_eps, "mlp_hidden_act": "relu2", **_dense_width(model)}
    fields["mlp_bias"] = model.mlp is not None and model.mlp.bias
    if model.attention is None:
        fields |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": model.hidden_size}  # of no layer
    if mamba is not None:
        mamba = _section(mamba, Mamba2)
        fields |= {
            "mamba_num_heads": mamba.num_heads or mamba.expand * model.hidden_size // mamba.head_dim,
            "mamba_head_dim": mamba.head_dim,
            "ssm_state_size": mamba.state_dim,
            "n_groups": mamba.num_groups,
            "conv_kernel": mamba.conv_kernel,
            "use_conv_bias": mamba.conv_bias,
            "use_bias": mamba.bias,
            "chunk_size": mamba.chunk_size,
            "time_step_min": mamba.time_step_min,
        }
    if moe is not None:
        fields |= _chosen(spec, "n_routed_experts", "moe_intermediate_size")
        fields |= {"n_group": moe.num_groups or 1, "topk_group": moe.top_groups or 1, "routed_scaling_factor": moe.routed_scale}
        fields |= {"norm_topk_prob": moe.normalize_top_k, "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size}
        fields |= {} if moe.latent_size is None else {"moe_latent_size": moe.latent_size}
    return fields


_FIELDS: dict[str, Callable[[Spec], Config]] = {
    "layers_of_one": lambda spec: {"num_hidden_layers": spec.model.num_layers},
    "layers_of_two": lambda spec: {"num_hidden_layers": spec.model.num_layers // 2},
    "letters": lambda spec: {"num_hidden_layers": spec.model.num_layers, "hybrid_override_pattern": _letters(spec).translate(_NEMOTRON)},
    "heads": _heads,
    "latents": _latents,
    "attention_bias": lambda spec: {"attention_bias": _gqa(spec).bias},
    "use_qk_norm": lambda spec: {"use_qk_norm": _gqa(spec).qk_norm},
    "sliding_window": lambda spec: {"sliding_window": _gqa(spec).window_size},
    "layer_types": _layer_types,
    "mlp": lambda spec: {"intermediate_size": _mlp(spec).ffn_hidden_size},
    "mlp_bias": lambda spec: {"mlp_bias": _mlp(spec).bias},
    "mixtral_experts": lambda spec: _chosen(spec, "num_local_experts", "intermediate_size"),
    "olmoe_experts": lambda spec: _chosen(spec, "num_experts", "intermediate_size") | {"norm_topk_prob": _moe(spec).normalize_top_k},
    "qwen_experts": _qwen_experts,
    "deepseek_experts": _deepseek_experts,
    "depths": lambda spec: {"num_nextn_predict_layers": 0 if spec.model.features.mtp is None else spec.model.features.mtp.depth},
    "mamba2": _mamba2,
    "nemotron": _nemotron,
}
