"""Families and kinds that came after the first five, in their own stream, so that their coming changes no other draw."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from random_plans.choices import Draw, Scope

if TYPE_CHECKING:
    from random_plans.model import Shape

SHARE, SHORT_SHARE, MAMBA1_SHARE = 0.25, 0.1, 0.2


def later_letters(draw: Draw, pattern: str, letters: str, scope: Scope, *, hidden: int, tp: int) -> tuple[str, str]:
    """A pattern and its layers with some letters replaced.

    Args:
        draw: The stream.
        pattern: Pattern without bars.
        letters: One a layer.
        scope: Scope of the draw.
        hidden: Width of the residual stream, which C shards.
        tp: Degree of tensor parallelism.
    """
    if not draw.chance(SHARE):
        return pattern, letters
    later = "GC" if hidden % tp == 0 and scope is Scope.ANY else "G"  # plans of megarun get C from `short_convolutions`
    present = sorted(set(letters))
    table = str.maketrans({letter: draw.choice(later) for letter in draw.sample(present, draw.randint(1, len(present)))})
    return pattern.translate(table), letters.translate(table)


def short_convolutions(draw: Draw, pattern: str, letters: str, scope: Scope, *, hidden: int, tp: int) -> tuple[str, str]:
    """A pattern of megarun and its layers with one letter replaced by C; the arguments are those of `later_letters`."""
    if scope is Scope.ANY or hidden % tp or not draw.chance(SHORT_SHARE):
        return pattern, letters
    table = str.maketrans({draw.choice(sorted(set(letters))): "C"})
    return pattern.translate(table), letters.translate(table)


def linear_attention(draw: Draw, shape: Shape, _: dict[str, int]) -> dict[str, Any]:
    """`model.linear_attention`."""
    if draw.chance(0.5):
        section = {"kind": "kda", "num_heads": shape.tp * draw.wide(1, 12), "head_dim": draw.wide(4, shape.size.head)}
    else:
        key_heads = shape.tp * draw.wide(1, 6)
        section = {
            "kind": "gated_delta",
            "num_key_heads": key_heads,
            "num_value_heads": key_heads * draw.weighted({1: 2, 2: 2, 3: 1}),
            "key_dim": draw.wide(4, shape.size.head),
            "value_dim": draw.wide(4, shape.size.head),
        }
    draw.maybe(section, 0.4, conv_kernel=lambda: draw.choice([2, 3, 5]), negative_eigenvalues=True)
    draw.maybe(section, 0.4, chunk_size=lambda: draw.choice([16, 33]), save_every=lambda: draw.choice([32, 50, 100]))
    return section


def short_convolution(draw: Draw, _shape: Shape, _: dict[str, int]) -> dict[str, Any]:
    """`model.short_convolution`."""
    section: dict[str, Any] = {}
    draw.maybe(section, 0.5, conv_kernel=lambda: draw.choice([2, 4, 5]))
    return section


def mamba1(draw: Draw, shape: Shape) -> dict[str, Any] | None:
    """`model.mamba` of kind mamba1 in place of another; None to leave that."""
    fitting = [expand for expand in (1, 2, 3) if expand * shape.hidden % shape.tp == 0]
    if not fitting or not draw.chance(MAMBA1_SHARE):
        return None
    norms = ["plain", "scaled"] if shape.scope is Scope.ANY else ["scaled"]
    section: dict[str, Any] = {"kind": "mamba1", "expand": draw.choice(fitting)}
    draw.maybe(section, 0.5, state_dim=lambda: draw.wide(2, 32), dt_rank=lambda: draw.wide(2, shape.size.width))
    draw.maybe(section, 0.3, conv_kernel=lambda: draw.choice([2, 3, 5]), conv_bias=False, bias=True)
    draw.maybe(section, 0.5, inner_norm=lambda: draw.choice(norms), save_every=lambda: draw.choice([16, 100]))
    return section


LATER_SHARE = 0.4


def add_later_kinds(draw: Draw, model: dict[str, Any], *, whole: bool) -> None:
    """Kinds that megarun has built last: norms without a scale over Mamba-1's steps, gated squares, kinds of linear attention."""
    mamba = model.get("mamba", {})
    if mamba.get("kind") == "mamba1" and draw.chance(LATER_SHARE):
        mamba["inner_norm"] = draw.choice(["plain", "scaled"])
        draw.maybe(mamba, 0.5, inner_norm_eps=1e-6)
    if model.get("mlp", {}).get("activation") in ("swiglu", "geglu"):
        draw.maybe(model["mlp"], LATER_SHARE / 2, activation="relu2glu")
    if model.get("linear_attention", {}).get("kind") == "kda" and draw.chance(LATER_SHARE):
        given = model["linear_attention"]
        model["linear_attention"] = {"kind": "lightning", "num_heads": given["num_heads"], "head_dim": given["head_dim"]}
        draw.maybe(model["linear_attention"], 0.5, chunk_size=lambda: draw.choice([16, 33]), gated_norm_eps=1e-6)
    elif model.get("linear_attention", {}).get("kind") == "gated_delta" and whole and draw.chance(LATER_SHARE):
        given = model["linear_attention"]
        sizes = {"num_heads": given["num_key_heads"], "key_dim": given["key_dim"], "value_dim": given["value_dim"]}
        model["linear_attention"] = {"kind": "mlstm", **sizes}
        draw.maybe(model["linear_attention"], 0.5, chunk_size=lambda: draw.choice([16, 33]), gate_soft_cap=8.0)
