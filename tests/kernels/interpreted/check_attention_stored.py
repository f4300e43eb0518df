"""Attention's backward with stored scores: parts of a batch, windows, documents, caps, heads of any width, against torch in fp64."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kernel_checks import TOLERANCE, no_reference, seeds, shuffled_grid
from op_checks import rms_ratio
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megakernels.ops.attention import choice, facts, reference, sizes
from megakernels.ops.attention.inputs import Attention, Places
from megakernels.ops.attention.stored import backward
from megakernels.ops.attention.stored import facts as stored

SIDE = 32
"""Queries and keys of a stored tile, so that a short row has several."""


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "STORED_TILE", SIDE)
    monkeypatch.setattr(stored, "STORED_SHORTEST", 1)
    monkeypatch.setattr(facts, "STORED_WIDTH", 0)
    monkeypatch.setattr(stored, "SCORE_TILE", {"M": 32, "N": 32})
    monkeypatch.setattr(backward, "SCORE_TILE", {"M": 32, "N": 32})
    monkeypatch.setattr(backward, "STORED_STEP", 32)


@dataclass(frozen=True)
class Drawn:
    """Random operands in 16 bits, and the most bytes that their stored tiles may take."""

    given: Attention
    most_bytes: int


def drawn(seed: int) -> Drawn:
    draw = random.Random(seed)
    batch, positions = draw.choice([1, 2]), draw.choice([33, 40, 64, 70])
    groups, shared = draw.choice([1, 2]), draw.choice([1, 2])
    width, value_width = draw.choice([(16, 16), (24, 40), (12, 7), (48, 32), (40, 40), (33, 64)])
    generator = torch.Generator().manual_seed(seed)
    shapes = (groups * shared, width), (groups, width), (groups, value_width)
    dtype = draw.choice([torch.bfloat16, torch.float16])
    q, k, v = (torch.randn(batch, positions, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    starts = None
    if draw.random() < 0.5:
        begins = torch.rand(batch, positions, generator=generator) < draw.choice([0.03, 0.1])
        begins[:, 0] = True
        starts = torch.where(begins, torch.arange(positions), 0).cummax(1).values.int()
    window = draw.choice([None, None, 7, SIDE, 33, 50, 1000])
    tiles = stored.stored_tiles(1, positions, shared, 1, 2, window)
    assert tiles is not None
    return Drawn(Attention(q, k, v, starts, width**-0.5, window), tiles.num_bytes * draw.choice([1, 2, 100]))


def cotangent(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)


def independent(given: Attention) -> Tensor:
    """Torch's own attention with a mask."""
    heads, shared = given.q.transpose(1, 2), given.q.shape[2] // given.k.shape[2]
    keys, values = (each.transpose(1, 2).repeat_interleave(shared, 1) for each in given[1:3])
    at = torch.arange(heads.shape[2])
    seen = at <= at[:, None]
    if given.window is not None:
        seen = seen & (at > at[:, None] - given.window)
    if given.starts is not None:
        seen = seen & (at >= given.starts[:, None, :, None])
    return scaled_dot_product_attention(heads, keys, values, attn_mask=seen, scale=given.scale).transpose(1, 2)


@seeds(range(5), range(5, 40))
def test_random_shapes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = drawn(seed)
    given = case.given
    monkeypatch.setattr(stored, "STORED_BYTES", case.most_bytes)
    parts = sizes.sizes_of(given).stored
    assert parts is not None
    assert parts.num_bytes <= case.most_bytes
    wide = given._replace(**{name: getattr(given, name).double().requires_grad_() for name in "qkv"})
    expected = independent(wide)
    grad = cotangent(expected).to(given.q.dtype)
    gradients = torch.autograd.grad(expected, wide[:3], grad.double())
    with no_reference(reference):
        out, lse = choice.forward(given)
        found = choice.backward(grad, given, out, lse, [True] * 5)[:3]
        with shuffled_grid(seed):
            again = choice.backward(grad, given, out, lse, [True] * 5)[:3]
    assert all(torch.equal(first, second) for first, second in zip(found, again, strict=True) if first is not None and second is not None)
    ratios = {name: rms_ratio(a, b) for name, a, b in zip("qkv", found, gradients, strict=True)}
    assert {name: ratio for name, ratio in ratios.items() if not ratio <= TOLERANCE[torch.bfloat16]} == {}


def test_the_draw_covers_what_it_should() -> None:
    given = [drawn(seed).given for seed in range(40)]
    assert {(each.starts is None, each.window is None) for each in given} == {(a, b) for a in (True, False) for b in (True, False)}
    assert {each.q.dtype for each in given} == {torch.bfloat16, torch.float16}


@pytest.mark.parametrize("changes", [{}, {"window": 40}, {"cap": 2.0}, {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}], ids=str)
def test_gradients_equal_those_of_weights_made_twice(changes: dict[str, Any]) -> None:
    """Gradients agree within the rounding of 16 bits, also with sinks and caps."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, heads, 24).bfloat16() for heads in (4, 2, 2))
    given = Attention(q, k, v, None, 0.4, None)._replace(**changes)
    out, lse = choice.forward(given)
    grad = cotangent(out)
    found = choice.backward(grad, given, out, lse, [True] * 5)
    expected = choice.kernel_backward(grad, given, out, lse, Places())
    for first, second in zip(found, expected, strict=True):
        assert (first is None) == (second is None)
        assert first is None or second is None or rms_ratio(first, second) < TOLERANCE[torch.bfloat16]


def test_operands_that_are_views_have_the_bits_of_dense_ones() -> None:
    torch.manual_seed(0)
    rows = torch.randn(1, 40, 8, 24).bfloat16()
    views = Attention(*rows.split((4, 2, 2), 2), None, 0.3, None)
    dense = Attention(*(each.contiguous() for each in views[:3]), *views[3:])
    out, lse = choice.forward(dense)
    grad = cotangent(out)
    wider = torch.full((1, 40, 4, 30), float("nan")).bfloat16()
    wider[..., 3:27] = grad
    found, expected = (choice.backward(g, each, out, lse, [True] * 5)[:3] for g, each in ((wider[..., 3:27], views), (grad, dense)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True) if a is not None and b is not None)


def test_what_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.empty(1, 64, 4, 16, dtype=torch.bfloat16), torch.empty(1, 64, 2, 16, dtype=torch.bfloat16)
    given = Attention(q, k, k, None, 1.0, None)
    classes, relations = torch.zeros(1, 64, dtype=torch.int32), torch.zeros(3, 4)
    assert sizes.sizes_of(given).stored is not None
    for other in (
        given._replace(q=q.float(), k=k.float(), v=k.float()),
        given._replace(q=q[:, :32]),
        given._replace(classes=classes, relations=relations),
        given._replace(q=q[:, :0], k=k[:, :0], v=k[:, :0]),
    ):
        assert sizes.sizes_of(other).stored is None
    monkeypatch.setattr(stored, "STORED_SHORTEST", 3)
    assert sizes.sizes_of(given).stored is None
    monkeypatch.setattr(stored, "STORED_SHORTEST", 2)
    monkeypatch.setattr(facts, "STORED_WIDTH", 16)
    assert sizes.sizes_of(given).stored is None
    assert sizes.sizes_of(given._replace(cap=5.0)).stored is not None


@pytest.mark.parametrize("most", [1, 2, 3, 5, 6, 11, 12, 100])
def test_parts_take_every_head_within_their_bytes(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, groups, each = 4, 3, stored.stored_tiles(1, 100, 2, 1, 2, None)
    assert each is not None
    monkeypatch.setattr(stored, "STORED_BYTES", most * each.num_bytes)
    parts = stored.stored_tiles(batch, 100, 2 * groups, groups, 2, None)
    assert parts is not None
    assert parts.num_bytes == parts.sequences * parts.groups * each.num_bytes <= stored.STORED_BYTES
    assert parts.groups == groups or parts.sequences == 1
    monkeypatch.setattr(stored, "STORED_BYTES", each.num_bytes - 1)
    assert stored.stored_tiles(batch, 100, 2 * groups, groups, 2, None) is None
