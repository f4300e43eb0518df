"""Dtypes and recipes that Megatron-Core does not have."""

from collections.abc import Iterator

from megaplan.dtypes import DType
from megaplan.hosts.megatron.state import MEGATRON_RECIPES, adam_problems, is_single
from megaplan.hosts.values import Limit
from megaplan.spec.models import LatentAttention, Spec


def state_limits(spec: Spec) -> Iterator[Limit]:
    """Dtypes of weights, gradients and optimizer state that Megatron-Core does not have."""
    precision = spec.precision
    if precision.params not in (DType.BF16, DType.FP16, DType.FP32):
        detail = f"precision.params = {precision.params}, but Megatron is priced and written with bf16, fp16 or fp32"
        yield Limit("precision.params", detail, "params: bf16")
    if is_single(spec):
        yield from _single(spec)
    for letter, dtype in precision.families.items():
        yield Limit(f"precision.families.{letter}", f"precision.families.{letter} = {dtype}: Megatron has one dtype for all layers")
    if precision.grads not in (DType.FP32, precision.params):
        detail = f"precision.grads = {precision.grads}, but Megatron's main gradients are fp32 or {precision.params}"
        yield Limit("precision.grads", detail, "grads: fp32")
    if precision.params is DType.FP16 and spec.optimizer.matrix == "muon":
        yield Limit("precision.params", "precision.params = fp16, optimizer.matrix = muon: Megatron's Muon runs in bf16", "params: bf16")
    separate = spec.sharding.reshard_after_forward and not spec.host.fsdp_double_buffer  # only Megatron-FSDP has a gradient dtype
    if precision.reduce is not precision.grads and not separate:
        detail = (
            f"precision.reduce = {precision.reduce}, precision.grads = {precision.grads}: Megatron reduces in the dtype of its "
            "gradient buffer"
        )
        yield Limit("precision.reduce", detail, f"reduce: {precision.grads}")
    for key, detail, fix in adam_problems(spec):
        yield Limit(key, detail, fix)


def _single(spec: Spec) -> Iterator[Limit]:
    """Parts that Megatron supports only in 16 bits."""
    host, model = spec.host, spec.model
    attention, experts = model.attention, model.moe is not None
    flex, recipe = experts and host.dispatcher == "flex", spec.precision.recipe
    beyond = {
        f"host.attention_backend = {host.attention_backend}": attention is not None and host.attention_backend in ("flash", "fused"),
        f"mesh.cp = {spec.mesh.cp}": attention is not None and spec.mesh.cp > 1,
        "model.attention.indexer": isinstance(attention, LatentAttention) and attention.indexer is not None,
        "model.linear_attention": model.linear_attention is not None,
        f"host.moe_flex_backend = {host.moe_flex_backend}": flex,
        "host.moe_overlap = true": experts and host.moe_overlap,
        "host.precision_aware_optimizer = true": host.precision_aware_optimizer,
        f"precision.recipe.name = {recipe.name if recipe is not None else None}": recipe is not None,
        "sharding.reshard_after_forward = true": spec.sharding.reshard_after_forward,
    }
    for said, is_beyond in beyond.items():
        if is_beyond:
            key = said.partition(" ")[0]
            yield Limit(key, f"precision.params = fp32, {said}: under Megatron it exists, or is priced, only in 16 bits", "params: bf16")


def low_precision_limits(spec: Spec) -> Iterator[Limit]:
    """Recipes, and keys of recipes, without a counterpart in Megatron-Core."""
    recipe = spec.precision.recipe
    if recipe is None:
        return
    if recipe.name not in MEGATRON_RECIPES:
        detail = f"precision.recipe.name = {recipe.name}, but Megatron has {', '.join(MEGATRON_RECIPES)}"
        yield Limit("precision.recipe.name", detail, "name: fp8_current")
    if recipe.families is not None:
        detail = (
            f"precision.recipe.families = {', '.join(recipe.families)}: Megatron's recipe applies to all layers, except "
            "optionally the first and the last"
        )
        yield Limit("precision.recipe.families", detail, "families: null")
    if recipe.head and recipe.name != "mxfp8":
        detail = f"precision.recipe.head = true, name = {recipe.name}: Megatron's output projection is in low precision only under mxfp8"
        yield Limit("precision.recipe.head", detail, "head: false")
