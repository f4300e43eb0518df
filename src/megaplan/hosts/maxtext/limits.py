"""Rules of host maxtext: settings that MaxText does not have, or that allocate tensors which the budget does not list."""

from collections.abc import Iterator

from megaplan.devices import TPU
from megaplan.dtypes import DType
from megaplan.errors import Diagnostic
from megaplan.families.registry import FAMILIES, families_of
from megaplan.hosts.values import Limit, refused
from megaplan.spec.context import Checked
from megaplan.spec.host import device_of
from megaplan.spec.low_precision import LowPrecision
from megaplan.spec.models import GroupedQueryAttention, Spec

MIXERS, MLPS = "AG", "DE"
SIZE = 2
"""Letters of a decoder layer of MaxText: a mixer followed by an MLP or experts."""
DELTA = "gated_delta"
"""The only linear attention of MaxText: Qwen3-Next's and Qwen3.5's."""
SCHEDULES = ("gpipe", "interleaved_1f1b")
ROLES = ("params", "master", "grads", "moments")


def maxtext_rules(checked: Checked) -> Iterator[Diagnostic]:
    """MP902."""
    return refused(checked, maxtext_limits)


def maxtext_limits(spec: Spec, letters: str) -> Iterator[Limit]:
    """Every setting that prevents an estimate of MaxText.

    Args:
        spec: A typed spec, of any host.
        letters: One letter per layer.
    """
    yield from _layers(spec, letters)
    yield from _mesh(spec, letters)
    yield from _precision(spec)
    yield from _policies(spec)


def _layers(spec: Spec, letters: str) -> Iterator[Limit]:
    model = spec.model
    absent = [letter for letter in FAMILIES if letter in letters and letter not in MIXERS + MLPS]
    for letter in absent:
        yield Limit("model.pattern", f"layers of {letter}: MaxText has no {FAMILIES[letter].title} block", "host: {name: megarun}")
    pairs = {letters[start : start + SIZE] for start in range(0, len(letters), SIZE)}
    if not absent and not pairs <= {mixer + mlp for mixer in MIXERS for mlp in MLPS}:
        shown = letters if len(letters) <= 24 else f"{letters[:24]}…"
        yield Limit(
            "model.pattern", f"the layers are {shown}, but a decoder layer of MaxText is an A or G followed by a D or E", "pattern: AD"
        )
    kind = getattr(model.linear_attention, "kind", DELTA)
    if "G" in letters and kind != DELTA:
        yield Limit("model.linear_attention.kind", f"model.linear_attention.kind = {kind}: MaxText has {DELTA}", f"kind: {DELTA}")
    yield from _parts(spec)


def _parts(spec: Spec) -> Iterator[Limit]:
    """Limits on parts of a model outside its layers, and on masks."""
    model = spec.model
    for name in type(model.features).model_fields:
        if getattr(model.features, name) is not None:
            yield Limit(f"model.features.{name}", f"model.features.{name}: it is not priced under MaxText", f"{name}: null")
    for key in ("towers", "streams", "attention_residuals", "layer_embeddings"):
        if getattr(model, key, None) not in (None, 1):
            yield Limit(f"model.{key}", f"model.{key}: it is not priced under MaxText", f"remove model.{key}")
    for family, section in families_of(model):
        if not isinstance(getattr(section, "routing_skew", 1.0), float):
            yield Limit(
                f"model.{family.section}.routing_skew",
                "model.moe.routing_skew is given per layer, but MaxText's scanned layers are equal",
                "routing_skew: 1.0",
            )
    if spec.data.packing != "none":
        yield Limit("data.packing", f"data.packing = {spec.data.packing}: its masks are not priced", "packing: none")
    if spec.pools:
        yield Limit("pools", "pools: MaxText runs one program on all devices", "remove pools")


def _mesh(spec: Spec, letters: str) -> Iterator[Limit]:
    mesh, sharding = spec.mesh, spec.sharding
    if sharding.copies and mesh.dp_shard > 1:
        yield Limit("sharding.mode", "sharding.mode = ddp: MaxText copies over its data axis", "mode: fsdp, with dp_replicate for copies")
    for key in ("reshard_size", "prefetch"):
        if (value := getattr(sharding, key)) is not None:
            yield Limit(f"sharding.{key}", f"sharding.{key} = {value}: MaxText has no such setting", f"{key}: null")
    if mesh.pp == 1 and mesh.dp_shard * mesh.cp > 1 and not sharding.reshard_after_forward:
        detail = "sharding.reshard_after_forward = false: without stages MaxText gathers parameters for backward, too"
        yield Limit("sharding.reshard_after_forward", detail, "reshard_after_forward: true")
    if "E" in letters and mesh.etp != mesh.tp:
        detail = f"mesh.etp = {mesh.etp}, mesh.tp = {mesh.tp}: MaxText's tensor axis shards experts as it shards an MLP"
        yield Limit("mesh.etp", detail, f"etp: {mesh.tp}")
    if mesh.dp_shard % mesh.ep:
        detail = f"mesh.ep = {mesh.ep}, mesh.dp_shard = {mesh.dp_shard}: MaxText's expert axis is one of the data axes"
        yield Limit("mesh.ep", detail, "ep: a divisor of dp_shard")
    if mesh.tp > 1 and not mesh.vocab_parallel:
        yield Limit("mesh.vocab_parallel", "mesh.vocab_parallel = false: the tensor axis shards the vocabulary", "vocab_parallel: true")
    heads = spec.model.attention.num_kv_heads if isinstance(spec.model.attention, GroupedQueryAttention) else mesh.tp
    if heads % mesh.tp:
        detail = (
            f"mesh.tp = {mesh.tp}, model.attention.num_kv_heads = {heads}: the tensor axis shards key heads, but does not replicate them"
        )
        yield Limit("mesh.tp", detail, f"tp: {heads}")
    if mesh.gathers_latents:
        yield Limit("mesh.context_exchange", "mesh.context_exchange = latents: MaxText gathers keys and values", "context_exchange: heads")
    if mesh.dp_shard % spec.host.fsdp_transpose:
        detail = f"host.fsdp_transpose = {spec.host.fsdp_transpose}, mesh.dp_shard = {mesh.dp_shard}: it is a part of dp_shard"
        yield Limit("host.fsdp_transpose", detail, "fsdp_transpose: 1")
    if mesh.is_pipelined:
        yield from _stages(spec, letters)


def _stages(spec: Spec, letters: str) -> Iterator[Limit]:
    mesh, schedule = spec.mesh, spec.schedule
    if schedule.kind not in SCHEDULES:
        detail = f"schedule.kind = {schedule.kind}: MaxText's pipeline is a loop whose backward XLA derives"
        yield Limit("schedule.kind", detail, f"kind: {SCHEDULES[mesh.vpp > 1]}")
    if schedule.num_microbatches % mesh.pp:
        detail = (
            f"schedule.num_microbatches = {schedule.num_microbatches}, mesh.pp = {mesh.pp}: it must be a multiple of the number of stages"
        )
        yield Limit("schedule.num_microbatches", detail, f"num_microbatches: {mesh.pp}")
    spans = spec.split.spans or ()
    if len(letters) % (SIZE * mesh.num_slots) or len({stop - start for start, stop in spans}) > 1 or spec.split.mode == "weighted":
        detail = f"{len(letters)} layers on mesh.pp · mesh.vpp = {mesh.num_slots} slots, split.mode = {spec.split.mode}: stages are equal"
        yield Limit("split.mode", f"{detail}, of whole layers of MaxText", "split: {mode: equal}")


def _precision(spec: Spec) -> Iterator[Limit]:
    precision, recipe = spec.precision, spec.precision.recipe
    for role in ROLES:
        if (dtype := getattr(precision, role)) not in (DType.BF16, DType.FP32):
            yield Limit(f"precision.{role}", f"precision.{role} = {dtype}: MaxText has bfloat16 and float32", f"{role}: bf16")
    if precision.reduce is not precision.params.of_products:
        detail = f"precision.reduce = {precision.reduce}, precision.params = {precision.params}: XLA reduces in the products' dtype"
        yield Limit("precision.reduce", detail, f"reduce: {precision.params.of_products}")
    if spec.host.int8 and (device_of(spec.device).generation != TPU or "int8" not in device_of(spec.device).peak_flops):
        yield Limit(
            "host.int8", f"host.int8 = true, device.name = {spec.device.name}: megaplan knows no int8 rate of this device", "int8: false"
        )
    for letter, dtype in precision.families.items():
        yield Limit(f"precision.families.{letter}", f"precision.families.{letter} = {dtype}: MaxText has one dtype for the whole model")
    if recipe is not None and (recipe != LowPrecision(name="fp8_current") or spec.host.int8):
        given = f"precision.recipe.name = {recipe.name}, host.int8 = {str(spec.host.int8).lower()}"
        detail = f"{given}: only fp8 with one scale per tensor and int8 are priced"
        yield Limit("precision.recipe", detail, "recipe: {name: fp8_current}")


def _policies(spec: Spec) -> Iterator[Limit]:
    host, recompute = spec.host, spec.recompute
    if spec.optimizer.matrix != "adamw":
        yield Limit("optimizer.matrix", f"optimizer.matrix = {spec.optimizer.matrix}: AdamW is priced", "matrix: adamw")
    if recompute.blocks:
        given = ", ".join(f"{letter}: {policy}" for letter, policy in recompute.blocks.items())
        yield Limit("recompute.blocks", f"recompute.blocks = {{{given}}}: MaxText has one policy for all layers", "blocks: {}")
    for key in ("remat_policy", "remat_tensors"):
        if recompute.default != "selective" and getattr(host, key) != type(host).model_fields[key].get_default(call_default_factory=True):
            detail = f"host.{key} is given, and recompute.default = {recompute.default}"
            yield Limit(f"host.{key}", detail, "recompute: {default: selective}")
    if host.remat_policy != "custom" and host.remat_tensors:
        yield Limit("host.remat_tensors", f"host.remat_tensors is given, host.remat_policy = {host.remat_policy}", "remat_policy: custom")
    if host.attention_backend == "unfused":
        yield Limit(
            "host.attention_backend", "host.attention_backend = unfused: its probabilities are not priced", "attention_backend: auto"
        )
    if host.optimizer_offload not in (None, 1.0):
        yield Limit(
            "host.optimizer_offload", f"host.optimizer_offload = {host.optimizer_offload}: MaxText offloads all", "optimizer_offload: 1.0"
        )
