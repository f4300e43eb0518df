"""Variants of blocks that came after the pinned plans: kinds of norms."""

from __future__ import annotations

from typing import Any

from random_plans.choices import Draw

NORM_SHARE = 0.05


def add_variants(draw: Draw, model: dict[str, Any]) -> None:
    """Write variants into the sections of a drawn model of megarun."""
    plain = model.get("norm", "rmsnorm") == "rmsnorm" and not model.get("zero_centered_norm")
    if model.get("norm") == "layernorm" or (plain and "mtp" not in model.get("features", {}) and draw.chance(NORM_SHARE)):
        draw.maybe(model, 0.5 if model.get("norm") else 1.0, norm="layernorm_no_bias")
