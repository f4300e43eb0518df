"""The encoder of images and its projection against their definitions, and what a frozen part keeps."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, rms_norm, scaled_dot_product_attention

from megakernels import gelu
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Init
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec
from megarun.engine.build import build_stage, differences, materialise
from megarun.engine.initialise import initialise
from megarun.model.stage import Stage
from megarun.model.vision import merged, patch_places

pytestmark = pytest.mark.runtime
WIDTH, PATCHES, HEADS, WIDE = 24, 8, 4, 6
ENCODER: dict[str, Any] = {
    **{"num_layers": 2, "hidden_size": WIDTH, "num_heads": HEADS, "num_kv_heads": 2, "head_dim": WIDE, "ffn_hidden_size": 20},
    **{"patch_values": 5, "patches": PATCHES, "positions": 9, "first_norm": True},
}
PROJECTION = {"widths": [48, 36, 32], "joined_patches": 2, "norm": "layernorm"}
LONG = {"batch.seq_length": 32}


def spec_of(spec_with: Any, *, encoder: Any = None, projection: Any = None, trained: Any = (True, True), **more: Any) -> Spec:
    parts = {"encoder": ENCODER | (encoder or {})}, {"projection": PROJECTION | (projection or {})}
    towers = {name: {"trained": is_trained} | part for name, is_trained, part in zip(("vision", "projector"), trained, parts, strict=True)}
    return Spec.model_validate(spec_with({"model.pattern": "AD", "model.num_layers": 2, "model.towers": towers, **more}))


def stage_of(spec: Spec) -> Stage:
    inventory = build_inventory(spec)
    (slot,) = build_layout(spec, inventory, [(0, 2)]).slots
    stage = build_stage(spec, inventory, slot)
    assert differences(stage, inventory, slot, spec) == []
    materialise(stage, torch.device("cpu"))
    initialise(stage, inventory, 3)
    return stage.double()


def turned(heads: Tensor) -> Tensor:
    """Heads [images, P, H, 8] of patches of the grid 2 by 4, whose tokens are two patches of a row: row and column turn two pairs each."""
    places = torch.tensor([(row, column) for row in range(2) for column in range(4)], dtype=torch.float64)
    angles = torch.cat([places[:, :1] * torch.tensor([1, 1e-2]), places[:, 1:] * torch.tensor([1, 1e-2])], 1)[:, None]
    first, second = heads.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def exact(stage: Stage, x: Tensor, *, window: int | None, gated: bool, wide: int = WIDE) -> Tensor:
    """The definition of an encoder with LayerNorm, or of one with RMSNorm, query and key norms and swiglu; heads of 8 are rotated."""
    named, eps = dict(stage.vision.named_parameters()), 1e-5

    def norm(x: Tensor, name: str) -> Tensor:
        if gated:
            return rms_norm(x, (WIDTH,), named[f"{name}.weight"], eps)
        return layer_norm(x, (WIDTH,), named[f"{name}.weight"], named[f"{name}.bias"], eps)

    def product(x: Tensor, name: str) -> Tensor:
        return linear(x, named[f"{name}.weight"], named[f"{name}.bias"])

    x = product(x, "patches.proj") + named["patches.positions"][:PATCHES]
    x = norm(x, "first_norm")
    for index in range(2):
        place, own = f"layers.{index}.attention", PATCHES if window is None or index == 1 else window
        normed = norm(x, f"{place}.norm")
        q, k, v = (product(normed, f"{place}.{each}_proj").unflatten(-1, (-1, wide)) for each in "qkv")
        if wide == 8:
            q, k = turned(q), turned(k)
        if gated:
            q, k = (rms_norm(each, (WIDE,), named[f"{place}.{name}_norm.weight"], eps) for each, name in ((q, "q"), (k, "k")))
        q, k, v = (each.unflatten(1, (-1, own)).transpose(2, 3) for each in (q, k, v))
        made = scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(2, 3).flatten(1, 2)
        x = x + product(made.flatten(2), f"{place}.o_proj")
        place, normed = f"layers.{index}.mlp", norm(x, f"layers.{index}.mlp.norm")
        up = product(normed, f"{place}.up_proj")
        bent = torch.nn.functional.silu(product(normed, f"{place}.gate_proj")) * up if gated else gelu(up)
        x = x + product(bent, f"{place}.down_proj")
    return norm(x, "last_norm")


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_an_encoder_is_its_definition(spec_with: Any, gated: bool, window: int | None) -> None:
    """Values, and the gradient of every parameter, also with windows of patches in the first layer."""
    more: dict[str, Any] = {} if window is None else {"window_patches": window, "full_layers": [1]}
    more |= {"norm": "rmsnorm", "qk_norm": True, "activation": "swiglu"} if gated else {}
    stage = stage_of(spec_of(spec_with, encoder=more))
    torch.manual_seed(0)
    patches = torch.randn(3, PATCHES, 5, dtype=torch.float64)
    found, expected = stage.vision(patches), exact(stage, patches, window=window, gated=gated)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    cotangent, parameters = torch.randn_like(found), list(stage.vision.parameters())
    pairs = zip(*(torch.autograd.grad(each, parameters, cotangent) for each in (found, expected)), strict=True)
    for gradient, value in pairs:
        torch.testing.assert_close(gradient, value, rtol=1e-9, atol=1e-11)


def test_rotary_embedding_turns_by_row_and_column(spec_with: Any) -> None:
    stage = stage_of(spec_of(spec_with, encoder={"rotary": True, "grid": [2, 4], "head_dim": 8}))
    stage.vision.rope_cos, stage.vision.rope_sin = (each.double() for each in stage.vision.rotary[:2])
    patches = torch.randn(3, PATCHES, 5, dtype=torch.float64)
    torch.testing.assert_close(stage.vision(patches), exact(stage, patches, window=None, gated=False, wide=8), rtol=1e-6, atol=1e-7)


def test_patches_are_in_the_order_of_windows_and_their_tokens(spec_with: Any) -> None:
    """Windows of 4 by 4 patches in rows, in each tokens of 2 by 2 patches in rows."""
    more = {"rotary": True, "grid": [4, 8], "head_dim": 8, "patches": 32, "positions": None, "window_patches": 16}
    encoder = spec_of(spec_with, encoder=more, projection={"widths": [96, 32], "joined_patches": 4}, **LONG).model.towers.stated[0]
    places = patch_places(encoder, 4)
    assert places[:8] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert places[8] == (2, 0)
    assert {column for _, column in places[:16]} == {0, 1, 2, 3}
    assert sorted(places) == [(row, column) for row in range(4) for column in range(8)]


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({}, WIDTH),
        ({"norms_joined": True}, 48),
        ({"widths": [WIDTH, 32], "joined_patches": 1, "pooled_patches": 4, "norm": "rmsnorm", "bias": False}, WIDTH),
        ({"widths": [48, 32], "norm": None}, 0),
    ],
)
def test_a_projection_is_its_definition(spec_with: Any, changes: dict[str, Any], width: int) -> None:
    stage = stage_of(spec_of(spec_with, projection=changes))
    projection = PROJECTION | changes
    x = torch.randn(3, PATCHES, WIDTH, dtype=torch.float64)
    rows, pooled = x.view(3, -1, projection.get("pooled_patches", 1), WIDTH).mean(2), projection["norm"]
    rows = rows.reshape(-1, width or WIDTH)
    weights = dict(stage.projector.named_parameters())
    if pooled == "layernorm":
        rows = layer_norm(rows, (width,), weights["norm.weight"], weights["norm.bias"], 1e-5)
    elif pooled is not None:
        rows = rms_norm(rows, (width,), weights["norm.weight"], 1e-5)
    rows = rows.reshape(-1, projection["widths"][0])
    for index in range(len(projection["widths"]) - 1):
        rows = linear(gelu(rows) if index else rows, weights[f"linears.{index}.weight"], weights.get(f"linears.{index}.bias"))
    torch.testing.assert_close(stage.projector(x), rows, rtol=1e-10, atol=1e-12)


def test_rows_take_places_of_the_stream() -> None:
    """The stream's gradient is zero in these places; theirs is the rows'."""
    stream, rows = torch.randn(2, 4, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    places = torch.tensor([5, 0, 6])
    out = merged(stream, rows, places)
    expected = stream.detach().flatten(0, 1).clone()
    expected[places] = rows.detach()
    assert torch.equal(out.flatten(0, 1), expected)
    cotangent = torch.randn_like(out)
    of_stream, of_rows = torch.autograd.grad(out, (stream, rows), cotangent)
    assert torch.equal(of_rows, cotangent.flatten(0, 1)[places])
    left = torch.ones(8, 1).index_fill(0, places, 0)
    assert torch.equal(of_stream.flatten(0, 1), cotangent.flatten(0, 1) * left)


def test_rows_of_other_ranks_go_nowhere() -> None:
    """Rows whose place is behind the stream have the gradient zero, and the stream keeps what it has."""
    stream, rows = torch.randn(2, 4, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    places = torch.tensor([8, 5, 8, 6])
    out = merged(stream, rows, places, spare=True)
    cotangent = torch.randn_like(out)
    assert torch.equal(out, merged(stream, rows[1::2], places[1::2]))
    found = torch.autograd.grad(out, (stream, rows), cotangent)
    expected = torch.autograd.grad(merged(stream, rows[1::2], places[1::2]), (stream, rows), cotangent)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("trained", [(True, True), (False, True), (True, False), (False, False)])
def test_only_trained_parts_have_gradients(spec_with: Any, trained: tuple[bool, bool]) -> None:
    """A frozen encoder has no graph; a frozen projection behind a trained encoder passes gradients on."""
    spec = spec_of(spec_with, trained=trained)
    stage = stage_of(spec)
    patches, places = torch.randn(2, PATCHES, 5, dtype=torch.float64), torch.arange(8) * 3
    features = stage.vision(patches)
    assert features.requires_grad is trained[0]
    assert stage.projector(features).requires_grad is any(trained)
    out = stage(torch.zeros(2, 24, dtype=torch.int64), patches=patches, places=places)
    out.square().sum().backward()
    for part, is_trained in zip((stage.vision, stage.projector), trained, strict=True):
        assert {each.requires_grad for each in part.parameters()} == {is_trained}
        reached = {each.grad is not None and bool(each.grad.abs().sum() > 0) for each in part.parameters() if each.dim() > 1}
        assert reached == {is_trained}


def test_norms_around_one_are_those_of_text(spec_with: Any) -> None:
    """The encoder's scales start at 1, and are not added to 1, whatever `zero_centered_norm` is."""
    spec = spec_of(spec_with, encoder={"norm": "rmsnorm"}, **{"model.zero_centered_norm": True})
    stage = stage_of(spec)
    tensors = dict(build_inventory(spec).tensors())
    assert tensors["vision.layers.0.mlp.norm.weight"].init is Init.ONES
    assert tensors["layers.0.norm.weight"].init is Init.ZEROS
    assert stage.vision.layers["0"].mlp.norm.offset == 0.0
    assert stage.layers["0"].norm.offset == 1.0
