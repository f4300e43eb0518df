"""Rules of host megarun: options and recipes for which its ledger has no terms."""

from __future__ import annotations

from collections.abc import Iterator

from megaplan.dtypes import DType
from megaplan.errors import Diagnostic
from megaplan.spec.context import Checked
from megaplan.spec.models import GroupedQueryAttention
from megaplan.spec.settings import given_options

BLOCKS = ("mxfp8", "nvfp4")
"""Recipes whose gathered weights do not have one byte per element."""
OF_MEGATRON = frozenset({
    "model.attention.output_bias", "model.attention.latent_norm",
})  # fmt: skip
"""Options of a model for which only the byte model of Megatron-Core has terms; the output's bias is that of latent attention."""


def megarun_rules(checked: Checked) -> Iterator[Diagnostic]:
    """Yields MP905."""
    yield from _options(checked)
    yield from _recipe(checked)


def _recipe(checked: Checked) -> Iterator[Diagnostic]:
    """Refuse keys of a low-precision recipe for which megarun's ledger has no terms."""
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
            context = f", name = {recipe.name}, first_last_bf16 = {list(recipe.first_last_bf16)}" if key == "param_gather" else ""
            context += f", precision.params = {precision.params}" if wide and key == "param_gather" else ""
            detail = f"precision.recipe.{key} = true{context}, and megarun's estimate has no terms for it"
            yield checked.error("MP905", detail, f"precision.recipe.{key}", fix, "host: {name: megatron}")


def _options(checked: Checked) -> Iterator[Diagnostic]:
    """Refuse options of a model for which Megatron's byte model has terms and megarun's ledger has none."""
    for option in given_options(checked.spec.model):
        of_grouped = option.key == "model.attention.output_bias" and isinstance(checked.spec.model.attention, GroupedQueryAttention)
        if option.key not in OF_MEGATRON or of_grouped:
            continue
        detail = f"{option.key} = {option.shown}, and megarun's estimate has no terms for it"
        yield checked.error("MP905", detail, option.key, f"{option.key.rpartition('.')[2]}: {option.neutral}", "host: {name: megatron}")
