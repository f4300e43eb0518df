"""Rules of the `host` section: keys of another host, and what the named one cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from megaplan.diagnostics import diagnostic
from megaplan.dtypes import DType
from megaplan.errors import Diagnostic, Severity
from megaplan.spec.context import Checked
from megaplan.spec.host import RELEASED, OfHost, host_keys
from megaplan.spec.models import GroupedQueryAttention
from megaplan.spec.options import given_options

WHY_UNPRICED = {
    "distillation": "a teacher model stands beside the student",
    "fsdp": "Megatron-FSDP has other buffers unless it shards all, in fp32, which is sharding.reshard_after_forward",
    "layer_wise_param_layout": "its shards are padded by a layout that is not modelled",
    "optimizer_cuda_graph": "the graph of the optimizer's step has a memory pool of its own",
}
"""Features whose tensors are not modelled, and what they add."""
BLOCKS = ("mxfp8", "nvfp4")
"""Recipes whose gathered weights are not one byte an element."""
OF_MEGATRON = frozenset({
    "model.attention.output_bias", "model.attention.latent_norm",
})  # fmt: skip
"""Options of a model that the byte model of Megatron-Core alone has terms for; the output's bias is of latent attention."""


def host_rules(checked: Checked) -> Iterator[Diagnostic]:
    """MP901 … MP905."""
    host = checked.spec.host
    own = host_keys(host.name)
    for key in sorted(host.model_fields_set - own):
        other = next(name for name in get_args(OfHost) if key in host_keys(name))
        detail = f"host.{key} is a key of host {other}, and host.name = {host.name}"
        yield checked.error("MP901", detail, f"host.{key}", f"remove host.{key}", f"host: {{name: {other}}}")
    if host.name == "megarun":
        yield from _not_of_megarun(checked)
        yield from _recipe_of_megarun(checked)
    elif checked.pattern is not None:
        yield from _of_torchtitan(checked) if host.name == "torchtitan" else _of_megatron(checked)


def _of_torchtitan(checked: Checked) -> Iterator[Diagnostic]:
    from megaplan.spec.torchtitan_limits import torchtitan_limits  # noqa: PLC0415 (most specs are of megarun)

    letters = checked.pattern.layers if checked.pattern is not None else ""
    for limit in torchtitan_limits(checked.spec, letters):
        yield checked.error("MP902", limit.detail, limit.key, *([limit.fix] if limit.fix else []))


def _of_megatron(checked: Checked) -> Iterator[Diagnostic]:
    from megaplan.spec.megatron_limits import gpt_limits, megatron_limits  # noqa: PLC0415 (likewise)

    spec, host, letters = checked.spec, checked.spec.host, checked.pattern.layers if checked.pattern is not None else ""
    limits = [*megatron_limits(spec, letters), *(gpt_limits(spec, letters) if host.model == "gpt" else ())]
    for limit in limits:
        if limit.tensors:
            yield checked.error("MP902", limit.detail, limit.key, *([limit.fix] if limit.fix else []))
    if host.release is not None and host.framework not in RELEASED:
        detail = f"host.release = {host.release}, and no step time of host.framework = {host.framework} depends on it"
        yield checked.error("MP902", detail, "host.release", "release: null", *(f"framework: {name}" for name in RELEASED))
    for feature in host.features:
        detail = f"host.features has {feature}: {WHY_UNPRICED[feature]}"
        yield checked.error("MP903", detail, "host.features", "plan without it, and measure what it adds")
    otherwise = [limit for limit in limits if not limit.tensors]
    if otherwise:
        said = "\n".join(limit.detail for limit in otherwise)
        yield diagnostic("MP904", said, checked.locate(otherwise[0].key), [limit.fix for limit in otherwise], Severity.NOTE)


def _recipe_of_megarun(checked: Checked) -> Iterator[Diagnostic]:
    """What of a low-precision recipe megarun's ledger has no terms for."""
    recipe = checked.spec.precision.recipe
    if recipe is None:
        return
    ends, precision = any(recipe.first_last_bf16), checked.spec.precision
    wide = precision.params is DType.FP32 or bool(precision.families)
    for key, given, fix in (
        ("head", recipe.head, "head: false"),
        ("attention", recipe.attention, "attention: false"),
        ("param_gather", recipe.param_gather and (wide or ends or recipe.name in BLOCKS), "param_gather: false"),
    ):
        if given:
            beside = f", name = {recipe.name}, first_last_bf16 = {list(recipe.first_last_bf16)}" if key == "param_gather" else ""
            beside += f", precision.params = {precision.params}" if wide and key == "param_gather" else ""
            detail = f"precision.recipe.{key} = true{beside}, and megarun's estimate has no terms for it"
            yield checked.error("MP905", detail, f"precision.recipe.{key}", fix, "host: {name: megatron}")


def _not_of_megarun(checked: Checked) -> Iterator[Diagnostic]:
    """Options of a model that Megatron's byte model has terms for and megarun's ledger has not."""
    for option in given_options(checked.spec.model):
        of_grouped = option.key == "model.attention.output_bias" and isinstance(checked.spec.model.attention, GroupedQueryAttention)
        if option.key not in OF_MEGATRON or of_grouped:
            continue
        detail = f"{option.key} = {option.shown}, and megarun's estimate has no terms for it"
        yield checked.error("MP905", detail, option.key, f"{option.key.rpartition('.')[2]}: {option.neutral}", "host: {name: megatron}")
