"""Rules of host megatron: settings that Megatron-Core cannot run, or runs differently with the same tensors.

Source: `megatron/core/models/hybrid/hybrid_layer_allocation.py`, `megatron/core/transformer/transformer_config.py` and
`megatron/training/arguments.py` at d98e8a64.
"""

from collections.abc import Iterator

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Severity
from megaplan.families.linear_attention.section import GatedDeltaNet
from megaplan.families.registry import FAMILIES
from megaplan.hosts.megatron import HOST
from megaplan.hosts.megatron.pattern import LETTERS
from megaplan.hosts.megatron.precision import low_precision_limits, state_limits
from megaplan.hosts.megatron.setting import attention_kernel
from megaplan.hosts.megatron.sparse import sparse_limits
from megaplan.hosts.values import Limit
from megaplan.low_precision import PER_TENSOR
from megaplan.spec.context import Checked
from megaplan.spec.host import RELEASED
from megaplan.spec.models import SIDES, GroupedQueryAttention, LatentAttention, Llama3Scaling, Mamba1, Mamba2, Mamba3, Spec, YarnScaling
from megaplan.spec.settings import ROUTING, SCALES, VALUES_ALONE, given_options

CONV_KERNEL, CHUNK_SIZE = 4, 128
"""Constants of Megatron's Mamba mixer; no launch argument changes them."""
PRICED_OPTIONS = frozenset({
    "model.norm", "model.learned_positions", "model.parallel_layers", "model.attention.output_bias", "model.attention.bias",
    "model.attention.rotary_dim",
    "model.attention.latent_norm", "model.attention.sinks", "model.attention.gate", "model.mlp.bias",
    "model.attention.indexer.shared_layers", "model.moe.bias", "model.moe.latent_size", "model.moe.shared_gate",
    "model.features.mtp.activation",
    "model.features.mtp.bias", "model.features.mtp.experts", "model.features.mtp.pattern",
})  # fmt: skip
"""Options of blocks for which the byte model of Megatron-Core has terms."""
NEAREST = {"R": "Megatron's letters are M * - E G D +; the nearest letter, G, is a different recurrence"}
MOST_EXPERTS = 4096
"""Limit of a rank: the time of an estimate grows with its tensors. Public models have up to 512 in all."""
WHY_UNPRICED = {
    "distillation": "the teacher model is in memory in addition to the student",
    "fsdp": "Megatron-FSDP has other buffers unless it shards all, with fp32 masters",
    "optimizer_cuda_graph": "the graph of the optimizer's step has a separate memory pool",
}
"""Features whose tensors are not modelled, with the tensors that they add."""


def megatron_rules(checked: Checked) -> Iterator[Diagnostic]:
    """MP902 … MP904."""
    if checked.pattern is None:
        return
    spec, host = checked.spec, checked.spec.host
    limits = [*launch_limits(spec, checked.pattern.layers)]
    for limit in limits:
        if limit.tensors:
            yield checked.error("MP902", limit.detail, limit.key, *limit.fixes)
    if host.release is not None and host.framework not in RELEASED:
        detail = f"host.release = {host.release}, but no step time of host.framework = {host.framework} depends on it"
        yield checked.error("MP902", detail, "host.release", "release: null", *(f"framework: {name}" for name in RELEASED))
    for feature in host.features:
        detail = f"host.features has {feature}: {WHY_UNPRICED[feature]}"
        yield checked.error("MP903", detail, "host.features", "plan without this option, and measure what it adds")
    otherwise = [limit for limit in limits if not limit.tensors]
    if otherwise:
        said = "\n".join(limit.detail for limit in otherwise)
        yield diagnostic("MP904", said, checked.locate(otherwise[0].key), [limit.fix for limit in otherwise], Severity.NOTE)


def launch_limits(spec: Spec, letters: str) -> Iterator[Limit]:
    """All settings that the model class of `host.model` does not support; arguments as for `megatron_limits`."""
    yield from megatron_limits(spec, letters)
    if spec.host.model == "gpt":
        yield from gpt_limits(spec, letters)


def megatron_limits(spec: Spec, letters: str) -> Iterator[Limit]:
    """All settings that Megatron-Core does not support.

    Args:
        spec: A typed spec whose host is megatron.
        letters: One per layer.
    """
    yield from _families(spec, letters)
    yield from _blocks(spec, letters)
    yield from _options(spec, letters)
    yield from _routing(spec)
    yield from _attention(spec, letters)
    yield from _features(spec)
    yield from _parallel(spec)
    yield from state_limits(spec)
    yield from low_precision_limits(spec)
    yield from _recompute(spec, letters)
    yield from _implementation(spec)
    yield from _own_modules(spec, letters)
    if spec.data.packing != "none":
        detail = f"data.packing = {spec.data.packing}: Megatron separates documents by position ids and cu_seqlens of its data set"
        yield Limit("data.packing", detail, "data: {packing: none}", tensors=False)


def gpt_limits(spec: Spec, letters: str) -> Iterator[Limit]:
    """Further limits of GPTModel: each of its layers is an A followed by a D or E."""
    pairs = [letters[index : index + 2] for index in range(0, len(letters), 2)]
    odd = next((index for index, pair in enumerate(pairs) if pair not in ("AD", "AE", "GD", "GE")), None)
    if odd is not None:
        detail = f"layers {2 * odd} and {2 * odd + 1} are {pairs[odd]!r}, and a layer of GPTModel is A or G, then D or E"
        yield Limit("model.pattern", detail, "host: {name: megatron, model: hybrid}")
    for start, stop in spec.split.spans or ():
        if start % 2 or stop % 2:
            yield Limit("split.spans", f"span [{start}, {stop}] cuts a layer of GPTModel in two", "cut at even layers")


def _families(spec: Spec, letters: str) -> Iterator[Limit]:
    """Families and kinds that host megatron does not price."""
    model = spec.model
    for letter, family in FAMILIES.items():
        if letter in LETTERS or letter not in letters:
            continue
        why = NEAREST.get(letter, f"Megatron is priced without {family.title}")
        yield Limit(f"model.{family.section}", f"{letters.count(letter)} layers are {letter}, and {why}")
    linear = model.linear_attention
    if "G" in letters and not isinstance(linear, GatedDeltaNet):
        yield Limit(
            "model.linear_attention.kind", f"model.linear_attention.kind = {linear and linear.kind}, but Megatron's G is gated_delta"
        )
    elif isinstance(linear, GatedDeltaNet) and linear.negative_eigenvalues:
        detail = "model.linear_attention.negative_eigenvalues = true, but Megatron's write strength (beta) is at most 1"
        yield Limit("model.linear_attention.negative_eigenvalues", detail, "negative_eigenvalues: false", tensors=False)
    for key in ("chunk_size", "save_every") if isinstance(linear, GatedDeltaNet) else ():
        if (given := getattr(linear, key)) != (own := GatedDeltaNet.model_fields[key].default):
            detail = f"model.linear_attention.{key} = {given}: the library of Megatron's delta rule decides it, and {own} is used"
            yield Limit(f"model.linear_attention.{key}", detail, f"{key}: {own}", tensors=False)
    if isinstance(model.mamba, Mamba1 | Mamba3):
        detail = f"model.mamba.kind = {model.mamba.kind}, but Megatron's M is Mamba-2"
        yield Limit("model.mamba.kind", detail, "mamba: {kind: mamba2}")


def _blocks(spec: Spec, letters: str) -> Iterator[Limit]:
    moe = spec.model.moe
    if moe is not None and "E" in letters and moe.num_experts // spec.mesh.ep > MOST_EXPERTS:
        detail = f"{moe.num_experts // spec.mesh.ep:,} experts on a rank: each has its own tensors, and at most {MOST_EXPERTS:,} are priced"
        yield Limit("model.moe.num_experts", detail, "a larger mesh.ep")
    model = spec.model
    if isinstance(model.mamba, Mamba2):
        if model.mamba.conv_kernel != CONV_KERNEL:
            detail = f"model.mamba.conv_kernel = {model.mamba.conv_kernel}, but Megatron's convolution has {CONV_KERNEL} taps"
            yield Limit("model.mamba.conv_kernel", detail, f"conv_kernel: {CONV_KERNEL}")
        if not model.mamba.conv_bias:
            yield Limit("model.mamba.conv_bias", "model.mamba.conv_bias = false, but Megatron's convolution has a bias", "conv_bias: true")
        for key, neutral in (("time_step_min", 0.0), ("time_step_max", None)):
            if (given := getattr(model.mamba, key)) != neutral:
                shown = "null" if neutral is None else "0"
                detail = f"model.mamba.{key} = {given:g}, but Megatron has no limit of time steps"
                yield Limit(f"model.mamba.{key}", detail, f"{key}: {shown}", tensors=False)
        if model.mamba.chunk_size != CHUNK_SIZE:
            detail = f"model.mamba.chunk_size = {model.mamba.chunk_size}, but Megatron scans in chunks of {CHUNK_SIZE}"
            yield Limit("model.mamba.chunk_size", detail, f"chunk_size: {CHUNK_SIZE}", tensors=False)
    kinds = {f"model.{name}.activation": section.activation for name in ("mlp", "moe") if (section := getattr(model, name)) is not None}
    if model.features.mtp is not None and "D" in model.features.mtp.letters:
        kinds["model.features.mtp.activation"] = model.features.mtp.activation
    if len(set(kinds.values())) > 1:
        said = ", ".join(f"{key} = {value}" for key, value in kinds.items())
        yield Limit(next(iter(kinds)), f"{said}: Megatron's MLPs and experts share one activation", "give them one activation")


def _options(spec: Spec, letters: str) -> Iterator[Limit]:
    """Options of blocks that are not priced, and biases, which Megatron has in all linears or in none."""
    model, mtp = spec.model, spec.model.features.mtp
    for option in given_options(model):
        if option.key not in PRICED_OPTIONS | VALUES_ALONE:
            detail = f"{option.key} = {option.shown}, but host megatron is priced and exported only with {option.neutral}"
            yield Limit(option.key, detail, f"{option.key.rpartition('.')[2]}: {option.neutral}")
    if model.attention is not None and model.attention.bias and isinstance(model.attention, LatentAttention):
        detail = "model.attention.bias = true: the down projections of Megatron's latent attention have no bias"
        yield Limit("model.attention.bias", detail, "bias: false, output_bias: true")
    biases = {
        **({"model.attention.output_bias": model.attention.output_bias} if model.attention is not None else {}),
        **({"model.mlp.bias": model.mlp.bias} if model.mlp is not None else {}),
        **({"model.moe.bias": model.moe.bias} if model.moe is not None else {}),
        **({"model.features.mtp.bias": mtp.bias} if mtp is not None and "D" in mtp.letters else {}),
    }
    if len(set(biases.values())) > 1:
        said = ", ".join(f"{key} = {str(value).lower()}" for key, value in biases.items())
        yield Limit(next(iter(biases)), f"{said}: either all or none of Megatron's linears have a bias", "give them one value")
    grouped = model.attention if isinstance(model.attention, GroupedQueryAttention) else None
    if grouped is not None and grouped.output_bias and not grouped.bias:
        detail = (
            "model.attention.output_bias = true, model.attention.bias = false: Megatron's --add-qkv-bias adds none to the output projection"
        )
        yield Limit("model.attention.bias", detail, "bias: true")
    rotated = grouped is not None and len(grouped.nope_layers) < letters.count("A")
    if model.learned_positions is not None and rotated:
        detail = (
            f"model.learned_positions = {model.learned_positions}, but attention layers also have rotary positions: Megatron "
            "supports only one of the two"
        )
        yield Limit("model.learned_positions", detail, "learned_positions: null, or nope_layers with all A layers")


def _routing(spec: Spec) -> Iterator[Limit]:
    """Routing scores and choices, clamped swiglu, and constants of norms and angles, for which launches have no argument."""
    for option in given_options(spec.model):
        if option.key in ROUTING | SCALES | {"model.moe.swiglu_limit"}:
            detail = f"{option.key} = {option.shown}, but host megatron is exported only with {option.neutral}"
            yield Limit(option.key, detail, f"{option.key.rpartition('.')[2]}: {option.neutral}", tensors=False)


def _attention(spec: Spec, letters: str) -> Iterator[Limit]:
    attention = spec.model.attention
    if attention is None:
        return
    rotated = [index for index, letter in enumerate(letters) if letter == "A" and index not in attention.nope_layers]
    if attention.nope_layers and rotated:
        listed = ", ".join(map(str, attention.nope_layers))
        detail = f"model.attention.nope_layers = [{listed}]: Megatron's position embedding applies to all attention layers or to none"
        yield Limit("model.attention.nope_layers", detail, "nope_layers: [], or all A layers", tensors=False)
    yield from _scores(attention)
    if isinstance(attention, LatentAttention):
        yield from sparse_limits(spec, letters)
        if attention.window_size is not None:
            yield Limit(
                "model.attention.window_size",
                f"model.attention.window_size = {attention.window_size}, but Megatron's latent attention has no window",
            )
    elif isinstance(attention, GroupedQueryAttention) and attention.window_size is not None and attention_kernel(spec) == "unfused":
        yield Limit("model.attention.window_size", "unfused attention takes no window", "host: {attention_backend: flash}")


def _scores(attention: GroupedQueryAttention | LatentAttention) -> Iterator[Limit]:
    """Rotary frequencies and scores that Megatron computes by another rule, with the same shapes."""
    scaling, key = attention.rope_scaling, "model.attention.rope_scaling"
    if attention.softmax_scale is not None:
        detail = f"model.attention.softmax_scale = {attention.softmax_scale:g}, but Megatron's is 1 / sqrt(width)"
        yield Limit("model.attention.softmax_scale", detail, "softmax_scale: null", tensors=False)
    if scaling is not None and isinstance(attention, LatentAttention):
        detail = f"{key}.kind = {scaling.kind}: scaled rotary frequencies of Megatron's latent attention are not written"
        yield Limit(key, detail, "rope_scaling: null", tensors=False)
    elif isinstance(scaling, YarnScaling):
        yield Limit(key, f"{key}.kind = yarn: Megatron supports it only with latent attention", "rope_scaling: null", tensors=False)
    elif isinstance(scaling, Llama3Scaling) and scaling != Llama3Scaling(kind="llama3", factor=scaling.factor):
        own = ", ".join(f"{name} = {getattr(scaling, name):g}" for name in ("low_freq_factor", "high_freq_factor", "original_seq_length"))
        yield Limit(key, f"{key}: {own}, but Megatron's values are 1, 4 and 8192", "rope_scaling: {kind: llama3, factor: 8}", tensors=False)


def _features(spec: Spec) -> Iterator[Limit]:
    features, mlp = spec.model.features, spec.model.mlp
    for name in (*SIDES, "relation_bias"):
        if getattr(features, name) is not None:
            yield Limit(
                f"model.features.{name}", f"model.features.{name} is given, and Megatron has no such embedding or bias", f"{name}: null"
            )
    mtp = features.mtp
    if mtp is not None and "D" in mtp.letters and mlp is not None and mlp.ffn_hidden_size != mtp.ffn_hidden_size:
        detail = (
            f"model.features.mtp.ffn_hidden_size = {mtp.ffn_hidden_size}, model.mlp.ffn_hidden_size = {mlp.ffn_hidden_size}, "
            "but Megatron has one --ffn-hidden-size for both"
        )
        yield Limit("model.features.mtp.ffn_hidden_size", detail, f"ffn_hidden_size: {mlp.ffn_hidden_size}")


def _parallel(spec: Spec) -> Iterator[Limit]:
    mesh, schedule = spec.mesh, spec.schedule
    if schedule.kind not in HOST.schedules:
        yield Limit(
            "schedule.kind", f"schedule.kind = {schedule.kind}, but Megatron runs {' and '.join(HOST.schedules)}", "schedule: {kind: 1f1b}"
        )
    group = spec.host.microbatch_group_size or mesh.pp
    if schedule.kind == "interleaved_1f1b" and schedule.num_microbatches % group:
        detail = (
            f"schedule.num_microbatches = {schedule.num_microbatches}, but Megatron interleaves groups of {group}, so it must be a multiple"
        )
        yield Limit("schedule.num_microbatches", detail, f"use a multiple of {group}")
    if schedule.steps_per_update > 1:
        detail = f"schedule.steps_per_update = {schedule.steps_per_update}, but Megatron runs every microbatch of an update in one schedule"
        yield Limit("schedule.steps_per_update", detail, f"num_microbatches: {schedule.microbatches_per_update}, steps_per_update: 1")
    if mesh.tp > 1 and not mesh.vocab_parallel:
        detail = f"mesh.tp = {mesh.tp}, mesh.vocab_parallel = false: Megatron shards embedding and head over the vocabulary wherever tp > 1"
        yield Limit("mesh.vocab_parallel", detail, "--set mesh.vocab_parallel=true")
    if spec.sharding.copies:
        detail = "sharding.mode = ddp: under Megatron host.distributed_optimizer = false copies optimizer state"
        yield Limit("sharding.mode", detail, "host: {distributed_optimizer: false}")
    for key in ("reshard_size", "prefetch"):
        if (value := getattr(spec.sharding, key)) is not None:
            yield Limit(f"sharding.{key}", f"sharding.{key} = {value}: Megatron has no such setting", f"{key}: null")
    if spec.sharding.reshard_after_forward:
        yield from _fsdp(spec)
    if spec.model.mamba is not None and isinstance(spec.model.mamba, Mamba2) and mesh.tp > 1 and spec.model.mamba.num_groups % mesh.tp:
        detail = f"model.mamba.num_groups = {spec.model.mamba.num_groups}, mesh.tp = {mesh.tp}: Megatron shards the groups over tp"
        yield Limit("model.mamba.num_groups", detail, "use a tp that divides the groups")


def _implementation(spec: Spec) -> Iterator[Limit]:
    host, moe = spec.host, spec.model.moe
    if host.transformer_impl == "local":
        if moe is not None and host.moe_grouped_gemm:
            detail = "host.transformer_impl = local, host.moe_grouped_gemm = true: tensors of grouped experts outside Transformer Engine"
            yield Limit("host.moe_grouped_gemm", detail, "moe_grouped_gemm: false")
        if (kernel := attention_kernel(spec)) != "unfused":  # releases of 2023 included FlashAttention, later ones do not
            detail = f"host.transformer_impl = local, host.attention_backend = {host.attention_backend}: its attention is not fused"
            yield Limit("host.attention_backend", detail, "attention_backend: unfused", tensors=kernel != "flash")
        if spec.precision.recipe is not None:
            detail = f"precision.recipe.name = {spec.precision.recipe.name}: low precision needs Transformer Engine"
            yield Limit("precision.recipe", detail, "recipe: null")
    if moe is not None and spec.mesh.tp > 1 and not host.sequence_parallel:
        detail = (
            f"host.sequence_parallel = false, mesh.tp = {spec.mesh.tp}: Megatron trains experts under TP only with sequence parallelism"
        )
        yield Limit("host.sequence_parallel", detail, "sequence_parallel: true")


def _own_modules(spec: Spec, letters: str) -> Iterator[Limit]:
    """Settings that only Megatron's own modules and its forks' modules have."""
    host, engine = spec.host, spec.host.transformer_impl != "local"
    if engine and host.framework == "gpt-neox":
        detail = "host.framework = gpt-neox, host.transformer_impl = transformer_engine: gpt-neox has its own modules"
        yield Limit("host.framework", detail, "transformer_impl: local")
    for key, usual in {"flash_version": None, "rope_fusion": None, "all_reduce_gradients": False}.items() if engine else ():
        if (given := getattr(host, key)) != usual:
            detail = (
                f"host.{key} = {str(given).lower()}, host.transformer_impl = transformer_engine: only Megatron's own modules "
                "have this option"
            )
            yield Limit(f"host.{key}", detail, f"{key}: {'null' if usual is None else 'false'}")
    parallel = spec.model.parallel_layers
    if parallel and (engine or host.model != "gpt" or any(letters[each] != "D" for each in parallel)):
        detail = (
            "model.parallel_layers is given, and Megatron's operators run one after another; "
            "only forks with their own modules have an MLP parallel to attention: transformer_impl: local, model: gpt"
        )
        yield Limit("model.parallel_layers", detail, "parallel_layers: []")
    if host.distribute_saved_activations and (spec.mesh.tp == 1 or host.sequence_parallel or not host.recompute_num_layers):
        detail = (
            f"host.distribute_saved_activations = true, mesh.tp = {spec.mesh.tp}, host.sequence_parallel = "
            f"{str(host.sequence_parallel).lower()}, host.recompute_num_layers = {host.recompute_num_layers or 'null'}: "
            "checkpoints of full recompute are sharded over tp without sequence parallelism"
        )
        yield Limit("host.distribute_saved_activations", detail, "distribute_saved_activations: false")


def _fsdp(spec: Spec) -> Iterator[Limit]:
    """Only Megatron-FSDP frees gathered parameters; its buffers are known for models on one stage, stepped by Adam."""
    host = spec.host
    beyond = {
        "host.moe_overlap = true": host.moe_overlap and spec.model.moe is not None,
        f"mesh.pp = {spec.mesh.pp}": spec.mesh.pp > 1,
        f"mesh.dp_replicate = {spec.mesh.dp_replicate}": spec.mesh.dp_replicate > 1,
        f"optimizer.matrix = {spec.optimizer.matrix}": spec.optimizer.matrix != "adamw",
        "host.precision_aware_optimizer = true": host.precision_aware_optimizer,
        **_fsdp_recipe(spec),
        "host.distributed_optimizer = false": not host.distributed_optimizer,
    }
    found = [said for said, is_beyond in beyond.items() if is_beyond]
    if found:
        detail = (
            f"sharding.reshard_after_forward = true with {', '.join(found)}: it selects Megatron-FSDP, whose buffers are not "
            "priced with this"
        )
        yield Limit("sharding.reshard_after_forward", detail, "reshard_after_forward: false")


def _fsdp_recipe(spec: Spec) -> dict[str, bool]:
    """A recipe under which the gathered weights are not the one-byte row-wise copies of which the shards consist."""
    recipe = spec.precision.recipe
    if recipe is None:
        return {}
    beyond = recipe.name not in PER_TENSOR or not recipe.param_gather
    return {f"precision.recipe = {{name: {recipe.name}, param_gather: {str(recipe.param_gather).lower()}}}": beyond}


def _recompute(spec: Spec, letters: str) -> Iterator[Limit]:
    for letter in sorted(set(letters)):
        policy = spec.recompute.of(letter)
        if policy == "none" or (letter == "A" and policy == "selective"):
            continue
        key = f"recompute.blocks.{letter}" if letter in spec.recompute.blocks else "recompute.default"
        detail = (
            f"{key} = {policy}: the only module of Megatron that a policy of megaplan recomputes is core_attn (recompute of A: selective)"
        )
        yield Limit(key, detail, "recompute: {default: none}, and host.recompute_modules or host.recompute_num_layers")
    modules = spec.host.recompute_modules or spec.recompute.of("A") == "selective"
    if spec.host.recompute_num_layers is not None and modules:
        detail = (
            "host.recompute_num_layers means full recompute, host.recompute_modules selective recompute: Megatron supports only "
            "one of the two"
        )
        yield Limit("host.recompute_num_layers", detail, "recompute_num_layers: null")
    if "moe" in spec.host.recompute_modules and spec.host.moe_overlap:
        detail = "host.recompute_modules has moe, host.moe_overlap = true: Megatron recomputes no layer whose communication it overlaps"
        yield Limit("host.recompute_modules", detail, "recompute_modules: [moe_act], or moe_overlap: false")
