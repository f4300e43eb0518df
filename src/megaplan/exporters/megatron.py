"""A launch of Megatron-LM: torchrun and the arguments of its parser, read back by `megaplan import megatron`."""

import shlex
from collections.abc import Iterator
from math import nextafter

from megaplan.diagnostics import diagnostic
from megaplan.dtypes import DType
from megaplan.errors import Location, MegaplanError
from megaplan.exporters.values import Exported, Loss, Source, complete, nodes_of
from megaplan.hosts.megatron import HOST
from megaplan.hosts.megatron.argument import flag
from megaplan.hosts.megatron.limits import launch_limits
from megaplan.hosts.megatron.pattern import LETTERS, OURS, format_hybrid
from megaplan.hosts.megatron.sparse import choosing_period, indexer_of
from megaplan.hosts.megatron.stages import format_layout
from megaplan.hosts.megatron.state import MEGATRON_RECIPES, optimizer_recipe, state_dtypes
from megaplan.hosts.megatron.vocabulary import TABLE
from megaplan.low_precision import FORMATS
from megaplan.spec.comments import commented_settings
from megaplan.spec.host import Host
from megaplan.spec.models import GroupedQueryAttention, LatentAttention, LinearScaling, Llama3Scaling, Mamba1, Mamba2, Spec
from megaplan.spec.training import ConstantRate, CosineRate, Training, warm_up_steps

Values = dict[str, object]
"""Values of arguments by name; None and False omit an argument."""
SYMBOLS = {**LETTERS, "R": "G", "C": "M"}
"""Megatron's letter, or the nearest one, for each letter of a pattern; a limit reports blocks that differ."""
CARRIED = frozenset({
    "model", "mesh", "sharding", "schedule", "batch", "precision", "optimizer.matrix", "optimizer.other",
    "optimizer.newton_schulz_steps", "recompute", "host.name", "training.steps", "training.seed", "training.learning_rate",
    "training.weight_decay", "training.gradient_clip", "training.rate_schedule", "data",
})  # fmt: skip
UNSAID = (
    "device", "serving", "model.moe.routing_skew", "host.framework", "host.release", "host.dp_comm_overlap", "host.cross_entropy",
    "host.fragmentation_percent", "host.flash_version", "host.rope_fusion",
    "host.all_reduce_gradients",
)  # fmt: skip
"""Keys that change an estimate and that no argument says, or not in full; comments of the script carry them."""
ALLOCATOR = ("host.fragmentation_percent",)
"""Keys whose defaults depend on whether segments expand."""
AS_MEGARUN = Host(
    name=HOST.name, attention_mask=False, hidden_dropout=0.0, attention_dropout=0.0, moe_grouped_gemm=True, moe_load_balancing="none"
)
"""Settings of Megatron that are nearest to a plan of megarun: no dropout, no mask, experts in one GEMM."""


def export_megatron(source: Source) -> Exported:
    """A shell script. Settings that Megatron cannot run are written as the nearest ones it can, and reported.

    Raises:
        MegaplanError: MP921, a family has no letter of Megatron, not even a similar one.
    """
    if unknown := sorted(set(source.letters) - set(SYMBOLS)):
        why = f"layers are {', '.join(unknown)}, and Megatron's letters are {' '.join(OURS)}"
        raise MegaplanError([diagnostic("MP921", why, Location(key="model.pattern"), ("megaplan export PLAN --to fsdp2",))])
    host = source.spec.host if source.is_of(HOST.name) else AS_MEGARUN
    spec = source.spec.model_copy(update={"host": host})
    limits = [*launch_limits(spec, source.letters)]
    losses = [Loss(limit.key, limit.detail, limit.fix) for limit in limits]
    gpt = host.model == "gpt" and not any(limit.key in ("model.pattern", "split.spans") for limit in limits)
    if source.layout.placement == "v":
        losses.append(
            Loss("schedule.kind", f"schedule.kind = {spec.schedule.kind}: a V of stages, written as a loop", "kind: interleaved_1f1b")
        )
    losses += _module_losses(spec, source.letters, gpt=gpt)
    if host.cross_entropy == "te_fp32":
        losses.append(
            Loss("host.cross_entropy", "host.cross_entropy = te_fp32: the installed Transformer Engine decides; no argument does")
        )
    if host.optimizer_offload is not None and not host.precision_aware_optimizer:
        why = f"host.optimizer_offload = {host.optimizer_offload:g}: Megatron-LM's parser has it with the precision-aware optimizer alone"
        losses.append(Loss("host.optimizer_offload", f"{why}, and Megatron-Bridge without it", "precision_aware_optimizer: true"))
    arguments = _arguments(spec, {**(_gpt(source) if gpt else _hybrid(source)), **_joint(spec, source)})
    own = {f"host.{key}" for key in HOST.keys} if source.is_of(HOST.name) else set()
    text = _script(spec, arguments, "pretrain_gpt.py" if gpt else "pretrain_hybrid.py")
    return complete(source, text, CARRIED | own, losses)


def _module_losses(spec: Spec, letters: str, *, gpt: bool) -> Iterator[Loss]:
    """Settings of prediction modules that Megatron takes from the layers, or counts differently in a hybrid pattern."""
    mtp, attention = spec.model.features.mtp, spec.model.attention
    as_last = "AE" if letters.endswith("E") else "AD"
    if gpt and mtp is not None and mtp.letters != as_last:
        detail = f"model.features.mtp: Megatron's prediction module is as the last layer, {as_last}, and the plan's is {mtp.letters}"
        yield Loss("model.features.mtp", detail, "host: {name: megatron, model: hybrid}")
    if mtp is not None and not mtp.normed_input:
        detail = "model.features.mtp.normed_input = false: Megatron's prediction modules read hidden states after a norm"
        yield Loss("model.features.mtp.normed_input", detail, "normed_input: true")
    if not gpt and attention is not None and attention.full_layers:
        detail = f"model.attention.full_layers = {list(attention.full_layers)}: Megatron chooses layers of a window in GPT models alone"
        yield Loss("model.attention.full_layers", detail, "host: {name: megatron, model: gpt}")


def _arguments(spec: Spec, joint: Values) -> list[tuple[str, object]]:
    """Every argument with its value, in the order of the table: from one key of the spec, or from several together."""
    model = spec.model
    parts = {name: getattr(model, name) is not None for name in ("moe", "linear_attention")}
    parts |= {"fsdp": spec.sharding.reshard_after_forward, "indexer": indexer_of(spec) is not None}
    kinds = {section.kind for section in (model.attention, model.mamba) if section is not None}
    blocks = frozenset({*kinds, *(name for name, present in parts.items() if present)})
    values = {row.name: row.written(spec, blocks) for row in TABLE} | joint
    return [(flag(name), value) for name, value in values.items()]


def _joint(spec: Spec, source: Source) -> Values:
    """The arguments that several keys of the spec decide together."""
    return {
        **_model(spec, source.letters),
        **_attention(spec, source.letters),
        **_mamba(spec),
        **_moe(spec),
        **_run(spec),
        **_state(spec),
        **_host(spec, spec.host),
    }


def _script(spec: Spec, arguments: list[tuple[str, object]], program: str) -> str:
    nodes, per_node = nodes_of(spec.mesh.world_size, spec.device.per_node)
    lines = [f"# {spec.name}, by megaplan export; data, tokenizer and checkpoint arguments are yours to add"]
    unsaid = [key for key in UNSAID if key != "host.dp_comm_overlap" or not spec.host.dp_comm_overlap]
    lines += commented_settings(spec, unsaid, ALLOCATOR if spec.host.expandable_segments else ())
    if spec.host.cublas_workspace_kib is not None:
        lines.append(f"export CUBLAS_WORKSPACE_CONFIG=:{spec.host.cublas_workspace_kib}:1")
    if spec.host.expandable_segments:
        lines.append("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    words = [f"torchrun --nnodes {nodes} --nproc-per-node {per_node} {program}"]
    for name, value in arguments:
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            items = value if isinstance(value, tuple) else (value,)
            quoted = " ".join(shlex.quote(_text(item)) for item in items)
            joint = "=" if _text(items[0]).startswith("-") else " "  # a pattern that begins with a dense layer is not an option
            words.append(f"{name}{joint}{quoted}")
    return "\n".join(lines) + "\n" + " \\\n  ".join(words) + "\n"


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _hybrid(source: Source) -> Values:
    latent = isinstance(source.spec.model.attention, LatentAttention)
    symbols = {**SYMBOLS, "A": "+"} if latent else SYMBOLS
    mtp = source.spec.model.features.mtp
    stages = tuple("".join(symbols[letter] for letter in stage) for stage in source.stages)
    modules = ("".join(symbols[letter] for letter in mtp.letters),) * mtp.depth if mtp else ()
    return {"hybrid_layer_pattern": format_hybrid(stages, modules)}


def _gpt(source: Source) -> Values:
    letters, mtp = source.letters, source.spec.model.features.mtp
    found: Values = {"num_layers": len(letters) // 2}
    if "G" in letters:
        flags = "+".join(f"[{int(letter == 'G')}]*1" for letter in letters[::2])
        found |= {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": f"({flags})"}
    if "E" in letters:
        found["moe_layer_freq"] = "(" + "+".join(f"[{int(letter == 'E')}]*1" for letter in letters[1::2]) + ")"
    if len(source.stages) > 1:
        stages = ["t" * (len(stage) // 2) for stage in source.stages]
        stages[0] = "E" + stages[0]
        stages[-1] += "m" * (mtp.depth if mtp else 0) + "L"
        found["pipeline_model_parallel_layout"] = format_layout(stages)
    return found


def _model(spec: Spec, letters: str) -> Values:
    model, mtp, attention = spec.model, spec.model.features.mtp, spec.model.attention
    ffn = model.mlp or (mtp if mtp is not None and "D" in mtp.letters else None)
    parts = [part for part in (model.mlp, model.moe, mtp) if part is not None]
    activation = next((part.activation for part in parts), "gelu")
    position = "none" if attention is None or (attention.nope_layers and len(attention.nope_layers) == letters.count("A")) else "rope"
    return {
        "disable_bias_linear": not (any(part.bias for part in parts) or getattr(attention, "output_bias", False)),
        "position_embedding_type": "learned_absolute" if model.learned_positions is not None else position,
        "max_position_embeddings": model.learned_positions or spec.batch.seq_length,
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
        return {"num_attention_heads": 1}
    found: Values = {"num_attention_heads": attention.num_heads}
    if isinstance(attention, LatentAttention):
        return {**found, "multi_latent_attention": True, "qk_layernorm": attention.latent_norm, **_indexer(attention, letters)}
    grouped, window = attention.num_kv_heads != attention.num_heads, attention.window_size
    return {
        **found,
        "group_query_attention": grouped,
        "num_query_groups": attention.num_kv_heads if grouped else None,
        "kv_channels": attention.head_dim,
        "qk_layernorm": attention.qk_norm,
        "softmax_type": "learnable" if attention.sinks else None,
        "attention_output_gate": attention.gate,
        "add_qkv_bias": attention.bias and not attention.output_bias,
        "rotary_percent": _percent(attention.rotary_dim, attention.head_dim) if attention.rotary_dim is not None else None,
        **(_scaling(attention) if len(attention.nope_layers) < letters.count("A") else {}),  # only for rotated layers
        "window_size": (window - 1, 0) if window is not None else None,
        "window_attn_skip_freq": _flags(attention.full_layers, letters) if spec.host.model == "gpt" and attention.full_layers else None,
    }


def _indexer(attention: LatentAttention, letters: str) -> Values:
    """Sparse attention; a limit reports layers that no period and offset name."""
    if attention.indexer is None:
        return {}
    period, offset = choosing_period(attention.indexer, letters) or (1, 0)
    return {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_topk_freq": period if period > 1 else None,
        "dsa_indexer_skip_topk_offset": offset if period > 1 else None,
        "dsa_indexer_use_sparse_loss": True,
        "dsa_kernel_backend": "cudnn",
    }


def _scaling(attention: GroupedQueryAttention) -> Values:
    """Rotary scaling, if Megatron supports its kind; a limit reports other kinds."""
    scaling = attention.rope_scaling
    if isinstance(scaling, Llama3Scaling):
        return {"use_rope_scaling": True, "rope_scaling_factor": scaling.factor}
    return {"rotary_seq_len_interpolation_factor": scaling.factor} if isinstance(scaling, LinearScaling) else {}


def _percent(part: int, whole: int) -> float:
    """A share that Megatron rounds down to a whole percent."""
    share = part / whole
    return share if int(whole * share) == part else nextafter(share, 1.0)


def _flags(full: tuple[int, ...], letters: str) -> str:
    """One flag per attention layer, 0 if it has no window."""
    return "+".join(f"[{int(index not in full)}]*1" for index, letter in enumerate(letters) if letter == "A")


def _mamba(spec: Spec) -> Values:
    mamba = spec.model.mamba
    if mamba is None or isinstance(mamba, Mamba1):
        return {}
    heads = mamba.num_heads if isinstance(mamba, Mamba2) else None
    return {"mamba_num_heads": heads or (mamba.expand * spec.model.hidden_size // mamba.head_dim if mamba.expand != 2 else None)}


def _moe(spec: Spec) -> Values:
    moe, host = spec.model.moe, spec.host
    if moe is None:
        return {}
    kind = "seq_aux_loss" if host.moe_load_balancing == "none" and moe.balance_loss_coefficient else host.moe_load_balancing
    return {
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_router_load_balancing_type": kind,
        "moe_aux_loss_coeff": moe.balance_loss_coefficient or None,
        "moe_flex_dispatcher_backend": host.moe_flex_backend if host.dispatcher == "flex" else None,
    }


def _run(spec: Spec) -> Values:
    return {
        "sequence_parallel": spec.mesh.tp > 1 and spec.host.sequence_parallel,
        "expert_tensor_parallel_size": spec.mesh.etp,
        "global_batch_size": spec.global_batch_size,
        "bf16": spec.precision.params is DType.BF16,
        "fp16": spec.precision.params is DType.FP16,
        "accumulate_allreduce_grads_in_fp32": spec.precision.params is DType.FP16 and spec.precision.grads is DType.FP32,
        "overlap_param_gather": bool(spec.host.dp_comm_overlap) and spec.host.distributed_optimizer,
        "grad_reduce_in_bf16": spec.precision.grads is DType.BF16 and not spec.sharding.reshard_after_forward,
        **_low_precision(spec),
        **_rate(spec.training),
    }


def _low_precision(spec: Spec) -> Values:
    recipe = spec.precision.recipe
    if recipe is None or recipe.name not in MEGATRON_RECIPES:
        return {}
    first, last = (-(-letters // spec.host.block_layers) for letters in recipe.first_last_bf16)
    found: Values = {"fp8_dot_product_attention": recipe.attention, "keep_mtp_spec_in_bf16": not recipe.prediction}
    if first or last:
        found |= {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": first, "num_layers_at_end_in_bf16": last}
    if recipe.name == "nvfp4":
        return {**found, "fp4_format": "e2m1", "fp4_param_gather": recipe.param_gather}
    return {
        **found,
        "fp8_format": recipe.format or FORMATS[recipe.name],
        "fp8_recipe": MEGATRON_RECIPES[recipe.name],
        "fp8_param_gather": recipe.param_gather,
        "fp8_amax_history_len": recipe.amax_history if recipe.name == "fp8_delayed" else None,
        "fp8_amax_compute_algo": recipe.amax_compute if recipe.name == "fp8_delayed" else None,
        "fp8_margin": recipe.margin if recipe.name == "fp8_delayed" else None,
        "fp8_output_proj": recipe.head,
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


def _deals_by_size(spec: Spec) -> bool:
    """True if Muon's matrices are sorted by size and dealt to data ranks."""
    shards = spec.host.distributed_optimizer and not spec.sharding.copies
    return spec.optimizer.matrix == "muon" and shards and not spec.host.layer_wise_layout


def _state(spec: Spec) -> Values:
    found: Values = {
        "no_use_layer_wise_param_layout": _deals_by_size(spec),
        "use_megatron_fsdp": spec.sharding.reshard_after_forward,
    }
    host, precision = spec.host, spec.precision
    if spec.sharding.reshard_after_forward:
        sent = {"main_grads": precision.grads, "grad_comm": precision.reduce}
        found |= {f"megatron_fsdp_{role}_dtype": str(dtype) for role, dtype in sent.items()}
    if host.optimizer != "adam":
        found["optimizer"] = host.optimizer
    if spec.sharding.copies:
        found |= {"use_distributed_optimizer": False, "num_distributed_optimizer_instances": None, "overlap_param_gather": False}
    if host.precision_aware_optimizer:
        first, second = map(str, state_dtypes(spec))
        main = precision.grads if precision.grads is not DType.FP16 else DType.FP32
        found |= {
            "main_grads_dtype": str(main),
            "main_params_dtype": str(precision.master),
            "exp_avg_dtype": first,
            "exp_avg_sq_dtype": second,
        }
        if precision.recipe is None or precision.recipe.name == "nvfp4":  # the linears' recipe is written where it is fp8
            found["fp8_recipe"] = optimizer_recipe(spec)
    if host.optimizer_offload is not None and host.precision_aware_optimizer:
        found |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": host.optimizer_offload}
    return found


def _switched(host: Host) -> Values:
    """Graphs, offload and buffers of experts."""
    kinds = {"none": None, "layers": "transformer_engine", "iteration": "full_iteration"}
    found: Values = {"cuda_graph_impl": kinds.get(host.graphs), "cuda_graph_modules": host.cuda_graph_modules or None}
    if host.offload_modules:
        found |= {"fine_grained_activation_offloading": True, "offload_modules": host.offload_modules}
    if host.deferred_head_microbatches is not None:
        found |= {"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": host.deferred_head_microbatches}
    if host.offloaded_layers is not None:
        found |= {"cpu_offloading": True, "cpu_offloading_num_layers": host.offloaded_layers}
    if host.moe_paged_stash is not None:
        found |= {"moe_paged_stash": True, "moe_paged_stash_buffer_size_factor_cuda": host.moe_paged_stash}
    return found


def recompute_arguments(spec: Spec, host: Host) -> Values:
    """Recompute by the names that Megatron's arguments and its transformer configuration share; empty for none."""
    if host.recompute_num_layers is not None:
        method = {"recompute_method": host.recompute_method, "recompute_num_layers": host.recompute_num_layers}
        shared = {"distribute_saved_activations": True} if host.distribute_saved_activations else {}
        return {"recompute_granularity": "full", **method, **shared}
    core = spec.recompute.of("A") == "selective" or "core_attn" in host.recompute_modules
    modules = [*(["core_attn"] if core else []), *(module for module in dict.fromkeys(host.recompute_modules) if module != "core_attn")]
    return {"recompute_granularity": "selective", "recompute_modules": tuple(modules)} if modules else {}


def _host(spec: Spec, host: Host) -> Values:
    found: Values = _switched(host)
    if host.cross_entropy != "unfused":
        found |= {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native" if host.cross_entropy == "native" else "te"}
    return {**found, **recompute_arguments(spec, host)}
