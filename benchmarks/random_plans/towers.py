"""Random encoders of a drawn model: stated, with their projection and images, or counted."""

from typing import Any

from megaplan.spec.towers import Encoder, Projection, grid_fault
from random_plans.choices import Draw

COUNTED_SHARE, STATED_SHARE = 0.03, 0.12


def add_counted(draw: Draw, model: dict[str, Any]) -> None:
    """Encoders as numbers of parameters, which no runtime builds."""
    if draw.chance(COUNTED_SHARE):
        names = draw.some(["vision", "audio", "projector"]) or ["vision"]
        model["towers"] = {name: {"parameters": draw.randint(1, 10**6), "trained": draw.chance(0.5)} for name in names}


def add_stated(draw: Draw, sections: dict[str, Any]) -> None:
    """An encoder with a projection into the stream of text, if the rows have room for an image."""
    model, batch = sections["model"], sections["batch"]
    if "towers" in model or not draw.chance(STATED_SHARE):
        return
    joined, pooled = draw.choice([1, 2, 4]), draw.choice([1, 1, 4])
    most = batch["seq_length"] // 2
    if not most:
        return
    tokens = draw.choice([count for count in (1, 2, 3, 4, 8) if count <= most])
    patches, width = tokens * joined * pooled, draw.choice([16, 24, 48])
    heads = draw.choice([1, 2, 4])
    encoder: dict[str, Any] = {
        "num_layers": draw.randint(1, 4),
        "hidden_size": width,
        "num_heads": heads,
        "head_dim": draw.choice([8, 12]),
        "ffn_hidden_size": draw.choice([20, 48]),
        "patch_values": draw.choice([12, 27]),
        "patches": patches,
    }
    draw.maybe(encoder, 0.3, num_kv_heads=1)
    for key in ("bias", "output_bias", "mlp_bias", "patch_bias", "last_norm"):
        draw.maybe(encoder, 0.3, **{key: False})
    for key in ("qk_norm", "rotary", "first_norm"):
        draw.maybe(encoder, 0.3, **{key: True})
    draw.maybe(encoder, 0.5, positions=patches)
    draw.maybe(encoder, 0.6, activation=lambda: draw.choice(["swiglu", "geglu", "relu2", "gelu"]))
    draw.maybe(encoder, 0.6, norm=lambda: draw.choice(["rmsnorm", "layernorm", "layernorm_no_bias"]))
    if patches % 2 == 0 and draw.chance(0.3):
        encoder |= {"window_patches": patches // 2, "full_layers": [0] if draw.chance(0.5) else []}
    inner = [draw.choice([20, 36])] * draw.randint(0, 2)
    projection: dict[str, Any] = {"widths": [width * joined, *inner, model["hidden_size"]]}
    for key, value in (("joined_patches", joined), ("pooled_patches", pooled)):
        if value > 1:
            projection[key] = value
    draw.maybe(projection, 0.3, bias=False)
    if draw.chance(0.6):
        projection["norm"] = draw.choice(["rmsnorm", "layernorm", "layernorm_no_bias"])
        draw.maybe(projection, 0.4, norms_joined=True)
    vision, projector = ({"trained": True} if draw.chance(0.5) else {} for _ in range(2))
    model["towers"] = {"vision": vision | {"encoder": encoder}, "projector": projector | {"projection": projection}}
    draw.maybe(model["towers"]["vision"], 0.2, parameters=lambda: draw.randint(1, 10**4))
    if draw.chance(0.4) and most >= 2 * tokens:
        batch["images"] = 2
    draw.maybe(sections.setdefault("recompute", {}), 0.5, towers=lambda: draw.choice(["none", "selective", "full"]))
    grids = [[rows, patches // rows] for rows in range(1, patches + 1) if patches % rows == 0]
    grids = [grid for grid in grids if not grid_fault(Encoder(**encoder, grid=grid), Projection(**projection))]
    if grids and draw.chance(0.8):
        encoder["grid"] = draw.choice(grids)
    tp = sections["mesh"].get("tp", 1)
    if not any(count % tp for count in (heads, encoder.get("num_kv_heads", heads), encoder["ffn_hidden_size"], tokens)):
        draw.maybe(sections["mesh"], 0.6, towers="split")


def add_trained(draw: Draw, sections: dict[str, Any]) -> None:
    """An encoder as `add_stated` draws it, of those that megarun builds."""
    if sections["model"].get("features"):
        return
    add_stated(draw, sections)
    vision = sections["model"].get("towers", {}).get("vision", {})
    vision.pop("parameters", None)
    if "grid" not in vision.get("encoder", {}):
        vision.get("encoder", {}).pop("rotary", None)
