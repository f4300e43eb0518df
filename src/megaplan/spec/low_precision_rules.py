"""Rules of `precision.recipe`: device support, dimensions that blocks of a scale divide, and recompute that would scale twice."""

from collections.abc import Iterator

from megaplan.devices import device_names
from megaplan.errors import Diagnostic
from megaplan.low_precision import GENERATIONS, Recipe
from megaplan.spec.context import Checked
from megaplan.spec.host import device_of
from megaplan.spec.low_precision import LowPrecision
from megaplan.spec.models import GroupedQueryAttention, LatentAttention, Spec
from megaplan.wording import series

SCALED_TWICE = ("moe_act", "layernorm")
"""Modules whose recompute quantises a product's input again, which delayed scaling would count into its maxima twice."""


def low_precision_rules(checked: Checked) -> Iterator[Diagnostic]:
    """Yields MP507, MP508, MP721, MP723 and MP724."""
    recipe = checked.spec.precision.recipe
    if recipe is None:
        return
    if checked.spec.device.name in device_names():
        yield from _device(checked, recipe)
    yield from _dimensions(checked, recipe)
    yield from _layers(checked, recipe)
    yield from _delayed(checked, recipe)


def _device(checked: Checked, recipe: LowPrecision) -> Iterator[Diagnostic]:
    generation, wanted = device_of(checked.spec.device).generation, GENERATIONS[recipe.name]
    if generation not in wanted:
        detail = f"precision.recipe.name = {recipe.name} multiplies on {series(list(wanted), 'and')}, and {checked.spec.device.name}"
        others = [name for name, generations in GENERATIONS.items() if generation in generations]
        hints = (f"name: {others[0]}",) if others else ("recipe: null",)
        yield checked.error("MP507", f"{detail} is of generation {generation}", "precision.recipe.name", *hints)


def _dimensions(checked: Checked, recipe: LowPrecision) -> Iterator[Diagnostic]:
    multiple = Recipe(recipe.name, "").multiple
    for key, said, size in widths(checked.spec):
        if size % multiple:
            detail = f"{said} = {size}, a width of linears that {recipe.name} scales in multiples of {multiple}, and {size} % {multiple}"
            yield checked.error("MP508", f"{detail} = {size % multiple}", key, f"use a multiple of {multiple}, or recipe: null")


def widths(spec: Spec) -> Iterator[tuple[str, str, int]]:
    """Widths of a rank's linears, each as key, equation and value."""
    model, tp, etp = spec.model, spec.mesh.tp, spec.mesh.etp
    yield "model.hidden_size", "model.hidden_size", model.hidden_size
    attention = model.attention
    if isinstance(attention, GroupedQueryAttention):
        for place in (None, *range(len(attention.layer_heads))):
            key = "attention" if place is None else f"attention.layer_heads[{place}]"
            own = attention.with_heads(place)
            groups = max(1, own.num_kv_heads // tp)
            yield "model.attention.num_heads", f"{key}.num_heads · head_dim / tp", own.num_heads * own.head_dim // tp
            yield "model.attention.num_kv_heads", f"{key}.num_kv_heads · head_dim / tp", groups * own.head_dim
            if own.value_width != own.head_dim:
                yield "model.attention.value_head_dim", f"{key}.num_kv_heads · value_head_dim / tp", groups * own.value_width
    elif isinstance(attention, LatentAttention):
        for place in (None, *range(len(attention.layer_latents))):
            key = "attention" if place is None else f"attention.layer_latents[{place}]"
            latents = attention.with_heads(place)
            yield "model.attention.kv_lora_rank", f"{key}.kv_lora_rank", latents.kv_lora_rank
            if latents.q_lora_rank is not None:
                yield "model.attention.q_lora_rank", f"{key}.q_lora_rank", latents.q_lora_rank
            yield "model.attention.num_heads", f"{key}.num_heads · v_head_dim / tp", latents.num_heads * latents.v_head_dim // tp
    if model.mlp is not None:
        yield "model.mlp.ffn_hidden_size", "mlp.ffn_hidden_size / tp", model.mlp.ffn_hidden_size // tp
    if model.moe is not None:
        yield "model.moe.ffn_hidden_size", "moe.ffn_hidden_size / etp", model.moe.ffn_hidden_size // etp
        if model.moe.latent_size is not None:
            yield "model.moe.latent_size", "moe.latent_size", model.moe.latent_size


def _layers(checked: Checked, recipe: LowPrecision) -> Iterator[Diagnostic]:
    for letter in recipe.families or ():
        if checked.pattern is not None and not checked.has(letter):
            present = series(list(checked.pattern.counts()), "and")
            detail = f"precision.recipe.families has {letter}, and the pattern's letters are {present}"
            yield checked.error("MP721", detail, "precision.recipe.families", f"take {letter} out")
    first, last = recipe.first_last_bf16
    if checked.letters is not None and first + last > len(checked.letters):
        detail = f"precision.recipe.first_last_bf16 = [{first}, {last}], and the model has {len(checked.letters)} layers"
        yield checked.error("MP723", detail, "precision.recipe.first_last_bf16", "first_last_bf16: [1, 1]")


def _delayed(checked: Checked, recipe: LowPrecision) -> Iterator[Diagnostic]:
    if recipe.name != "fp8_delayed":
        return
    twice = [module for module in SCALED_TWICE if module in checked.spec.host.recompute_modules]
    if twice:
        detail = f"precision.recipe.name = fp8_delayed, host.recompute_modules has {series(twice, 'and')}"
        yield checked.error("MP724", detail, "host.recompute_modules", "name: fp8_current", f"remove {', '.join(twice)}")
    if any(recipe.first_last_bf16) and not checked.spec.host.kind.trained:
        detail = (
            "precision.recipe.name = fp8_delayed, precision.recipe.first_last_bf16 is given: its maxima are reduced for all layers at once"
        )
        yield checked.error("MP724", detail, "precision.recipe.first_last_bf16", "name: fp8_current", "first_last_bf16: [0, 0]")
