"""The attention kernels: tiles at the diagonal, at a window's edge and at the ends of documents; shared key heads; pieces of a sequence."""

import random
from typing import Any

import pytest
import torch
from kernel_checks import DTYPES, TOLERANCE, check_values, contract_tests, no_reference, seeds, shuffled_grid, strided
from op_cases import CASES
from op_checks import rms_ratio
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megakernels import attention, attention_pieces, attention_pieces_backward
from megakernels.ops.attention import choice, facts, kernel, reference
from megakernels.ops.attention.inputs import Attention, Places, places_of
from megakernels.ops.attention.tiles import facts as tiles_facts

BY_NAME = {case.name: case for case in CASES if case.name.startswith("attention")}
EACH = pytest.mark.parametrize("name", BY_NAME)
EACH_PACKED = pytest.mark.parametrize(
    "name", [name if name.endswith("packed") else pytest.param(name, marks=pytest.mark.slow) for name in BY_NAME]
)
SMALL = 32
"""Queries and keys of a tile, so that a short row has several: the shipped ones have up to 128."""


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, tiles in tiles_facts.TILES.items():
        monkeypatch.setitem(tiles_facts.TILES, name, {key: tile._replace(queries=SMALL, keys=SMALL) for key, tile in tiles.items()})


@EACH_PACKED
@pytest.mark.usefixtures("small_tiles")
def test_values(name: str) -> None:
    check_values(BY_NAME[name], 37, torch.float32, reference, views=True)


@pytest.mark.slow
@EACH
@DTYPES
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("num_positions", [1, 32, 65, 200])
def test_values_of_more_lengths(name: str, dtype: torch.dtype, num_positions: int) -> None:
    check_values(BY_NAME[name], num_positions, dtype, reference)


@pytest.mark.parametrize(
    "name", [name if name.endswith("window_packed") else pytest.param(name, marks=pytest.mark.slow) for name in BY_NAME]
)
def test_shipped_tiles(name: str) -> None:
    check_values(BY_NAME[name], 140, torch.bfloat16, reference)


NARROW = [(16, 16), (5, 7), (24, 40), (64, 64), (1, 1), (48, 17), (33, 64)]
WIDE = [(96, 64), (80, 80), (33, 128), (128, 128), (192, 128)]


def drawn(seed: int) -> tuple[Attention, torch.dtype]:
    """Operands of a random shape, fp64.

    In fp32 rows may see one key only, where gradients of q and k vanish. In bf16 δ has the rounding of the saved output, so there they
    are of the size of the others.
    """
    draw = random.Random(seed)
    dtype = draw.choice([torch.float32, torch.bfloat16])
    exact = dtype == torch.float32
    batch, positions = draw.choice([1, 2]), draw.choice([1, 2, 15, 16, 17, 40, 53] if exact else [15, 33, 40, 53])
    groups, shared = draw.choice([1, 2]), draw.choice([1, 1, 2, 3])
    width, value_width = draw.choice(NARROW if exact else [*NARROW[:3], *WIDE])
    generator = torch.Generator().manual_seed(seed)
    shapes = (groups * shared, width), (groups, width), (groups, value_width)
    q, k, v = (torch.randn(batch, positions, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    starts = None
    if draw.random() < 0.5:
        begins = torch.rand(batch, positions, generator=generator) < draw.choice([0.05, 0.1, 0.7 if exact else 0.1])
        begins[:, 0] = True
        starts = torch.where(begins, torch.arange(positions), 0).cummax(1).values.int()
    window = draw.choice([None, None, 1 if exact else 20, 7, 16, 33, 1000])
    q *= draw.choice([1.0, 1.0, 3.0])
    return Attention(q, k, v, starts, width**-0.5, window), dtype


def independent(given: Attention) -> tuple[Tensor, Tensor]:
    """Torch's own attention with a mask, and the log-sum-exp of all its scores."""
    q, k, v = (
        given.q.transpose(1, 2),
        *(each.transpose(1, 2).repeat_interleave(given.q.shape[2] // given.k.shape[2], 1) for each in given[1:3]),
    )
    at = torch.arange(q.shape[2])
    seen = at <= at[:, None]
    if given.window is not None:
        seen = seen & (at > at[:, None] - given.window)
    if given.starts is not None:
        seen = seen & (at >= given.starts[:, None, :, None])
    seen = seen.expand(q.shape[0], 1, *seen.shape[-2:])
    out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=given.scale)
    return out.transpose(1, 2), (q @ k.mT * given.scale).masked_fill(~seen, -torch.inf).logsumexp(-1)


@pytest.mark.usefixtures("small_tiles")
@seeds(range(10), [*range(10, 28), *range(100, 160)])
def test_random_shapes(seed: int) -> None:
    given, dtype = drawn(seed)
    narrow = given._replace(**{name: getattr(given, name).to(dtype) for name in "qkv"})
    wide = given._replace(**{name: getattr(narrow, name).double().requires_grad_() for name in "qkv"})
    expected = independent(wide)
    grad = torch.randn(expected[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    expected += torch.autograd.grad(expected[0], wide[:3], grad.double())
    with no_reference(reference), shuffled_grid(seed):
        out, lse = choice.forward(narrow)
        found = out, lse, *choice.backward(grad, narrow, out, lse, [True] * 5)
    ratios = dict(zip(("out", "lse", "q", "k", "v"), map(rms_ratio, found, expected), strict=True))
    smallest = 0.1 * expected[-1].norm().item()  # the gradients of q and k may be zero when v's is not
    for name, index in (("q", 2), ("k", 3)):
        if expected[index].norm().item() < smallest:
            ratios[name] = (found[index].double() - expected[index]).norm().item() / smallest
    assert {name: ratio for name, ratio in ratios.items() if not ratio <= TOLERANCE[dtype]} == {}
    assert lse.dtype == torch.float32


@pytest.mark.usefixtures("small_tiles")
def test_scores_of_thousands() -> None:
    """All except one weight of a row vanish; nothing overflows."""
    given, _ = drawn(33)
    given = Attention(given.q.float() * 1000, given.k.float(), given.v.float(), *given[3:])
    out, lse = choice.forward(given)
    expected = independent(Attention(*(each.double() for each in given[:3]), *given[3:]))
    assert max(map(rms_ratio, (out, lse), expected)) < TOLERANCE[torch.float32]
    assert all(each.isfinite().all() for each in choice.backward(torch.ones_like(out), given, out, lse, [True] * 3) if each is not None)


@pytest.mark.usefixtures("small_tiles")
def test_the_draw_covers_what_it_should() -> None:
    given = [drawn(seed) for seed in range(28)]
    assert {dtype for _, dtype in given} == {torch.float32, torch.bfloat16}
    assert {(each.starts is None, each.window is None) for each, _ in given} == {(a, b) for a in (True, False) for b in (True, False)}
    assert any(each.q.shape[3] == 96 and each.v.shape[3] == 64 for each, _ in given)
    assert any(each.q.shape[2] > each.k.shape[2] > 1 for each, _ in given)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("num_ranks", "window", "packed"),
    [
        (2, None, True),
        (3, 20, False),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 9, True), (1, None, False), (3, None, True))),
    ],
)
def test_pieces_are_the_whole(num_ranks: int, window: int | None, packed: bool) -> None:
    """Each rank's two pieces against all ranks' keys, read in place."""
    length = 10
    positions = 2 * num_ranks * length
    torch.manual_seed(0)
    q = torch.randn(2, positions, 4, 24)
    k, v = torch.randn(2, positions, 2, 24), torch.randn(2, positions, 2, 9)
    starts = torch.randint(0, 8, (2, positions)).eq(0).int().mul(torch.arange(positions).int()).cummax(1).values if packed else None
    starts = None if starts is None else starts.int()
    pieces = [(rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks)]

    def own(tensor: Tensor, *numbers: int) -> Tensor:
        return torch.cat([tensor[:, number * length : (number + 1) * length] for number in numbers], 1)

    stored = [piece for each in pieces for piece in each]
    keys, values = own(k, *stored), own(v, *stored)
    grad = torch.randn(2, positions, 4, 9)
    with no_reference(reference):
        whole = attention(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), 0.3, window, starts)
        expected = torch.autograd.grad(whole, (q, k, v), grad)
        sums = [torch.zeros_like(keys), torch.zeros_like(values)]
        for mine in pieces:
            here = None if starts is None else (own(starts, *mine) - torch.tensor(mine).repeat_interleave(length) * length).int()
            settings = 0.3, window, mine, stored
            out, lse = attention_pieces(own(q, *mine).detach(), keys.detach(), values.detach(), here, *settings)
            assert rms_ratio(out, own(whole, *mine)) < TOLERANCE[torch.float32]
            grad_q, *parts = attention_pieces_backward(
                own(grad, *mine), own(q, *mine).detach(), keys.detach(), values.detach(), here, out, lse, *settings
            )
            assert rms_ratio(grad_q, own(expected[0], *mine)) < TOLERANCE[torch.float32]
            for total, part in zip(sums, parts, strict=True):
                total.add_(part)
    assert max(rms_ratio(total, own(right, *stored)) for total, right in zip(sums, expected[1:], strict=True)) < TOLERANCE[torch.float32]


test_contract, test_only_wanted_gradients, test_gradient_of_a_sum = contract_tests(
    reference,
    [BY_NAME["attention_grouped_unequal"]],
    [BY_NAME["attention_window"]],
    [BY_NAME["attention_grouped_unequal"]],
    fixture="small_tiles",
)


def test_no_positions() -> None:
    q, k = torch.randn(2, 0, 4, 8, requires_grad=True), torch.randn(2, 0, 2, 8)
    out = attention(q, k, k, 0.3)
    assert out.shape == (2, 0, 4, 8)
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


@pytest.mark.usefixtures("small_tiles")
def test_heads_beyond_32_bit_offsets() -> None:
    """Head strides so large that a 32-bit offset would wrap; the memory between them is never touched."""
    torch.use_deterministic_algorithms(False)  # which would fill it with NaN
    far = torch.empty((2 << 30) + 64, dtype=torch.bfloat16).as_strided((1, 5, 3, 8), (0, 8, 1 << 30, 1))
    near = torch.randn(1, 5, 3, 8).bfloat16()
    far.copy_(near)
    given, other = Attention(near, near, near, None, 0.3, None), Attention(far, far, far, None, 0.3, None)
    found, expected = kernel.forward(other, Places()), kernel.forward(given, Places())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    again = (kernel.backward(near, each, *expected, Places())[:3] for each in (given, other))
    assert all(torch.equal(a, b) for a, b in zip(*again, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_stays_with_the_reference(dtype: torch.dtype) -> None:
    largest = facts.ATTENTION_LARGEST_WIDTH[dtype.itemsize]

    def given(width: int, value_width: int, **changes: Any) -> Attention:
        q, v = torch.empty(1, 1, 1, width, dtype=dtype), torch.empty(1, 1, 1, value_width, dtype=dtype)
        return Attention(q, q, v, None, 1.0, None)._replace(**changes)

    assert choice.runs_kernels(given(largest, largest))
    others = given(largest + 1, 8), given(8, largest + 1), given(8, 0), given(8, 8, scale=-1.0), given(8, 8, scale=0.0)
    assert not any(choice.runs_kernels(each) for each in others)
    assert not choice.runs_kernels(given(8, 8, k=torch.empty(1, 1, 1, 8, dtype=torch.float64)))


def test_pieces_that_stay_with_the_reference() -> None:
    assert places_of(4, (1, 2), (0, 3, 1, 2)) == Places((4, 8), 2)
    assert places_of(4, (2,), (0, 1, 2, 3)) == Places((8,), 1)
    assert places_of(4, (0, 1, 2), (0, 3, 1, 2)) is None
    assert places_of(4, (0, 1), (1, 0, 2, 3)) is None


@pytest.mark.parametrize("width", range(1, 257))
def test_every_width_has_its_columns(width: int) -> None:
    """Two tiles leave fewer columns empty than one tile of the next power of two."""
    head, rest = tiles_facts.split_width(width)
    assert head + rest >= width
    assert head + rest <= max(16, 1 << (width - 1).bit_length())
    assert all(side == 0 or (side >= 16 and side & (side - 1) == 0) for side in (head, rest))


def test_strided_operands_have_the_bits_of_dense_ones() -> None:
    given, _ = drawn(3)
    dense = Attention(*(each.float() for each in given[:3]), *given[3:])
    views = Attention(*(strided(each) for each in dense[:3]), *given[3:])
    found, expected = kernel.forward(views, Places()), kernel.forward(dense, Places())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
