"""A MaxText configuration: the model's decoder block with its dimensions, the degrees of the mesh, and the run's settings.

`megaplan import maxtext` reads the file back: its model is compared with the plan's, and every difference is reported by its key.

Source: `src/maxtext/configs/base.yml` and `src/maxtext/models`, AI-Hypercomputer/maxtext at e591f30c.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError
from megaplan.exporters.modules import TORCH_DTYPES
from megaplan.exporters.transformers import uneven_stages
from megaplan.exporters.values import Exported, InexpressibleError, Loss, Source, complete
from megaplan.hosts.maxtext import HOST
from megaplan.hosts.maxtext.limits import SIZE, maxtext_limits
from megaplan.importers.maxtext.model import DEFAULTS, PAIRED, cycle_of, section_of
from megaplan.importers.maxtext.spec import ATTENTION, slice_degrees
from megaplan.spec.comments import SECTION, unsaid_settings
from megaplan.spec.host import fabric_size
from megaplan.spec.models import GatedDeltaNet, GroupedQueryAttention, LatentAttention, Model, Spec
from megaplan.spec.training import ConstantRate, StableRate, warm_up_steps

CARRIED = frozenset({
    "model", "mesh.pp", "mesh.vpp", "mesh.dp_replicate", "mesh.dp_shard", "mesh.cp", "mesh.tp", "mesh.ep", "mesh.etp",
    "mesh.vocab_parallel", "schedule", "batch", "precision.params", "precision.master", "precision.grads", "precision.moments",
    "precision.recipe", "sharding", "optimizer.matrix", "optimizer.other", "recompute.default", "recompute.blocks", "training.steps",
    "training.seed", "training.learning_rate", "training.weight_decay", "training.gradient_clip", "training.rate_schedule",
})  # fmt: skip
OF_ITS_HOST = frozenset({"host", "precision.reduce"})
UNSAID = ("device", "serving", "model.moe.routing_skew")
"""Keys that change an estimate and that no key of MaxText says; the file's own section carries them."""
OF_ESTIMATES = frozenset({"routing_skew", "pattern", "num_layers"})
GELU, SILU, OSS = ["gelu", "linear"], ["silu", "linear"], ["sigmoid", "linear"]
VALUES_ALONE = ("rope_scaling", "rope_theta", "softmax_scale", "qk_norm_scale")
"""Keys of attention whose values change neither tensors nor time."""


def export_maxtext(source: Source) -> Exported:
    """YAML.

    Raises:
        MegaplanError: MP921, MaxText has no decoder of these layers.
    """
    spec = source.spec
    document = {**model_keys(source), **_mesh(source), **_run(spec)}
    losses = [*_losses(source), *_of_model(source, document)]
    if source.is_of(HOST.name):
        losses += _add_scan(spec, document)
    if not source.is_of(HOST.name):
        return complete(source, yaml.safe_dump(document, sort_keys=False), CARRIED, losses)
    document[SECTION] = dict(unsaid_settings(spec, UNSAID, ("device",)))
    return complete(source, yaml.safe_dump(document, sort_keys=False), CARRIED | OF_ITS_HOST, losses)


def model_keys(source: Source) -> dict[str, Any]:
    """Keys of the model for the decoder block that is nearest to its layers."""
    model, letters = source.spec.model, source.letters
    pairs = [letters[start : start + SIZE] for start in range(0, len(letters), SIZE)]
    mixers, mlps = "".join(pair[0] for pair in pairs), "".join(pair[-1] for pair in pairs)
    dense = len(mlps) - len(mlps.lstrip("D"))
    if set(pairs) - {"AD", "AE", "GE"} or not set(mlps[dense:]) <= {"E"} or model.attention is None:
        shown = letters if len(letters) <= 24 else f"{letters[:24]}…"
        why = f"the layers are {shown}; MaxText's are attention or gated_delta with an MLP or experts, MLPs alone in front"
        raise MegaplanError([diagnostic("MP921", why, Location(key="model.pattern"), ("megaplan export PLAN --to megatron",))])
    attention, part = model.attention, model.mlp or model.moe
    assert part is not None
    found: dict[str, Any] = {
        "run_name": source.spec.name,
        "decoder_block": _block(model, mixers),
        "base_emb_dim": model.hidden_size,
        "base_num_decoder_layers": len(pairs),
        "base_num_query_heads": attention.num_heads,
        "base_mlp_dim": part.ffn_hidden_size,
        "mlp_activations": {"swiglu": SILU, "geglu": GELU}.get(part.activation, ["gelu"]),
        "vocab_size": model.vocab_size,
        "logits_via_embedding": model.tie_embeddings,
        "normalization_layer_epsilon": model.norm_eps,
        "rope_max_timescale": int(getattr(attention, "rope_theta", 10000)),
    }
    if isinstance(attention, GroupedQueryAttention):
        found |= _grouped(model, attention)
    else:
        found |= _latent(attention)
    found |= {"first_num_dense_layers": dense} if found["decoder_block"] == "deepseek" else {}
    found |= _experts(model) if model.moe is not None else {}
    found |= _delta(model, mixers) if "G" in mixers else {}
    if found["decoder_block"] in PAIRED:
        found["base_num_decoder_layers"] = len(pairs) // PAIRED[found["decoder_block"]]
    if model.learned_positions is not None:
        found["trainable_position_size"] = model.learned_positions
    return found


def _block(model: Model, mixers: str) -> str:
    """The decoder block of a model: the first whose mark it has."""
    attention, part = model.attention, model.mlp or model.moe
    grouped = attention if isinstance(attention, GroupedQueryAttention) else None
    dense, geglu = model.moe is None, part is not None and part.activation == "geglu"
    normed, windowed = grouped is not None and grouped.qk_norm, grouped is not None and grouped.window_size is not None
    marks = {
        "qwen3_next": "G" in mixers,
        "deepseek": grouped is None,
        "gpt_oss": not dense and grouped is not None and grouped.sinks,
        "llama4": model.moe is not None and model.moe.shared_ffn_hidden_size > 0,
        "qwen3_moe": not dense and normed,
        "mixtral": not dense,
        "gpt3": model.learned_positions is not None,
        "gemma3": geglu and normed,
        "gemma2": geglu and windowed,
        "gemma": geglu,
        "olmo3": grouped is not None and normed and grouped.qk_norm_width == "all_heads",
        "qwen3": normed,
        "qwen2": grouped is not None and grouped.bias and not grouped.output_bias,
    }
    return next((block for block, has in marks.items() if has), "llama2")


def _grouped(model: Model, attention: GroupedQueryAttention) -> dict[str, Any]:
    found = {
        "base_num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "use_qk_norm": attention.qk_norm,
        "attention_bias": attention.bias,
        "attention_sink": attention.sinks,
        "attn_logits_soft_cap": attention.score_cap or 0.0,
        "final_logits_soft_cap": model.logits_cap or 0.0,
        "sliding_window_size": attention.window_size or 0,
    }
    if attention.window_rope_theta is not None:
        found["local_rope_max_timescale"] = int(attention.window_rope_theta)
    if attention.window_size is not None and attention.full_layers:
        found["inhomogeneous_layer_cycle_interval"] = attention.full_layers[0] // SIZE + 1
    if attention.rotary_dim is not None:
        found["partial_rotary_factor"] = attention.rotary_dim / attention.head_dim
    return {key: value for key, value in found.items() if value != DEFAULTS.get(key) or key.startswith("base_")}


def _latent(attention: LatentAttention) -> dict[str, Any]:
    keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    found = {"attention_type": "mla", "base_num_kv_heads": attention.num_heads, "q_lora_rank": attention.q_lora_rank or 0}
    found |= {key: getattr(attention, key) for key in keys}
    if attention.indexer is not None:
        indexer = attention.indexer
        found |= {
            "use_indexer": True,
            "indexer_n_heads": indexer.num_heads,
            "indexer_head_dim": indexer.head_dim,
            "indexer_topk": indexer.top_k,
        }
    return found


def _experts(model: Model) -> dict[str, Any]:
    moe = model.moe
    assert moe is not None
    shared = -(-moe.shared_ffn_hidden_size // moe.ffn_hidden_size)
    return {
        "base_moe_mlp_dim": moe.ffn_hidden_size,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.normalize_top_k,
        "capacity_factor": -1.0 if moe.capacity_factor is None else moe.capacity_factor,
        "load_balance_loss_weight": moe.balance_loss_coefficient,
        "shared_experts": shared,
        "routed_score_func": moe.score,
        "routed_bias": moe.score_correction or moe.expert_bias or moe.router_bias,
        "routed_scaling_factor": moe.routed_scale,
        "n_routing_groups": moe.num_groups if moe.num_groups and moe.num_groups > 1 else -1,
        "topk_routing_group": moe.top_groups if moe.num_groups and moe.num_groups > 1 else -1,
    }


def _delta(model: Model, mixers: str) -> dict[str, Any]:
    section = model.linear_attention
    cycle: dict[str, Any] = {"inhomogeneous_layer_cycle_interval": mixers.index("A") + 1 if "A" in mixers else len(mixers) + 1}
    if not isinstance(section, GatedDeltaNet):
        return cycle
    return cycle | {
        "gdn_conv_kernel_dim": section.conv_kernel,
        "gdn_key_head_dim": section.key_dim,
        "gdn_value_head_dim": section.value_dim,
        "gdn_num_key_heads": section.num_key_heads,
        "gdn_num_value_heads": section.num_value_heads,
    }


def _of_model(source: Source, document: Mapping[str, Any]) -> Iterator[Loss]:
    """Keys of the model whose values differ after the written file is imported again."""
    spec = source.spec
    given = {key: document.get(key, default) for key, default in DEFAULTS.items()}
    try:
        plain = section_of(given)
    except MegaplanError as error:
        first = error.diagnostics[0].detail.splitlines()[0]
        raise InexpressibleError(
            [diagnostic("MP920", f"no decoder of MaxText has these dimensions: {first}", Location(key="model"))]
        ) from None
    back = type(spec.model).model_validate(plain)
    yield from _differences(spec.model.model_dump(mode="json"), back.model_dump(mode="json"), "model")


def _differences(mine: Any, other: Any, key: str) -> Iterator[Loss]:
    if isinstance(mine, dict) and isinstance(other, dict):
        for name in dict.fromkeys((*mine, *other)):
            if name not in OF_ESTIMATES:
                yield from _differences(mine.get(name), other.get(name), f"{key}.{name}")
    elif mine != other and not (mine in (None, False, [], 0) and other in (None, False, [], 0)):
        yield Loss(key, f"{key} = {mine}, but MaxText's block has {other}", strict=key.rpartition(".")[2] not in VALUES_ALONE)


def _mesh(source: Source) -> dict[str, Any]:
    """Degrees by axis, inside a slice and over slices; without stages the microbatches of a step are accumulated."""
    spec = source.spec
    mesh, schedule = spec.mesh, spec.schedule
    shards = mesh.dp_shard // mesh.ep if mesh.dp_shard % mesh.ep == 0 else mesh.dp_shard
    transposed = spec.host.fsdp_transpose if source.is_of(HOST.name) and shards % spec.host.fsdp_transpose == 0 else 1
    both = {
        "data": mesh.dp_replicate, "fsdp": shards // transposed, "fsdp_transpose": transposed, "context": mesh.cp, "tensor": mesh.tp,
        "expert": mesh.ep, "pipeline": mesh.pp,
    }  # fmt: skip
    slices = -(-mesh.world_size // fabric_size(spec.device)) if source.is_of(HOST.name) else 1
    across = slice_degrees(both, slices)
    found: dict[str, Any] = {f"dcn_{axis}_parallelism": degree for axis, degree in across.items()}
    found |= {f"ici_{axis}_parallelism": degree // across[axis] for axis, degree in both.items()}
    micro, stages = spec.batch.micro_batch_size * mesh.data_ranks / mesh.world_size, mesh.is_pipelined
    found["per_device_batch_size"] = micro * schedule.num_microbatches if stages else micro
    found["gradient_accumulation_steps"] = schedule.steps_per_update if stages else schedule.microbatches_per_update
    if stages:
        sizes = [slot.stop - slot.start for slot in source.slots()]
        found |= {"num_layers_per_pipeline_stage": max(1, sizes[0] // SIZE), "num_pipeline_microbatches": schedule.num_microbatches}
        found["pipeline_fsdp_ag_once"] = not spec.sharding.reshard_after_forward
    return found


def _run(spec: Spec) -> dict[str, Any]:
    training, precision, host = spec.training, spec.precision, spec.host
    policy = {"full": "full", "none": "none", "selective": "minimal"}[spec.recompute.default]
    found: dict[str, Any] = {
        "max_target_length": spec.batch.seq_length,
        "dtype": TORCH_DTYPES[str(precision.params)],
        "weight_dtype": TORCH_DTYPES[str(precision.master)],
        "grad_dtype": TORCH_DTYPES[str(precision.grads)],
        "mu_dtype": TORCH_DTYPES[str(precision.moments)],
        "quantization": "" if precision.recipe is None else "fp8",
        "remat_policy": policy,
        "opt_type": "muon" if spec.optimizer.matrix == "muon" else "adamw",
        "learning_rate": training.learning_rate,
        "adam_weight_decay": training.weight_decay,
        "gradient_clipping_threshold": training.gradient_clip if training.gradient_clip is not None else 0.0,
        "steps": training.steps,
        "data_shuffle_seed": training.seed,
        "init_weights_seed": training.seed,
        **_rate(spec),
    }
    if host.name != HOST.name:
        return found
    if spec.recompute.default == "selective":
        found |= {"remat_policy": host.remat_policy}
        if host.remat_policy == "custom":
            found |= {"decoder_layer_input": "remat", **{str(name): place for name, place in host.remat_tensors.items()}}
    words = {key: name for name, key in ATTENTION.items()}
    found |= {
        "attention": words[host.attention_backend],
        "num_vocab_tiling": host.num_vocab_tiling,
        "optimizer_memory_host_offload": host.optimizer_offload is not None,
    }
    return found | ({"quantization": "int8"} if host.int8 else {})


def _add_scan(spec: Spec, document: dict[str, Any]) -> Iterator[Loss]:
    """Adds whether layers are scanned; the decoder block says how many of them at a time."""
    layers, cycle = spec.host.layers_per_block, cycle_of({key: document.get(key, default) for key, default in DEFAULTS.items()})
    document["scan_layers"] = layers == cycle
    if layers not in (1, cycle):
        detail = f"host.layers_per_block = {layers}: decoder_block = {document['decoder_block']} scans {cycle} at a time"
        yield Loss("host.layers_per_block", detail, f"layers_per_block: {cycle}")


def _rate(spec: Spec) -> dict[str, Any]:
    """A constant rate as a cosine that ends at its first value."""
    training = spec.training
    rate = training.rate_schedule
    found: dict[str, Any] = {
        "learning_rate_schedule_steps": training.steps,
        "warmup_steps_fraction": warm_up_steps(rate, training.steps) / training.steps,
        "lr_schedule_type": "wsd" if isinstance(rate, StableRate) else "cosine",
        "learning_rate_final_fraction": 1.0 if isinstance(rate, ConstantRate) else rate.final_fraction,
    }
    if isinstance(rate, StableRate):
        found |= {"wsd_decay_steps_fraction": rate.decay_steps / training.steps, "wsd_decay_style": "linear"}
    return found


def _losses(source: Source) -> list[Loss]:
    """Losses of settings that MaxText does not run, or that an export of another host's plan leaves to XLA."""
    spec, found = source.spec, uneven_stages(source, "MaxText")
    if not source.is_of(HOST.name):
        ours = {"precision.reduce", "host.fsdp_transpose", "sharding.reshard_after_forward"}
        known = [
            limit
            for limit in maxtext_limits(spec, source.letters)
            if not limit.key.startswith(("model.", "split")) and limit.key not in ours
        ]
        found += [Loss(limit.key, limit.detail, limit.fix) for limit in known]
        if spec.sharding.reshard_after_forward is False and spec.mesh.dp_shard > 1 and not spec.sharding.copies:
            detail = "sharding.reshard_after_forward = false: XLA decides when gathered parameters are freed"
            found.append(Loss("sharding.reshard_after_forward", detail))
        policies = {spec.recompute.of(letter) for letter in source.letters}
        if policies == {"selective"} or len(policies) > 1:
            said = ", ".join(f"{letter}: {spec.recompute.of(letter)}" for letter in sorted(set(source.letters)))
            found.append(
                Loss("recompute", f"recompute is {said}: XLA's nearest policy is minimal, which saves matrix products", "default: full")
            )
    rate = spec.training.rate_schedule
    if isinstance(rate, StableRate) and rate.decay == "sqrt":
        found.append(Loss("training.rate_schedule.decay", "training.rate_schedule.decay = sqrt: MaxText decays linearly", "decay: linear"))
    if spec.model.attention is not None and not getattr(spec.model.attention, "rope_theta", 1.0).is_integer():
        found.append(Loss("model.attention.rope_theta", f"model.attention.rope_theta = {spec.model.attention.rope_theta} is written whole"))
    return found
