"""A launch of Megatron-LM: torchrun and the arguments of its parser, read back by `megaplan import megatron`."""

from __future__ import annotations

import shlex

from megaplan.dtypes import DType
from megaplan.exporters.values import Exported, Loss, Source, complete
from megaplan.hosts.megatron.argument import flag
from megaplan.hosts.megatron.pattern import LETTERS, format_hybrid
from megaplan.hosts.megatron.stages import format_layout
from megaplan.hosts.megatron.vocabulary import TABLE
from megaplan.spec.host import Host
from megaplan.spec.megatron_limits import gpt_limits, megatron_limits
from megaplan.spec.models import LatentAttention, Mamba2, Spec
from megaplan.spec.training import ConstantRate, CosineRate, Training, warm_up_steps

Values = dict[str, object]
"""Of arguments, by name; None and False leave an argument out."""
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
    if gpt and spec.model.features.mtp is not None and source.letters.endswith("E"):
        detail = "model.features.mtp: Megatron's prediction module is as the last layer, which has experts, and the plan's is dense"
        losses.append(Loss("model.features.mtp", detail, "host: {name: megatron, model: hybrid}"))
    if host.cross_entropy == "te_fp32":
        losses.append(
            Loss("host.cross_entropy", "host.cross_entropy = te_fp32: the installed Transformer Engine decides; no argument does")
        )
    arguments = _arguments(spec, {**(_gpt(source) if gpt else _hybrid(source)), **_joint(spec, source)})
    own = {f"host.{name}" for name in Host.model_fields if name != "kernels"} if source.spec.host.name == "megatron" else set()
    text = _script(spec, arguments, "pretrain_gpt.py" if gpt else "pretrain_hybrid.py")
    return complete(source, text, CARRIED | own, losses)


def _arguments(spec: Spec, joint: Values) -> list[tuple[str, object]]:
    """Every argument with its value, in the order of the table: of one key of the spec, or of those that several decide."""
    model = spec.model
    kinds = {section.kind for section in (model.attention, model.mamba) if section is not None}
    blocks = frozenset({*kinds, *(["moe"] if model.moe is not None else []), *(["fsdp"] if spec.sharding.reshard_after_forward else [])})
    values = {row.name: row.written(spec, blocks) for row in TABLE} | joint
    return [(flag(name), value) for name, value in values.items()]


def _joint(spec: Spec, source: Source) -> Values:
    """The arguments that several keys of the spec decide together."""
    return {
        **_model(spec),
        **_attention(spec, source.letters),
        **_mamba(spec),
        **_moe(spec),
        **_run(spec),
        **_state(spec),
        **_host(spec, spec.host),
    }


def _script(spec: Spec, arguments: list[tuple[str, object]], program: str) -> str:
    size = spec.mesh.world_size
    per_node = max(count for count in range(1, min(spec.device.per_node, size) + 1) if size % count == 0)  # every node has as many
    lines = [f"# {spec.name}, by megaplan export; data, tokenizer and checkpoint arguments are yours to add"]
    if spec.host.cublas_workspace_kib is not None:
        lines.append(f"export CUBLAS_WORKSPACE_CONFIG=:{spec.host.cublas_workspace_kib}:1")
    words = [f"torchrun --nnodes {size // per_node} --nproc-per-node {per_node} {program}"]
    for name, value in arguments:
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            items = value if isinstance(value, tuple) else (value,)
            quoted = " ".join(shlex.quote(_text(item)) for item in items)
            joint = "=" if _text(items[0]).startswith("-") else " "  # a pattern that begins with a dense layer is no option
            words.append(f"{name}{joint}{quoted}")
    return "\n".join(lines) + "\n" + " \\\n  ".join(words) + "\n"


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _hybrid(source: Source) -> Values:
    latent = isinstance(source.spec.model.attention, LatentAttention)
    symbols = {**SYMBOLS, "A": "+"} if latent else SYMBOLS
    mtp = source.spec.model.features.mtp
    stages = tuple("".join(symbols[letter] for letter in stage) for stage in source.stages)
    return {"hybrid_layer_pattern": format_hybrid(stages, f"{symbols['A']}-" if mtp else None, mtp.depth if mtp else 0)}


def _gpt(source: Source) -> Values:
    letters, mtp = source.letters, source.spec.model.features.mtp
    found: Values = {"num_layers": len(letters) // 2}
    if "E" in letters:
        found["moe_layer_freq"] = "(" + "+".join(f"[{int(letter == 'E')}]*1" for letter in letters[1::2]) + ")"
    if len(source.stages) > 1:
        stages = ["t" * (len(stage) // 2) for stage in source.stages]
        stages[0] = "E" + stages[0]
        stages[-1] += "m" * (mtp.depth if mtp else 0) + "L"
        found["pipeline_model_parallel_layout"] = format_layout(stages)
    return found


def _model(spec: Spec) -> Values:
    model, ffn = spec.model, spec.model.mlp or spec.model.features.mtp
    activation = next((part.activation for part in (model.mlp, model.moe) if part is not None), "relu2" if model.features.mtp else "gelu")
    return {
        "vocab_size": model.vocab_size,
        "make_vocab_size_divisible_by": 128 if model.vocab_size % (128 * spec.mesh.tp) == 0 else 1,
        "swiglu": activation == "swiglu",
        "squared_relu": activation == "relu2",
        "ffn_hidden_size": ffn.ffn_hidden_size if ffn is not None else None,
        "mtp_num_layers": model.features.mtp.depth if model.features.mtp is not None else None,
    }


def _attention(spec: Spec, letters: str) -> Values:
    attention = spec.model.attention
    if attention is None:
        return {"num_attention_heads": 1, "position_embedding_type": "none"}
    rotated = len(attention.nope_layers) < letters.count("A") or not attention.nope_layers
    found: Values = {"num_attention_heads": attention.num_heads, "position_embedding_type": "rope" if rotated else "none"}
    if isinstance(attention, LatentAttention):
        return {**found, "multi_latent_attention": True}
    grouped, window = attention.num_kv_heads != attention.num_heads, attention.window_size
    return {
        **found,
        "group_query_attention": grouped,
        "num_query_groups": attention.num_kv_heads if grouped else None,
        "kv_channels": attention.head_dim,
        "window_size": (window - 1, 0) if window is not None else None,
    }


def _mamba(spec: Spec) -> Values:
    mamba = spec.model.mamba
    if mamba is None:
        return {}
    heads = mamba.num_heads if isinstance(mamba, Mamba2) else None
    return {"mamba_num_heads": heads or (mamba.expand * spec.model.hidden_size // mamba.head_dim if mamba.expand != 2 else None)}


def _moe(spec: Spec) -> Values:
    moe, host = spec.model.moe, spec.host
    if moe is None:
        return {}
    return {
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_router_load_balancing_type": "seq_aux_loss" if moe.balance_loss_coefficient else "none",
        "moe_aux_loss_coeff": moe.balance_loss_coefficient or None,
        "moe_flex_dispatcher_backend": host.moe_flex_backend if host.moe_dispatcher == "flex" else None,
    }


def _run(spec: Spec) -> Values:
    return {
        "sequence_parallel": spec.mesh.tp > 1,
        "expert_tensor_parallel_size": spec.mesh.etp,
        "global_batch_size": spec.global_batch_size,
        "max_position_embeddings": spec.batch.seq_length,
        "grad_reduce_in_bf16": spec.precision.grads is DType.BF16,
        **_rate(spec.training),
    }


def _rate(training: Training) -> Values:
    rate = training.rate_schedule
    found: Values = {"lr_warmup_iters": warm_up_steps(rate, training.steps)}
    if isinstance(rate, ConstantRate):
        return {**found, "lr_decay_style": "constant"}
    found["min_lr"] = training.learning_rate * rate.final_fraction
    if isinstance(rate, CosineRate):
        return {**found, "lr_decay_style": "cosine"}
    decay = "linear" if rate.decay == "linear" else "minus_sqrt"
    return {**found, "lr_decay_style": "WSD", "lr_wsd_decay_iters": rate.decay_steps, "lr_wsd_decay_style": decay}


def _state(spec: Spec) -> Values:
    found: Values = {
        "no_use_layer_wise_param_layout": spec.optimizer.matrix == "muon" and spec.host.distributed_optimizer,
        "use_megatron_fsdp": spec.sharding.reshard_after_forward,
    }
    if spec.host.precision_aware_optimizer:
        moments = str(spec.precision.moments)
        found |= {"main_grads_dtype": str(spec.precision.grads), "exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
    return found


def _host(spec: Spec, host: Host) -> Values:
    core = spec.recompute.of("A") == "selective" or "core_attn" in host.recompute_modules
    modules = [*(["core_attn"] if core else []), *(module for module in dict.fromkeys(host.recompute_modules) if module != "core_attn")]
    found: Values = {}
    if host.cross_entropy != "unfused":
        found = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native" if host.cross_entropy == "native" else "te"}
    if host.recompute_num_layers is not None:
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": host.recompute_num_layers}
        return {**found, **full}
    return {**found, "recompute_granularity": "selective", "recompute_modules": tuple(modules)} if modules else found
