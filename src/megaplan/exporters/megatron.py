"""A launch of Megatron-LM: torchrun and the arguments of its parser, read back by `megaplan import megatron`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from megaplan.dtypes import DType
from megaplan.exporters.values import Exported, Loss, Source, complete
from megaplan.hosts.megatron.arguments import FSDP_DTYPES
from megaplan.hosts.megatron.from_spec import LETTERS
from megaplan.hosts.megatron.pattern import format_hybrid
from megaplan.hosts.megatron.stages import format_layout
from megaplan.spec.host import Host
from megaplan.spec.megatron_limits import gpt_limits, megatron_limits
from megaplan.spec.models import GroupedQueryAttention, LatentAttention, Mamba2, Spec
from megaplan.spec.training import ConstantRate, CosineRate, warm_up_steps

Argument = tuple[str, object]
SYMBOLS = {**LETTERS, "R": "G"}
CARRIED = frozenset({
    "model", "mesh", "sharding", "schedule", "batch", "precision", "optimizer.matrix", "optimizer.other",
    "optimizer.newton_schulz_steps", "recompute", "host.name", "training.steps", "training.seed", "training.learning_rate",
    "training.weight_decay", "training.gradient_clip", "training.rate_schedule", "data",
})  # fmt: skip
AS_MEGARUN = Host(name="megatron", attention_mask=False, hidden_dropout=0.0, attention_dropout=0.0, moe_grouped_gemm=True)
"""What comes nearest to a plan of megarun: no dropout, no mask, experts in one GEMM."""


def export_megatron(source: Source) -> Exported:
    """A shell script. What Megatron cannot run is written as the nearest it can, and told."""
    host = source.spec.host if source.spec.host.name == "megatron" else AS_MEGARUN
    spec = source.spec.model_copy(update={"host": host})
    limits = [*megatron_limits(spec, source.letters), *(gpt_limits(spec, source.letters) if host.model == "gpt" else ())]
    losses = [Loss(limit.key, limit.detail, limit.fix) for limit in limits]
    gpt = host.model == "gpt" and not any(limit.key in ("model.pattern", "split.spans") for limit in limits)
    if source.layout.placement == "v":
        losses.append(
            Loss("schedule.kind", f"schedule.kind = {spec.schedule.kind}: a V of stages, written as a loop", "kind: interleaved_1f1b")
        )
    if host.cross_entropy == "te_fp32":
        losses.append(
            Loss("host.cross_entropy", "host.cross_entropy = te_fp32: the installed Transformer Engine decides; no argument does")
        )
    arguments = [*(_gpt(source) if gpt else _hybrid(source)), *_model(spec, source.letters), *_run(spec, source), *_host(spec, host)]
    own = {f"host.{name}" for name in Host.model_fields if name != "kernels"} if source.spec.host.name == "megatron" else set()
    text = _script(spec, arguments, "pretrain_gpt.py" if gpt else "pretrain_hybrid.py")
    return complete(source, text, CARRIED | own, losses)


def _script(spec: Spec, arguments: list[Argument], program: str) -> str:
    per_node = min(spec.device.per_node, spec.mesh.world_size)
    lines = [f"# {spec.name}, by megaplan export; data, tokenizer and checkpoint arguments are yours to add"]
    if spec.host.cublas_workspace_kib is not None:
        lines.append(f"export CUBLAS_WORKSPACE_CONFIG=:{spec.host.cublas_workspace_kib}:1")
    words = [f"torchrun --nnodes {-(-spec.mesh.world_size // per_node)} --nproc-per-node {per_node} {program}"]
    for key, value in arguments:
        flag = f"--{key.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            items = value if isinstance(value, tuple) else (value,)
            quoted = " ".join(shlex.quote(_text(item)) for item in items)
            joint = "=" if _text(items[0]).startswith("-") else " "  # a pattern that begins with a dense layer is no option
            words.append(f"{flag}{joint}{quoted}")
    return "\n".join(lines) + "\n" + " \\\n  ".join(words) + "\n"


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _hybrid(source: Source) -> Iterator[Argument]:
    latent = isinstance(source.spec.model.attention, LatentAttention)
    symbols = {**SYMBOLS, "A": "+"} if latent else SYMBOLS
    mtp = source.spec.model.features.mtp
    stages = tuple("".join(symbols[letter] for letter in stage) for stage in source.stages)
    yield "hybrid_layer_pattern", format_hybrid(stages, f"{symbols['A']}-" if mtp else None, mtp.depth if mtp else 0)
    yield "mtp_num_layers", mtp.depth if mtp else None


def _gpt(source: Source) -> Iterator[Argument]:
    letters, mtp = source.letters, source.spec.model.features.mtp
    yield "num_layers", len(letters) // 2
    if "E" in letters:
        yield "moe_layer_freq", "(" + "+".join(f"[{int(letter == 'E')}]*1" for letter in letters[1::2]) + ")"
    if len(source.stages) > 1:
        stages = ["t" * (len(stage) // 2) for stage in source.stages]
        stages[0] = "E" + stages[0]
        stages[-1] += "m" * (mtp.depth if mtp else 0) + "L"
        yield "pipeline_model_parallel_layout", format_layout(stages)
    yield "mtp_num_layers", mtp.depth if mtp else None


def _model(spec: Spec, letters: str) -> Iterator[Argument]:
    model, tp = spec.model, spec.mesh.tp
    yield "hidden_size", model.hidden_size
    yield "vocab_size", model.vocab_size
    yield "make_vocab_size_divisible_by", 128 if model.vocab_size % (128 * tp) == 0 else 1
    yield "untie_embeddings_and_output_weights", not model.tie_embeddings
    yield "normalization", "RMSNorm"
    yield "norm_epsilon", model.norm_eps
    yield "disable_bias_linear", True
    activation = next((part.activation for part in (model.mlp, model.moe) if part is not None), "relu2" if model.features.mtp else "gelu")
    yield "swiglu", activation == "swiglu"
    yield "squared_relu", activation == "relu2"
    ffn = model.mlp or model.features.mtp
    yield "ffn_hidden_size", ffn.ffn_hidden_size if ffn is not None else None
    attention = model.attention
    rotated = attention is not None and len(attention.nope_layers) < letters.count("A")
    yield "position_embedding_type", "rope" if rotated or (attention is not None and not attention.nope_layers) else "none"
    if attention is not None:
        yield "num_attention_heads", attention.num_heads
        yield "rotary_base", int(attention.rope_theta) if attention.rope_theta.is_integer() else attention.rope_theta
    else:
        yield "num_attention_heads", 1
    if isinstance(attention, GroupedQueryAttention):
        yield "group_query_attention", attention.num_kv_heads != attention.num_heads
        yield "num_query_groups", attention.num_kv_heads if attention.num_kv_heads != attention.num_heads else None
        yield "kv_channels", attention.head_dim
        yield "qk_layernorm", attention.qk_norm
        yield "add_qkv_bias", attention.bias
        yield "window_size", (attention.window_size - 1, 0) if attention.window_size is not None else None
    elif isinstance(attention, LatentAttention):
        yield "multi_latent_attention", True
        yield "q_lora_rank", attention.q_lora_rank
        yield "kv_lora_rank", attention.kv_lora_rank
        yield "qk_head_dim", attention.qk_nope_head_dim
        yield "qk_pos_emb_head_dim", attention.qk_rope_head_dim
        yield "v_head_dim", attention.v_head_dim
    if model.mamba is not None:
        mamba = model.mamba
        heads = mamba.num_heads if isinstance(mamba, Mamba2) else None
        yield "mamba_num_heads", heads or (mamba.expand * model.hidden_size // mamba.head_dim if mamba.expand != 2 else None)
        yield "mamba_head_dim", mamba.head_dim
        yield "mamba_state_dim", mamba.state_dim
        yield "mamba_num_groups", mamba.num_groups
    yield from _moe(spec)


def _moe(spec: Spec) -> Iterator[Argument]:
    moe, host = spec.model.moe, spec.host
    if moe is None:
        return
    yield "num_experts", moe.num_experts
    yield "moe_router_topk", moe.top_k
    yield "moe_ffn_hidden_size", moe.ffn_hidden_size
    yield "moe_shared_expert_intermediate_size", moe.shared_ffn_hidden_size or None
    yield "moe_router_pre_softmax", not moe.normalize_top_k
    yield "moe_router_load_balancing_type", "seq_aux_loss" if moe.balance_loss_coefficient else "none"
    yield "moe_aux_loss_coeff", moe.balance_loss_coefficient or None
    yield "moe_z_loss_coeff", moe.z_loss_coefficient or None
    yield "moe_expert_capacity_factor", moe.capacity_factor
    yield "moe_token_dispatcher_type", host.moe_dispatcher
    yield "moe_flex_dispatcher_backend", host.moe_flex_backend if host.moe_dispatcher == "flex" else None
    yield "moe_grouped_gemm", host.moe_grouped_gemm
    yield "moe_permute_fusion", host.moe_permute_fusion
    yield "overlap_moe_expert_parallel_comm", host.moe_overlap
    yield "use_fused_weighted_squared_relu", host.fused_squared_relu


def _run(spec: Spec, source: Source) -> Iterator[Argument]:
    mesh, training, precision = spec.mesh, spec.training, spec.precision
    yield "tensor_model_parallel_size", mesh.tp
    yield "sequence_parallel", mesh.tp > 1
    yield "pipeline_model_parallel_size", mesh.pp
    yield "context_parallel_size", mesh.cp
    yield "expert_model_parallel_size", mesh.ep
    yield "expert_tensor_parallel_size", mesh.etp
    yield "num_distributed_optimizer_instances", mesh.dp_replicate if mesh.dp_replicate > 1 else None
    yield "micro_batch_size", spec.batch.micro_batch_size
    yield "global_batch_size", source.spec.global_batch_size
    yield "seq_length", spec.batch.seq_length
    yield "max_position_embeddings", spec.batch.seq_length
    yield "bf16", True
    yield "grad_reduce_in_bf16", precision.grads is DType.BF16
    yield "train_iters", training.steps
    yield "seed", training.seed
    yield "lr", training.learning_rate
    yield "weight_decay", training.weight_decay
    yield "clip_grad", training.gradient_clip if training.gradient_clip is not None else 0.0
    rate = training.rate_schedule
    yield "lr_warmup_iters", warm_up_steps(rate, training.steps)
    if isinstance(rate, ConstantRate):
        yield "lr_decay_style", "constant"
        return
    yield "min_lr", training.learning_rate * rate.final_fraction
    if isinstance(rate, CosineRate):
        yield "lr_decay_style", "cosine"
    else:
        yield "lr_decay_style", "WSD"
        yield "lr_wsd_decay_iters", rate.decay_steps
        yield "lr_wsd_decay_style", "linear" if rate.decay == "linear" else "minus_sqrt"


def _host(spec: Spec, host: Host) -> Iterator[Argument]:
    muon = spec.optimizer.matrix == "muon"
    yield "optimizer", "muon" if muon else "adam"
    yield "muon_num_ns_steps", spec.optimizer.newton_schulz_steps
    yield "use_distributed_optimizer", host.distributed_optimizer
    yield "no_use_layer_wise_param_layout", muon and host.distributed_optimizer
    if spec.sharding.reshard_after_forward:
        yield "use_megatron_fsdp", True
        yield "data_parallel_sharding_strategy", "optim_grads_params"
        yield from ((f"megatron_fsdp_{part}_dtype", "fp32") for part in FSDP_DTYPES)
        yield "ckpt_format", "fsdp_dtensor"
    if host.precision_aware_optimizer:
        yield "use_precision_aware_optimizer", True
        yield "main_grads_dtype", str(spec.precision.grads)
        yield "exp_avg_dtype", str(spec.precision.moments)
        yield "exp_avg_sq_dtype", str(spec.precision.moments)
    yield "attention_backend", host.attention_backend
    if host.cross_entropy != "unfused":
        yield "cross_entropy_loss_fusion", True
        yield "cross_entropy_fusion_impl", "native" if host.cross_entropy == "native" else "te"
    yield "no_gradient_accumulation_fusion", not host.wgrad_fusion
    yield "no_create_attention_mask_in_dataloader", not host.attention_mask
    yield "hidden_dropout", host.hidden_dropout
    yield "attention_dropout", host.attention_dropout
    yield "tp_comm_overlap", host.tp_comm_overlap
    yield "deterministic_mode", host.deterministic_mode
    yield "mtp_use_repeated_layer", host.mtp_repeated
    yield "microbatch_group_size_per_virtual_pipeline_stage", host.microbatch_group_size
    modules = [*(["core_attn"] if spec.recompute.of("A") == "selective" else []), *host.recompute_modules]
    if host.recompute_num_layers is not None:
        yield "recompute_granularity", "full"
        yield "recompute_method", "uniform"
        yield "recompute_num_layers", host.recompute_num_layers
    elif modules:
        yield "recompute_granularity", "selective"
        yield "recompute_modules", tuple(modules)
