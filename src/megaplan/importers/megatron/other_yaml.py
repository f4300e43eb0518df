"""Launch arguments from YAML that states the model under other names and defaults: gpt-neox's and NeMo 1's.

Sources: `megatron/neox_arguments/neox_args.py`, `megatron/model/transformer.py` of EleutherAI/gpt-neox;
`megatron_gpt_config.yaml`, `megatron_base_model.py` and `nlp_overrides.py` of NeMo 1.23.
"""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError
from megaplan.importers.megatron.arguments import Given, name_of, typed
from megaplan.importers.megatron.log import from_attributes
from megaplan.spec.document import Document

_SIZES = frozenset({"num_layers", "hidden_size", "num_attention_heads"})
_NORMS = {"layernorm": "LayerNorm", "layernorm1p": "LayerNorm", "low_precision_layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_POSITIONS = {"learned": "learned_absolute", "rotary": "rope"}
_GATED = ("swiglu", "geglu", "reglu", "bilinear", "glu")
_HEADS_OF_ALL = re.compile(r"global|flash|ring|local")
"""Kinds of attention of gpt-neox whose tensors are those of attention to every token."""
_SAME = (
    "num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "seq_length", "max_position_embeddings", "train_iters", "min_lr",
    "weight_decay", "lr_decay_style", "seed", "warmup", "checkpoint_activations", "checkpoint_num_layers", "moe_num_experts",
    "partition_activations", "tokenizer_type", "train_batch_size",
)  # fmt: skip
"""Names of gpt-neox that Megatron-LM or one of its forks has, too."""
_NEOX = MappingProxyType(
    {
        "pipe_parallel_size": "pipeline_model_parallel_size",
        "model_parallel_size": "tensor_model_parallel_size",
        "train_micro_batch_size_per_gpu": "micro_batch_size",
        "train_batch_size": "global_batch_size",
        "rotary_pct": "rotary_percent",
        "rotary_emb_base": "rotary_base",
        "no_weight_tying": "untie_embeddings_and_output_weights",
        "gradient_clipping": "clip_grad",
        "warmup": "lr_warmup_fraction",
        "global_num_gpus": "world_size",
    }
)
_NEMO = MappingProxyType(
    {
        "encoder_seq_length": "seq_length",
        "rotary_percentage": "rotary_percent",
        "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
        "activations_checkpoint_granularity": "recompute_granularity",
        "activations_checkpoint_method": "recompute_method",
        "activations_checkpoint_num_layers": "recompute_num_layers",
        "use_flash_attention": "use_flash_attn",
        "ub_tp_comm_overlap": "tp_comm_overlap",
        "fp8_params": "fp8_param_gather",
        "override_vocab_size": "vocab_size",
        "qkv_bias": "add_qkv_bias",
    }
)
_REFERENCE = re.compile(r"\$\{(?:\.|model\.)(\w+)\}|\$\{(multiply|divide): *(\d{1,12}), *(\d{1,12})\}")
_MOST_NESTED = 4
_OF_FP8 = ("fp8_format", "fp8_param_gather", "fp8_margin", "fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo")
"""Arguments that NeMo 1 reads where `fp8` is true alone."""
_LEFT_TO_DEFAULTS = (
    "activation",
    "bias",
    "normalization",
    "share_embeddings_and_output_weights",
    "fp8",
    "fp8_e4m3",
    "fp8_hybrid",
    "virtual_pipeline_model_parallel_size",
)


def is_neox(whole: Mapping[str, Any]) -> bool:
    """True for a configuration of gpt-neox: flat, with sizes and DeepSpeed's batch or gpt-neox's degrees."""
    keys = {name_of(key) for key in whole}
    return keys >= _SIZES and bool(keys & {"pipe_parallel_size", "train_micro_batch_size_per_gpu"})


def is_nemo(whole: Mapping[str, Any]) -> bool:
    """True for a configuration of NeMo 1 that states a GPT model's sizes."""
    model = whole.get("model")
    return isinstance(whole.get("trainer"), dict) and isinstance(model, dict) and model.keys() >= _SIZES | {"encoder_seq_length"}


def read_neox(document: Document, name: str) -> Given:
    """The arguments of a configuration of gpt-neox.

    Raises:
        MegaplanError: MP926, its layers are not of attention.
    """
    given = {name_of(key): value for key, value in document.value.items()}
    lines = {name_of(key): document.source.locate(str(key)).line for key in document.value}
    kinds = re.findall(r"[A-Za-z_]\w*", str(given.get("attention_config", "global")))
    if other := next((kind for kind in kinds if not _HEADS_OF_ALL.fullmatch(kind)), None):
        said = f"attention_config = {given['attention_config']}: gpt-neox's layers of {other} have no letter in a spec"
        raise MegaplanError([diagnostic("MP926", said, Location(name, lines["attention_config"]), ("megaplan new list",))])
    values: dict[str, Any] = {_NEOX.get(key, key): given[key] for key in (*_SAME, *_NEOX) if given.get(key) is not None}
    if not any(key.startswith("te_") for key in given):
        values["transformer_impl"] = "local"
    if values.get("pipeline_model_parallel_size") == 0:  # layers in sequence, without a pipeline engine
        del values["pipeline_model_parallel_size"]
    values |= {f"{kind}_dropout": given.get(f"{kind}_dropout", 0.0) for kind in ("hidden", "attention")}
    norm, position = str(given.get("norm", "layernorm")), str(given.get("pos_emb", "learned"))
    epsilon = given.get("rms_norm_epsilon", 1e-8) if norm == "rmsnorm" else given.get("layernorm_epsilon", 1e-5)
    values |= {
        "normalization": _NORMS.get(norm, norm),
        "norm_epsilon": epsilon,
        "position_embedding_type": _POSITIONS.get(position, position),
    }
    values["zero_stage"] = _part(given, "zero_optimization").get("stage", 0)
    optimizer = _part(given, "optimizer")
    values |= {"optimizer": str(optimizer.get("type", "adam")).lower(), "lr": _part(optimizer, "params").get("lr")}
    values |= _width(given)
    precision = _precision(given)
    values |= {precision: True} if precision else {}
    if "flash" in kinds:
        values["use_flash_attn"] = True
    values["disable_bias_linear"] = not all(_biases(given))
    if given.get("vocab_file") is not None and given.get("tokenizer_type"):
        values["tokenizer_model"] = given["vocab_file"]
    return _given({key: value for key, value in values.items() if value is not None}, lines, list(_of_neox(given, values)))


def _biases(given: Mapping[str, Any]) -> tuple[bool, bool]:
    """True for biases of attention, and of MLPs."""
    return bool(given.get("use_bias_in_attn_linear", True)), bool(given.get("use_bias_in_mlp", True))


def _of_neox(given: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    """Notes on differences between gpt-neox and the plan."""
    yield "gpt-neox trains with DeepSpeed, whose buffers host megatron does not have; host.framework=gpt-neox has the time of its modules"
    attention, mlp = _biases(given)
    if attention != mlp:
        yield f"biases of {'attention' if attention else 'MLPs'} alone are not counted"
    if values["swiglu"] and given.get("intermediate_size") is not None:
        yield f"intermediate_size = {given['intermediate_size']} makes two halves of {values['ffn_hidden_size']}, as gpt-neox has it"
    if not given.get("use_bias_in_norms", True) and values["normalization"] == "LayerNorm":
        yield "norms without a bias are counted with one"
    if given.get("gpt_j_residual"):
        yield "gpt_j_residual: attention and MLP of a layer are planned one after the other, with the same parameters"
        if given.get("gpt_j_tied"):
            yield "gpt_j_tied: a layer has one norm for both blocks, but two are counted"
    if steps := given.get("gradient_accumulation_steps"):
        yield f"gradient_accumulation_steps = {steps}: --set schedule.num_microbatches={steps}"


def _width(given: Mapping[str, Any]) -> dict[str, Any]:
    """Width and gate of gpt-neox's MLP; gate and up of a gated one have a third of the width each, rounded up to a multiple."""
    gated, hidden, factor = str(given.get("activation", "gelu")) in _GATED, given.get("hidden_size"), given.get("expansion_factor", 4)
    width, multiple = given.get("intermediate_size"), given.get("mlp_multiple_of", 1)
    if width is None and isinstance(hidden, int) and isinstance(factor, int | float):
        width = int(factor * hidden)
    if not (isinstance(width, int) and isinstance(multiple, int) and multiple > 0):
        return {"swiglu": gated, "ffn_hidden_size": width}  # refused as any other width that is not an integer
    width = int(width * 2 / 3) // 2 if gated else width
    return {"swiglu": gated, "ffn_hidden_size": -(-width // multiple) * multiple}


def _precision(given: Mapping[str, Any]) -> str:
    """The argument of the precision; empty for fp32."""
    half = _part(given, "fp16")
    if (
        _part(given, "bf16").get("enabled")
        or given.get("precision") == "bfloat16"
        or (half.get("enabled") and half.get("type") == "bfloat16")
    ):
        return "bf16"
    return "fp16" if half.get("enabled") or given.get("precision") == "fp16" else ""


def read_nemo(document: Document, name: str) -> Given:
    """The arguments of a configuration of NeMo 1.

    Raises:
        MegaplanError: MP926, it trains adapters, or another model than GPT.
    """
    whole, model = document.value, _resolved(document.value["model"])
    other = next((key for key in model if str(key).startswith(("bert_", "decoder", "peft", "mm_cfg", "retro")) and model[key]), None)
    if other is not None:
        at = document.source.locate(f"model.{other}")
        said = f"{name} has model.{other}, and configurations of NeMo 1 that train a whole GPT model are read"
        raise MegaplanError([diagnostic("MP926", said, at, ("megaplan estimate MODEL --gpus 8",))])
    trainer, optim, tokens = (_part(part, key) for part, key in ((whole, "trainer"), (model, "optim"), (model, "tokenizer")))
    stated = {key: value for key, value in model.items() if not isinstance(value, dict) and key not in _LEFT_TO_DEFAULTS}
    values, _ = from_attributes({_NEMO.get(key, key): value for key, value in stated.items()})
    values |= _of_model(model) | _of_run(model, trainer, optim) | _tokenizer(tokens)
    notes = (
        ["the model is planned as Megatron-Core's, which NeMo 1 builds with model.mcore_gpt: true"] if not model.get("mcore_gpt") else []
    )
    lines = {name_of(key): document.source.locate(f"model.{key}").line for key in model}
    return _given({key: value for key, value in values.items() if value is not None}, lines, notes)


def _of_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the model that NeMo 1 states by words, or has other defaults of."""
    heads, activation = model.get("num_query_groups"), str(model.get("activation", "gelu")).removeprefix("fast-")
    norm = str(model.get("normalization", "layernorm"))
    return {
        "normalization": _NORMS.get(norm, norm),
        "apply_layernorm_1p": norm == "layernorm1p",
        "disable_bias_linear": model.get("bias") is False,
        "untie_embeddings_and_output_weights": model.get("share_embeddings_and_output_weights") is False,
        "swiglu": activation in _GATED,
        "squared_relu": activation == "squared-relu",
        "group_query_attention": heads not in (None, model["num_attention_heads"]),
        "num_query_groups": heads,
    }


def _of_run(model: Mapping[str, Any], trainer: Mapping[str, Any], optim: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the run that NeMo 1 states by words, or in other sections."""
    virtual = model.get("virtual_pipeline_model_parallel_size") or 1
    precision = str(model.get("precision") or trainer.get("precision") or "")
    return {
        "use_distributed_optimizer": str(optim.get("name")) in ("distributed_fused_adam", "mcore_distributed_optim"),
        "overlap_grad_reduce": bool(optim.get("overlap_grad_sync")),
        "overlap_param_gather": bool(optim.get("overlap_param_sync")),
        "grad_reduce_in_bf16": str(optim.get("grad_sync_dtype")) == "bf16",
        "bf16": precision.startswith("bf16"),
        "fp16": precision.startswith("16"),
        "no_gradient_accumulation_fusion": not model.get("gradient_accumulation_fusion"),
        **({"fp8_format": "hybrid" if model.get("fp8_hybrid") else "e4m3"} if model.get("fp8") else dict.fromkeys(_OF_FP8)),
        "num_virtual_stages_per_pipeline_rank": None if virtual == 1 else virtual,
        "optimizer": "adam",
        **{key: optim.get(key) for key in ("lr", "weight_decay")},
        "nproc_per_node": trainer.get("devices"),
        "nnodes": trainer.get("num_nodes"),
        "train_iters": trainer.get("max_steps"),
    }


def _resolved(model: Mapping[str, Any]) -> dict[str, Any]:
    """The section with its interpolations (`${…}`) of keys, and NeMo's products and quotients of them, evaluated."""

    def found(match: re.Match[str]) -> str:
        if match[1]:
            value = model.get(match[1])
            return str(value) if value is not None and "${" not in str(value) else f"$<{match[1]}>"
        one, other = int(match[3]), int(match[4])
        return str(one * other if match[2] == "multiply" else one // max(other, 1))

    def resolved(value: Any) -> Any:
        for _ in range(_MOST_NESTED if isinstance(value, str) else 0):
            value = _REFERENCE.sub(found, value)
        return typed(value)

    return {str(key): resolved(value) for key, value in model.items()}


def _tokenizer(tokens: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer by Megatron-LM's arguments."""
    kinds = {
        "huggingface": ("HuggingFaceTokenizer", tokens.get("type")),
        "sentencepiece": ("GPTSentencePieceTokenizer", tokens.get("model")),
    }
    kind, model = kinds.get(str(tokens.get("library")), (tokens.get("type"), tokens.get("model")))
    return {"tokenizer_type": kind, "tokenizer_model": model}


def _part(whole: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = whole.get(key)
    return part if isinstance(part, dict) else {}


def _given(values: dict[str, Any], lines: Mapping[str, int | None], notes: list[str]) -> Given:
    """Arguments of a program whose unknown names are ignored unless they decide a tensor."""
    places = {key: line for key, line in lines.items() if line is not None}
    return Given(values, places, left_out=tuple((0, each) for each in notes), parsed=True, program="pretrain_gpt.py", forked=True)
