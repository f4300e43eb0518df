"""Bytes of optimizer state an element of a parameter, by the conditions of Megatron-Core's configuration.

Source: `OptimizerConfig.__post_init__`, `_get_megatron_optimizer_based_on_param_groups`, `_build_model_and_main_param_groups` and
`_copy_model_grads_to_main_grads` of `megatron/core/optimizer` at d98e8a64, and `FusedAdam` of Transformer Engine at d0067d0d.
"""

from collections.abc import Iterator
from typing import NamedTuple

from megaplan.dtypes import DType
from megaplan.spec.models import Spec

MEGATRON_RECIPES = {"fp8_delayed": "delayed", "fp8_current": "tensorwise", "fp8_blockwise": "blockwise", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
"""Megatron's word for each recipe that it has."""
NO_RECIPE = "delayed"
"""The recipe that Megatron-LM's parser gives the optimizer if fp8 is off; Megatron-Bridge's mixed precisions give it tensorwise."""


class StateBytes(NamedTuple):
    """Bytes an element of a parameter on the rank that steps it.

    Attributes:
        master: The master copy; fp32 weights have none.
        moments: Both moments under Adam; the one momentum under Muon, Lion and SGD.
        gradient: fp32 copy of a 16-bit gradient, made by the optimizer's step and freed before the next forward.
        unscaled: fp32 copies of states of other types, which Adam's kernel reads and writes during its step.
    """

    master: int
    moments: int
    gradient: int
    unscaled: int


def is_single(spec: Spec) -> bool:
    """True if weights and activations are fp32."""
    return spec.precision.params is DType.FP32


def optimizer_recipe(spec: Spec) -> str:
    """Recipe for the optimizer's conditions: the given one, or the linears' one; 4 bits do not count as an fp8 recipe."""
    if spec.host.optimizer_recipe is not None:
        return str(spec.host.optimizer_recipe)
    recipe = spec.precision.recipe
    return NO_RECIPE if recipe is None or recipe.name == "nvfp4" else MEGATRON_RECIPES.get(recipe.name, NO_RECIPE)


def adam_holds_masters(spec: Spec) -> bool:
    """True if Adam's kernel holds masters and reads unconverted gradients: `use_precision_aware_optimizer_no_fp8_or_ds_fp8`."""
    if not spec.host.precision_aware_optimizer:
        return False
    return spec.precision.master is not DType.FP32 or optimizer_recipe(spec) == NO_RECIPE or spec.host.optimizer_offload is not None


def adam_bytes(spec: Spec) -> StateBytes:
    """State of a parameter that Adam steps.

    An fp32 master of a bf16 parameter is stored as its lower 16 bits: the upper ones are the parameter's. With optimizer state on the host
    masters and moments are fp32 wherever they are.
    """
    host, precision = spec.host, spec.precision
    if host.optimizer_offload is not None:
        copy = 0 if precision.grads is DType.FP32 else 4
        return StateBytes(0 if is_single(spec) else 4, 4 * len(state_dtypes(spec)), copy, 0)
    if is_single(spec):  # the optimizer steps views of the parameters
        return StateBytes(0, sum(each.bytes for each in state_dtypes(spec)), 0, 0)
    if not adam_holds_masters(spec):
        gradient = 0 if precision.grads is DType.FP32 else 4
        return StateBytes(4, sum(each.bytes for each in state_dtypes(spec)), gradient, _unscaled_bytes(spec))
    kept_low = precision.master is DType.FP32 and precision.params is DType.BF16
    master = 2 if kept_low else precision.master.bytes
    unscaled = _unscaled_bytes(spec) + (4 if precision.master is DType.FP16 else 0)
    return StateBytes(master, sum(each.bytes for each in state_dtypes(spec)), 0, unscaled)


def masters_stay(spec: Spec) -> bool:
    """True if masters and gradients' copies are on the device whatever is offloaded: the optimizer on the host steps copies of masters.

    The precision-aware optimizer has no master on the device. Source: `HybridDeviceOptimizer` of
    `megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py`, which clones the parameters that `DistributedOptimizer` passes to it.
    """
    return not spec.host.precision_aware_optimizer


def muon_bytes(spec: Spec) -> StateBytes:
    """State of a matrix that Muon steps: an fp32 master of 16-bit weights, and one momentum."""
    return StateBytes(0 if is_single(spec) else 4, spec.precision.moments.bytes, 0 if spec.precision.grads is DType.FP32 else 4, 0)


def state_dtypes(spec: Spec) -> tuple[DType, ...]:
    """Types of the first and the second moment; Lion and SGD have the first alone."""
    first = spec.precision.moments
    if spec.host.optimizer != "adam":
        return (first,)
    return first, first if spec.host.exp_avg_sq_dtype is None else spec.host.exp_avg_sq_dtype


def _unscaled_bytes(spec: Spec) -> int:
    """fp32 copies of moments; two moments in bf16 are read directly."""
    types = state_dtypes(spec)
    return 0 if types == (DType.BF16, DType.BF16) else sum(4 for each in types if each is not DType.FP32)


def adam_problems(spec: Spec) -> Iterator[tuple[str, str, str]]:
    """Settings that Megatron's optimizer refuses: the key, the reason and a fix of each."""
    precision, host = spec.precision, spec.host
    aware = host.precision_aware_optimizer
    if precision.master not in ((DType.FP32, DType.FP16) if aware else (DType.FP32,)):
        yield "precision.master", f"precision.master = {precision.master}, but Megatron's master is fp32", "master: fp32"
    low = [each for each in state_dtypes(spec) if each is not DType.FP32]
    if low and not aware:
        detail = f"precision.moments = {low[0]}: only the precision-aware optimizer keeps moments below fp32"
        key = "precision.moments" if precision.moments is not DType.FP32 else "host.exp_avg_sq_dtype"
        yield key, detail, "moments: fp32, or host: {precision_aware_optimizer: true}"
    if host.optimizer != "adam":
        yield from _one_moment_problems(spec)
    if aware and spec.optimizer.matrix == "muon":
        detail = "host.precision_aware_optimizer = true, optimizer.matrix = muon: the option is for Adam only"
        yield "host.precision_aware_optimizer", detail, "optimizer: {matrix: adamw}"
    if aware and not host.distributed_optimizer:
        detail = (
            "host.precision_aware_optimizer = true, host.distributed_optimizer = false: Megatron supports it only with the "
            "distributed optimizer"
        )
        yield "host.precision_aware_optimizer", detail, "distributed_optimizer: true"
    if host.layer_wise_layout:
        yield from _layout_problems(spec)
    if host.optimizer_offload is not None and spec.optimizer.matrix == "muon":
        detail = f"host.optimizer_offload = {host.optimizer_offload:g}, optimizer.matrix = muon: Megatron supports it only with Adam"
        yield "host.optimizer_offload", detail, "optimizer_offload: null"
    recipe, given = precision.recipe, host.optimizer_recipe
    if given is not None and recipe is not None and recipe.name != "nvfp4" and given != MEGATRON_RECIPES.get(recipe.name):
        detail = f"host.optimizer_recipe = {given}, precision.recipe.name = {recipe.name}: Megatron has one recipe for both"
        yield "host.optimizer_recipe", detail, "optimizer_recipe: null"
    yield from _gathered_problems(spec)


def _layout_problems(spec: Spec) -> Iterator[tuple[str, str, str]]:
    """Settings without a buffer layout that keeps Muon's matrices unsharded."""
    recipe, moe = spec.precision.recipe, spec.model.moe
    for given, said in (
        (spec.optimizer.matrix != "muon", f"optimizer.matrix = {spec.optimizer.matrix}: the layout applies only to Muon's matrices"),
        (not spec.host.distributed_optimizer, "host.distributed_optimizer = false: there are no shards"),
        (
            spec.mesh.dp_replicate > 1,
            f"mesh.dp_replicate = {spec.mesh.dp_replicate}: Megatron supports it only with one optimizer instance",
        ),
        (moe is not None and moe.bias, "model.moe.bias = true: Megatron has no optimizer for experts' biases there"),
        (recipe is not None and recipe.param_gather, "precision.recipe.param_gather = true: buffers of 8-bit weights are not priced there"),
    ):
        if given:
            yield "host.layer_wise_layout", f"host.layer_wise_layout = true, {said}", "layer_wise_layout: false"


def _one_moment_problems(spec: Spec) -> Iterator[tuple[str, str, str]]:
    """Settings of Adam that Lion and SGD do not have."""
    for given, key, fix in (
        (spec.optimizer.matrix == "muon", "optimizer.matrix = muon", "optimizer: {matrix: adamw}"),
        (spec.host.precision_aware_optimizer, "host.precision_aware_optimizer = true", "precision_aware_optimizer: false"),
        (spec.host.optimizer_offload is not None, "host.optimizer_offload", "optimizer_offload: null"),
    ):
        if given:
            yield "host.optimizer", f"host.optimizer = {spec.host.optimizer}, {key}: Megatron supports it only with adam", fix


def _gathered_problems(spec: Spec) -> Iterator[tuple[str, str, str]]:
    """Weights stored in low precision: Adam's kernel has a shard of them only under delayed scaling."""
    recipe, host = spec.precision.recipe, spec.host
    if recipe is None or not recipe.param_gather:
        return
    if not host.distributed_optimizer:
        detail = (
            "precision.recipe.param_gather = true, host.distributed_optimizer = false: Megatron gathers such weights only with "
            "the distributed optimizer"
        )
        yield "precision.recipe.param_gather", detail, "distributed_optimizer: true"
    elif adam_holds_masters(spec) and (recipe.name == "nvfp4" or optimizer_recipe(spec) != "delayed"):
        why = f"precision.recipe = {{name: {recipe.name}, param_gather: true}} with masters that Adam's kernel holds"
        fix = "host: {optimizer_recipe: tensorwise}" if recipe.name == "nvfp4" else "master: fp32, optimizer_offload: null"
        yield "precision.recipe.param_gather", f"{why}: it has no 16-bit shards of such weights", f"param_gather: false, or {fix}"
