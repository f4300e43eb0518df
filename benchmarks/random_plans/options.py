"""Options of blocks that imported models have: norms and their places, biases, gates. A draw of their own, after all others.

megarun builds few of them: most plans that have one are noted and not traced, so few have one.
"""

from __future__ import annotations

from typing import Any

from random_plans.choices import Draw
from random_plans.model import Shape

SHARE = 0.06


def add_options(draw: Draw, model: dict[str, Any], shape: Shape, slots: int) -> None:
    """Write options into the sections of a drawn model.

    Args:
        draw: The stream.
        model: The section `model`.
        shape: What it was drawn for.
        slots: Stage slots; layers that share their input are drawn for one, since no cut may part them.
    """
    if not draw.chance(SHARE):
        return
    if "mtp" not in model.get("features", {}):
        draw.maybe(model, 0.4, norm="layernorm")
        if not model.get("tie_embeddings"):
            draw.maybe(model, 0.3, head_bias=True)
        draw.maybe(model, 0.5, norm_placement=lambda: draw.choice(["post", "both"]))
    if slots == 1 and len(shape.letters) > 1 and "norm_placement" not in model:
        draw.maybe(model, 0.5, parallel_layers=lambda: draw.some(list(range(1, len(shape.letters)))) or [1])
    for name, add in _SECTIONS.items():
        if name in model:
            add(draw, model[name], shape)


def _attention(draw: Draw, section: dict[str, Any], _shape: Shape) -> None:
    if section["kind"] == "mla":
        draw.maybe(section, 0.4, bias=True)
        return
    draw.maybe(section, 0.4, output_bias=True, gate=True, sinks=True)
    draw.maybe(section, 0.4, rotary_dim=lambda: 2 * draw.randint(1, section["head_dim"] // 2))
    if draw.chance(0.4):
        section |= {"qk_norm": True, "qk_norm_width": "all_heads"}


def _mamba(draw: Draw, section: dict[str, Any], _shape: Shape) -> None:
    if section["kind"] == "mamba2":
        draw.maybe(section, 0.4, bias=True, gated_norm=False)


def _experts(draw: Draw, section: dict[str, Any], shape: Shape) -> None:
    draw.maybe(section, 0.4, bias=True, router_bias=True, score_correction=True, activation="geglu")
    draw.maybe(section, 0.4, latent_size=lambda: draw.wide(4, shape.size.width))
    if section.get("shared_ffn_hidden_size"):
        draw.maybe(section, 0.4, shared_gate=True)


def _mlp(draw: Draw, section: dict[str, Any], _shape: Shape) -> None:
    draw.maybe(section, 0.4, bias=True, activation="geglu")


_SECTIONS = {"attention": _attention, "mamba": _mamba, "moe": _experts, "mlp": _mlp}
