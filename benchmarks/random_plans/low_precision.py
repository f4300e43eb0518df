"""`precision.recipe` of a random plan, where device, widths and recompute allow one."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from pydantic import ValidationError

from megaplan.devices import load_device
from megaplan.dtypes import DType
from megaplan.hosts.megatron.state import MEGATRON_RECIPES
from megaplan.low_precision import EMULATED, FORMATS, GENERATIONS, Recipe
from megaplan.spec.low_precision_rules import SCALED_TWICE, widths
from megaplan.spec.models import LatentAttention, Spec
from random_plans.choices import Draw, Scope

SHARE = 0.9
ROUNDED = 0.5
TRAINED_SHARE = 0.3
COVERED = 0.5
BLOCKED = 0.4
GATHERED = 0.5
BY_PAST, HISTORIES, MARGINS = 0.4, (1, 2, 16, 1024), (0, 0, 1, 3)
BANKS, ATTENDS, DELAYED = "E", "fp8_current", "fp8_delayed"
BY_PRESENT = ("fp8_current", "fp8_rowwise")
"""Recipes in eight bits whose scales follow from what they scale, in whole matrices or rows."""
WIDTHS = (
    "hidden_size",
    "ffn_hidden_size",
    "shared_ffn_hidden_size",
    "latent_size",
    "q_lora_rank",
    "kv_lora_rank",
    "head_dim",
    "v_head_dim",
)


def add_low_precision(stream: Callable[[str], Draw], sections: dict[str, Any], scope: Scope) -> None:
    """Give `precision` a recipe with some probability: any that fits, or one that megarun trains."""
    if scope is Scope.ANY:
        add_recipe(stream("low precision"), sections)
        return
    add_trained_recipe(stream("trained low precision"), sections)
    add_banks(stream("banks in low precision"), sections)


def add_recipe(draw: Draw, sections: dict[str, Any]) -> None:
    """Give `precision` a recipe with some probability; a spec that no recipe fits stays as it is."""
    host = sections.get("host", {})
    megatron = host.get("name") == "megatron"
    if not draw.chance(SHARE if megatron else SHARE / 2):
        return
    if megatron and "mamba" not in sections["model"] and draw.chance(ROUNDED):
        _round(sections["model"], 32 * sections.get("mesh", {}).get("tp", 1))
    try:
        spec = Spec.model_validate(sections)
    except ValidationError:
        return
    own = sections.get("device", {}).get("name")
    fitting = [
        (name, generation)
        for name in sorted(GENERATIONS)
        if not megatron or _runs(name, sections)
        for generation in [load_device(own or "h200").generation if own or "hopper" in GENERATIONS[name] else "blackwell"]
        if generation in GENERATIONS[name] and not any(width % Recipe(name, generation).multiple for _, _, width in widths(spec))
    ]
    if not fitting:
        return
    name, generation = draw.choice(fitting)
    sections.setdefault("precision", {})["recipe"] = _recipe(draw, name, spec)
    if generation == "blackwell":
        sections.setdefault("device", {}).setdefault("name", "b200")


def add_trained_recipe(draw: Draw, sections: dict[str, Any]) -> None:
    """Give `precision` a recipe that megarun trains with some probability, with the keys that it trains together with it."""
    model, mesh = sections["model"], sections.get("mesh", {})
    letters = sorted({*model["pattern"].replace("|", "").upper()} - {BANKS})
    if not draw.chance(TRAINED_SHARE) or not letters:
        return
    changed = deepcopy(sections)
    if "mamba" not in model:
        _round(changed["model"], 16 * mesh.get("tp", 1))
    try:
        spec = Spec.model_validate(changed)
    except ValidationError:
        return
    generation = load_device(sections.get("device", {}).get("name") or "h200").generation
    names = [name for name in BY_PRESENT if generation in GENERATIONS[name]]
    if not names or any(width % 16 for _, _, width in widths(spec)):
        return
    recipe: dict[str, Any] = {"name": draw.choice(names)}
    if BANKS in model["pattern"].upper():
        recipe["families"] = letters
    else:
        draw.maybe(recipe, 0.5, families=lambda: draw.sample(letters, draw.randint(1, len(letters))))
    if spec.model.num_layers > 1:
        draw.maybe(recipe, 0.3, first_last_bf16=[1, 0])
    draw.maybe(recipe, 0.3, format=lambda: draw.choice(["hybrid", "e4m3"]))
    draw.maybe(recipe, 0.3, head=True)
    if recipe["name"] == ATTENDS and _attends_plainly(spec):
        draw.maybe(recipe, 0.5, attention=True)
    sections["model"] = changed["model"]
    sections.setdefault("precision", {})["recipe"] = recipe


def add_banks(draw: Draw, sections: dict[str, Any]) -> None:
    """Let a recipe that megarun trains cover banks of experts in half of the plans that have both."""
    recipe = sections.get("precision", {}).get("recipe")
    if recipe is None or BANKS not in sections["model"]["pattern"].upper() or not draw.chance(COVERED):
        return
    families = draw.choice([None, [BANKS], [*recipe["families"], BANKS]])
    sections["precision"]["recipe"] = {key: value for key, value in recipe.items() if key != "families"}
    if families is not None:
        sections["precision"]["recipe"]["families"] = families


def add_blocks(draw: Draw, sections: dict[str, Any]) -> None:
    """Give a recipe that megarun trains scales of blocks, and the plan a device that has them."""
    recipe = sections.get("precision", {}).get("recipe")
    if recipe is None or not draw.chance(BLOCKED):
        return
    try:
        spec = Spec.model_validate(sections)
    except ValidationError:
        return
    fitting = [name for name in sorted(EMULATED) if not any(width % Recipe(name, "blackwell").multiple for _, _, width in widths(spec))]
    if not fitting:
        return
    recipe["name"] = draw.choice(fitting)
    recipe.pop("attention", None)
    if recipe["name"] not in FORMATS:
        recipe.pop("format", None)
    sections.setdefault("device", {})["name"] = "b200"


def add_delayed(draw: Draw, sections: dict[str, Any]) -> None:
    """Let recipes in eight bits scale by past steps in some of the plans that have one."""
    recipe = sections.get("precision", {}).get("recipe")
    if recipe is None or recipe["name"] in EMULATED or not draw.chance(BY_PAST):
        return
    generation = load_device(sections.get("device", {}).get("name") or "h200").generation
    if generation not in GENERATIONS[DELAYED]:
        return
    recipe |= {"name": DELAYED, "amax_history": draw.choice(HISTORIES), "amax_compute": draw.choice(["max", "most_recent"])}
    recipe["margin"] = draw.choice(MARGINS)
    recipe.pop("attention", None)


def add_gathers(draw: Draw, sections: dict[str, Any]) -> None:
    """Let a recipe gather its weights packed in half of the plans that have one."""
    recipe = sections.get("precision", {}).get("recipe")
    if recipe is not None:
        whole = sections.get("sharding", {}).get("wrap") == "stage"
        recipe["param_gather"] = not whole and draw.chance(GATHERED)


def _round(section: dict[str, Any], multiple: int) -> None:
    """Round a model's widths up to what scales of blocks divide."""
    for key, value in section.items():
        if isinstance(value, dict) and key != "towers":
            _round(value, multiple)
        elif key in WIDTHS and isinstance(value, int):
            section[key] = -(-value // multiple) * multiple
    projection = section.get("towers", {}).get("projector", {}).get("projection")
    if projection is not None:  # the random stream of the formats, which may have more choices now
        projection["widths"] = [*projection["widths"][:-1], section["hidden_size"]]


def _recipe(draw: Draw, name: str, spec: Spec) -> dict[str, Any]:
    """Keys of a recipe that the host has terms for."""
    recipe: dict[str, Any] = {"name": name, "param_gather": draw.chance(0.5)}
    step = 2 if spec.host.model == "gpt" else 1
    if name != DELAYED and spec.model.num_layers >= 2 * step:
        draw.maybe(recipe, 0.3, first_last_bf16=[step, step])
    if name != "nvfp4":
        draw.maybe(recipe, 0.3, format=lambda: draw.choice(["hybrid", "e4m3"]))
    if name == DELAYED:
        draw.maybe(recipe, 0.4, amax_history=lambda: draw.choice([1, 16]))
    if spec.host.name == "megatron":
        draw.maybe(recipe, 0.3, attention=True)
        draw.maybe(recipe, 0.7, prediction=False)
        if name == "mxfp8":
            draw.maybe(recipe, 0.8, head=True)
        host = spec.host
        recipe["param_gather"] &= host.distributed_optimizer and not (name == "nvfp4" and host.precision_aware_optimizer)
        return recipe
    letters = sorted(set(spec.model.pattern.replace("|", "").upper()))
    draw.maybe(recipe, 0.5, families=lambda: draw.sample(letters, draw.randint(1, len(letters))))
    wide = spec.precision.params is DType.FP32 or bool(spec.precision.families)
    recipe["param_gather"] &= name in BY_PRESENT and "first_last_bf16" not in recipe and not wide
    if name != DELAYED:  # as drawn for pinned plans
        draw.maybe(recipe, 0.3, head=True)
    if name == ATTENDS and _attends_plainly(spec):
        draw.maybe(recipe, 0.3, attention=True)
    return recipe


def _attends_plainly(spec: Spec) -> bool:
    """True if megarun's core in eight bits takes the attention."""
    attention = spec.model.attention
    if attention is None or attention.sinks or spec.mesh.cp > 1 or spec.model.features.relation_bias is not None:
        return False
    if isinstance(attention, LatentAttention):
        return attention.indexer is None
    return not (attention.block_indexer or attention.compressors or attention.shared_keys)


def _runs(name: str, sections: dict[str, Any]) -> bool:
    """True if Megatron-Core takes the recipe here."""
    host = sections["host"]
    twice = name == DELAYED and set(SCALED_TWICE) & set(host.get("recompute_modules", ()))
    plain = host.get("transformer_impl") != "local" and not sections.get("sharding", {}).get("reshard_after_forward")
    return name in MEGATRON_RECIPES and not twice and plain
