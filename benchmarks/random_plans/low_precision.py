"""`precision.recipe` of a random plan, where device, widths and recompute allow one."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from megaplan.devices import load_device
from megaplan.low_precision import GENERATIONS, Recipe
from megaplan.spec.host_rules import BLOCKS
from megaplan.spec.low_precision_rules import SCALED_TWICE, widths
from megaplan.spec.megatron_limits import MEGATRON_RECIPES
from megaplan.spec.models import Spec
from random_plans.choices import Draw

SHARE = 0.9


def add_recipe(draw: Draw, sections: dict[str, Any]) -> None:
    """Give `precision` a recipe now and then; a spec that no recipe fits stays as it is."""
    megatron = sections.get("host", {}).get("name") == "megatron"
    names = [name for name in sorted(GENERATIONS) if not megatron or _runs(name, sections)]
    if not names or not draw.chance(SHARE):
        return
    try:
        spec = Spec.model_validate(sections)
    except ValidationError:
        return
    device = sections.get("device", {}).get("name")
    generation = load_device(device or "h200").generation
    while names:
        name = names.pop(draw.randint(0, len(names) - 1))
        own = generation if generation in GENERATIONS[name] else "" if device else "blackwell"
        if not own or any(width % Recipe(name, own).multiple for _, _, width in widths(spec)):
            continue
        sections.setdefault("precision", {})["recipe"] = _recipe(draw, name, spec)
        if own == "blackwell":
            sections.setdefault("device", {}).setdefault("name", "b200")
        return


def _recipe(draw: Draw, name: str, spec: Spec) -> dict[str, Any]:
    """Its keys, as far as the host has terms for them."""
    recipe: dict[str, Any] = {"name": name, "param_gather": draw.chance(0.5)}
    step = 2 if spec.host.model == "gpt" else 1
    if name != "fp8_delayed" and spec.model.num_layers >= 2 * step:
        draw.maybe(recipe, 0.3, first_last_bf16=[step, step])
    if name != "nvfp4":
        draw.maybe(recipe, 0.3, format=lambda: draw.choice(["hybrid", "e4m3"]))
    if name == "fp8_delayed":
        draw.maybe(recipe, 0.4, amax_history=lambda: draw.choice([1, 16]))
    if spec.host.name == "megatron":
        draw.maybe(recipe, 0.3, attention=True)
        draw.maybe(recipe, 0.5, prediction=False)
        if name == "mxfp8":
            draw.maybe(recipe, 0.8, head=True)
        return recipe
    letters = sorted(set(spec.model.pattern.replace("|", "").upper()))
    draw.maybe(recipe, 0.5, families=lambda: draw.sample(letters, draw.randint(1, len(letters))))
    recipe["param_gather"] &= name not in BLOCKS and "first_last_bf16" not in recipe
    return recipe


def _runs(name: str, sections: dict[str, Any]) -> bool:
    """Whether Megatron-Core takes the recipe here."""
    host = sections["host"]
    twice = name == "fp8_delayed" and set(SCALED_TWICE) & set(host.get("recompute_modules", ()))
    plain = host.get("transformer_impl") != "local" and not sections.get("sharding", {}).get("reshard_after_forward")
    return name in MEGATRON_RECIPES and not twice and plain
