"""Rules of host torchtitan: settings that torchtitan does not support, or supports with tensors that the ledger does not list.

Source: torchtitan/models/llama3, qwen3, distributed/fsdp.py and config/configs.py of pytorch/torchtitan at b5bcd76c.
"""

from collections.abc import Iterator

from megaplan.dtypes import DType
from megaplan.errors import Diagnostic
from megaplan.families.registry import families_of
from megaplan.hosts.torchtitan.blocks import PAIR, PAIRS, SIZE
from megaplan.hosts.values import Limit, refused
from megaplan.schedules.registry import SCHEDULES
from megaplan.spec.context import Checked
from megaplan.spec.models import GroupedQueryAttention, LatentAttention, MixtureOfExperts, Spec
from megaplan.spec.pattern import parse_pattern
from megaplan.spec.settings import VALUES_ALONE, given_options

RECIPES = {"fp8_current": "tensorwise", "fp8_rowwise": "rowwise"}
"""torchao's name of each recipe that is priced."""
OTHER_HOST = "host: {name: megarun}"
"""Fix for a degree or recipe that only megarun supports: another host, which leaves the job unchanged."""
NAMES = {"params": "mixed_precision_param", "reduce": "mixed_precision_reduce", "master": "dtype"}
"""torchtitan's keys of the dtypes that a job states."""


def torchtitan_rules(checked: Checked) -> Iterator[Diagnostic]:
    """MP902."""
    return refused(checked, torchtitan_limits)


def torchtitan_limits(spec: Spec, letters: str) -> Iterator[Limit]:
    """Every setting that prevents an estimate of torchtitan.

    Args:
        spec: A typed spec, of any host.
        letters: One letter per layer.
    """
    if len(letters) % SIZE or {letters[start : start + SIZE] for start in range(0, len(letters), SIZE)} - {*PAIRS}:
        shown = letters if len(letters) <= 24 else f"{letters[:24]}…"
        detail = f"the layers are {shown}: a torchtitan block is an A layer and the D or E layer after it"
        yield Limit("model.pattern", detail, "pattern: AD")
    yield from _model(spec)
    yield from _unsharded(spec, letters)
    yield from _mesh(spec)
    yield from _precision(spec)
    yield from _policies(spec)
    yield from _cuts(spec)


def _model(spec: Spec) -> Iterator[Limit]:
    model = spec.model
    for option in given_options(model):
        if option.key in VALUES_ALONE:
            continue
        detail = f"{option.key} = {option.shown}: no priced model of torchtitan has it"
        yield Limit(option.key, detail, f"{option.key.rpartition('.')[2]}: {option.neutral}")
    for name in type(model.features).model_fields:
        if getattr(model.features, name) is not None:
            yield Limit(f"model.features.{name}", f"model.features.{name}: torchtitan has no such part", f"{name}: null")
    for family, section in families_of(model):
        if family.letter == "E":
            yield from _experts(section)
        elif family.letter == "A" and section.window_size is not None:
            detail = f"model.attention.window_size = {section.window_size}: torchtitan masks it with flex attention, which is not priced"
            yield Limit("model.attention.window_size", detail, "window_size: null")
        elif family.letter == "A" and section.bias:
            yield Limit("model.attention.bias", "model.attention.bias = true: no priced model of torchtitan has it", "bias: false")
        elif family.letter == "D" and section.activation != "swiglu":
            detail = f"model.mlp.activation = {section.activation}: torchtitan's dense MLP is swiglu"
            yield Limit("model.mlp.activation", detail, "activation: swiglu")
    if model.tie_embeddings and spec.mesh.num_slots > 1:
        detail = f"model.tie_embeddings = true, mesh.pp · mesh.vpp = {spec.mesh.num_slots}: torchtitan ties them on one stage alone"
        yield Limit("model.tie_embeddings", detail, "tie_embeddings: false")
    if SCHEDULES[spec.schedule.kind].torch_name is None:
        detail = f"schedule.kind = {spec.schedule.kind}: torch's schedules hold one copy of the model"
        yield Limit("schedule.kind", detail, "schedule: {kind: 1f1b}")
    if spec.data.packing != "none":
        yield Limit("data.packing", f"data.packing = {spec.data.packing}: its attention masks are not priced", "packing: none")


def _experts(moe: MixtureOfExperts) -> Iterator[Limit]:
    if moe.activation != "swiglu":
        yield Limit(
            "model.moe.activation", f"model.moe.activation = {moe.activation}: torchtitan's experts are swiglu", "activation: swiglu"
        )
    if moe.capacity_factor is not None:
        yield Limit("model.moe.capacity_factor", "model.moe.capacity_factor is given, and torchtitan drops no row", "capacity_factor: null")
    if not isinstance(moe.routing_skew, float):
        yield Limit(
            "model.moe.routing_skew",
            "model.moe.routing_skew is given per layer, but torchtitan's blocks have one for all",
            "routing_skew: 1.0",
        )


def _unsharded(spec: Spec, letters: str) -> Iterator[Limit]:
    """Degrees with which experts or latent attention run in a way that is not priced."""
    what = "experts" if "E" in letters else "latent attention" if isinstance(spec.model.attention, LatentAttention) else None
    if what is None:
        return
    if spec.mesh.etp > 1:
        yield Limit("mesh.etp", f"mesh.etp = {spec.mesh.etp}: torchtitan does not shard the width of an expert", OTHER_HOST)
    if spec.mesh.tp > 1:
        yield Limit(
            "mesh.tp",
            f"mesh.tp = {spec.mesh.tp} with {what}: the tensors that they save under tensor parallelism are not priced",
            OTHER_HOST,
        )
    if spec.mesh.cp > 1 and isinstance(spec.model.attention, LatentAttention):
        yield Limit("mesh.cp", f"mesh.cp = {spec.mesh.cp} with latent attention: its ring of keys and values is not priced", OTHER_HOST)
    if spec.precision.recipe is not None:
        yield Limit("precision.recipe", f"precision.recipe with {what}: their products in eight bits are not priced", OTHER_HOST)


def _mesh(spec: Spec) -> Iterator[Limit]:
    mesh = spec.mesh
    if spec.sharding.copies:
        yield Limit("sharding.mode", "sharding.mode = ddp: the buckets of torchtitan's replicate() are not priced", "mode: fsdp")
    for key in ("reshard_size", "prefetch"):
        if (value := getattr(spec.sharding, key)) is not None:
            yield Limit(f"sharding.{key}", f"sharding.{key} = {value}: torchtitan has no such setting", f"{key}: null")
    if mesh.tp > 1 and not mesh.vocab_parallel:
        detail = f"mesh.tp = {mesh.tp}, mesh.vocab_parallel = false: torchtitan shards embedding, head and loss over tp"
        yield Limit("mesh.vocab_parallel", detail, "vocab_parallel: true")
    heads = spec.model.attention.num_kv_heads if isinstance(spec.model.attention, GroupedQueryAttention) else mesh.tp
    if heads % mesh.tp:
        detail = (
            f"mesh.tp = {mesh.tp}, model.attention.num_kv_heads = {heads}: torchtitan shards key heads over tp, but does not replicate them"
        )
        yield Limit("mesh.tp", detail, f"tp: {heads}")
    if mesh.dp_shard * mesh.cp == 1 and mesh.dp_replicate > 1:
        detail = f"mesh.dp_replicate = {mesh.dp_replicate}, dp_shard · cp = 1: its replicate() buckets are not priced"
        yield Limit("mesh.dp_replicate", detail, f"dp_shard: {mesh.dp_replicate}, dp_replicate: 1")


def _precision(spec: Spec) -> Iterator[Limit]:
    precision, recipe = spec.precision, spec.precision.recipe
    for role, name in NAMES.items():
        if (dtype := getattr(precision, role)) not in (DType.BF16, DType.FP32):
            yield Limit(f"precision.{role}", f"precision.{role} = {dtype}: training.{name} is bfloat16 or float32", f"{role}: fp32")
    for role in ("grads", "moments"):
        if getattr(precision, role) is not precision.master:
            detail = (
                f"precision.{role} = {getattr(precision, role)}, precision.master = {precision.master}: FSDP2 and AdamW keep both equal"
            )
            yield Limit(f"precision.{role}", detail, f"{role}: {precision.master}")
    for letter, dtype in precision.families.items():
        yield Limit(
            f"precision.families.{letter}",
            f"precision.families.{letter} = {dtype}: FSDP2 has one mixed-precision policy for the whole model",
        )
    if recipe is None:
        return
    beyond = {
        f"name = {recipe.name}": recipe.name not in RECIPES,
        "families": recipe.families is not None,
        f"first_last_bf16 = {list(recipe.first_last_bf16)}": any(recipe.first_last_bf16),
        "head = true": recipe.head,
        "attention = true": recipe.attention,
        f"param_gather = true with {recipe.name}": recipe.param_gather and recipe.name != "fp8_current",
    }
    if found := [said for said, is_beyond in beyond.items() if is_beyond]:
        detail = (
            f"precision.recipe: {', '.join(found)}; only float8 linears of all blocks, tensorwise or rowwise, and tensorwise "
            "gathers are priced"
        )
        yield Limit("precision.recipe", detail, "recipe: {name: fp8_current, param_gather: true}")


def _policies(spec: Spec) -> Iterator[Limit]:
    if spec.optimizer.matrix != "adamw":
        detail = f"optimizer.matrix = {spec.optimizer.matrix}: only torchtitan's fused AdamW is priced"
        yield Limit("optimizer.matrix", detail, "matrix: adamw")
    if spec.recompute.blocks:
        given = ", ".join(f"{letter}: {policy}" for letter, policy in spec.recompute.blocks.items())
        yield Limit("recompute.blocks", f"recompute.blocks = {{{given}}}: torchtitan checkpoints all blocks by one policy", "blocks: {}")
    if spec.schedule.steps_per_update > 1:
        detail = f"schedule.steps_per_update = {spec.schedule.steps_per_update}: gradients over several schedule steps are not priced"
        yield Limit("schedule.steps_per_update", detail, "steps_per_update: 1")


def _cuts(spec: Spec) -> Iterator[Limit]:
    spans = spec.split.spans or parse_pattern(spec.model.pattern, spec.model.num_layers).spans or ()
    odd = [start for start, _ in spans if start % len(PAIR)]
    if odd:
        detail = f"stages begin at {', '.join(map(str, odd[:8]))}: a stage of torchtitan begins with a block, at an even layer"
        yield Limit("split.spans" if spec.split.spans else "model.pattern", detail, "cut at even layers")
