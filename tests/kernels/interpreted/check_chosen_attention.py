"""The kernels of attention with a choice as their mask, the choice that indexed attention passes on, and what they hold inside."""

from typing import Any

import pytest
import torch
from kernel_checks import TOLERANCE, check_values, contract_tests, no_reference, strided
from op_cases import CASES
from op_checks import rms_ratio
from scratch_checks import BF16, DTYPES, FP32, PACKED, check, make_idle, starts_of
from torch import Tensor

from megakernels import (
    chosen_attention,
    chosen_attention_pieces,
    chosen_attention_pieces_backward,
    indexed_attention_choice,
    indexed_attention_pieces_choice,
)
from megakernels.ops.attention.tiles import facts as attention_sizes
from megakernels.ops.chosen_attention import op as chosen_op
from megakernels.ops.chosen_attention import pieces as chosen_pieces
from megakernels.ops.chosen_attention import reference
from megakernels.ops.indexed_attention import facts as indexed_sizes
from megakernels.ops.indexed_attention import op as indexed_op
from megakernels.ops.indexed_attention import pieces as indexed_pieces
from megakernels.ops.indexed_attention import reference as indexed_reference
from megakernels.ops.indexed_attention.bits import choice_like
from megakernels.ops.indexed_attention.pieces import IndexedSettings

BY_NAME = {case.name: case for case in CASES if case.name.startswith("chosen_attention")}
SMALL = 32
"""Queries and keys of a tile, so that a short row has several."""


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for tables in (attention_sizes.TILES, attention_sizes.MASKED_TILES):
        for name, tiles in tables.items():
            monkeypatch.setitem(tables, name, {key: tile._replace(queries=SMALL, keys=SMALL) for key, tile in tiles.items()})


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.usefixtures("small_tiles")
def test_values(name: str) -> None:
    check_values(BY_NAME[name], 37, FP32, reference, views=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("num_positions", [1, 64, 140])
def test_shipped_tiles(name: str, dtype: torch.dtype, num_positions: int) -> None:
    check_values(BY_NAME[name], num_positions, dtype, reference)


test_contract, test_only_wanted_gradients, test_gradient_of_a_sum = contract_tests(
    reference, [BY_NAME["chosen_attention_window"]], [BY_NAME["chosen_attention"]], fixture="small_tiles"
)


def indexed(num_positions: int, seed: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Operands of indexed attention before its angles, and cos and sin."""
    torch.manual_seed(seed)
    shapes = {"q": (3, 24), "k": (3, 24), "v": (3, 9), "index_q": (2, 8), "index_k": (8,), "index_weights": (2,)}
    inputs = {name: torch.randn(2, num_positions, *shape) for name, shape in shapes.items()}
    angles = torch.randn(num_positions, 2)
    return inputs | {"k_scale": torch.randn(8), "k_bias": torch.randn(8)}, angles.cos(), angles.sin()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("window", "packed", "num_positions"),
    [(20, True, 53), *(pytest.param(*each, 140, marks=pytest.mark.slow) for each in ((None, False), (20, True)))],
)
def test_kernels_pass_the_choice_of_the_reference_on(window: int | None, packed: bool, num_positions: int) -> None:
    """Bitwise, over all keys visible to a query; another layer's attention with this choice equals the layer's own bitwise."""
    inputs, cos, sin = indexed(num_positions, 3)
    starts = starts_of(2, num_positions, packed)
    numbers: dict[str, Any] = {"scale": 0.3, "top_k": 11, "loss_factor": 0.7, "eps": 1e-5}
    with no_reference(indexed_reference), no_reference(reference):
        out, choice = indexed_attention_choice(*inputs.values(), cos, sin, **numbers, window=window, starts=starts)
        again = chosen_attention(inputs["q"], inputs["k"], inputs["v"], choice, 0.3, window, starts)
    wide = [each.double() for each in inputs.values()]
    assert torch.equal(choice, indexed_attention_choice(*wide, cos, sin, **numbers, window=window, starts=starts)[1])
    assert torch.equal(again, out)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_pieces_are_the_whole(num_ranks: int) -> None:
    """Each rank's two pieces against all ranks' keys, read in place."""
    length, numbers = 10, {"scale": 0.3, "top_k": 6, "loss_factor": 0.7}
    inputs, cos, sin = indexed(2 * num_ranks * length, 5)
    pieces = [(rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks)]
    stored = [piece for each in pieces for piece in each]

    def own(tensor: Tensor, *wanted: int) -> Tensor:
        return torch.cat([tensor[:, number * length : (number + 1) * length] for number in wanted], 1)

    q, k, v = (inputs[name].requires_grad_() for name in "qkv")
    with no_reference(indexed_reference), no_reference(reference):
        choice = indexed_attention_choice(*inputs.values(), cos, sin, **numbers, eps=1e-5)[1]
        expected = chosen_attention(q, k, v, choice, 0.3)
        grad = torch.randn_like(expected)
        right_q, *right = torch.autograd.grad(expected, (q, k, v), grad)
        keys, values = (own(each.detach(), *stored) for each in (k, v))
        index_keys = indexed_reference.make_keys(inputs["index_k"], inputs["k_scale"], inputs["k_bias"], cos, sin, 1e-5)
        sums = [torch.zeros_like(each) for each in (keys, values)]
        for mine in pieces:
            table = [own(each[None], *mine)[0] for each in (cos, sin)]
            mine_of = {name: own(inputs[name].detach(), *mine) for name in ("q", "index_q", "index_weights")}
            index = mine_of["index_q"], own(index_keys, *stored), mine_of["index_weights"]
            settings = IndexedSettings(**numbers, window=None, query_pieces=mine, key_pieces=stored)
            found = indexed_attention_pieces_choice(mine_of["q"], keys, values, *index, *table, None, settings)[4]
            assert torch.equal(found, own(choice, *mine))
            given = mine_of["q"], keys, values, found, None
            made = chosen_attention_pieces(*given, 0.3, None, mine, stored)
            assert rms_ratio(made[0], own(expected, *mine)) < TOLERANCE[FP32]
            grad_q, *parts = chosen_attention_pieces_backward(own(grad, *mine), *given, *made, 0.3, None, mine, stored)
            assert rms_ratio(grad_q, own(right_q, *mine)) < TOLERANCE[FP32]
            for total, part in zip(sums, parts, strict=True):
                total.add_(part)
    for total, whole in zip(sums, right, strict=True):
        assert rms_ratio(total, own(whole, *stored)) < TOLERANCE[FP32]


SHAPES = pytest.mark.parametrize("shape", [(2, 50, 4, 16, 16), (1, 7, 3, 5, 7), (1, 1, 1, 1, 1)], ids=str)
"""Batch, positions, heads, and widths of a key and a value."""


@PACKED
@SHAPES
def test_scratch(shape: tuple[int, ...], packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocations are counted, kernels do not run: backward δ, and the gradients that are not needed."""
    make_idle(monkeypatch)
    batch, num_positions, heads, width, value_width = shape
    q, k = (strided(torch.empty(batch, num_positions, heads, width)).to(BF16) for _ in range(2))
    v, starts = torch.empty(batch, num_positions, heads, value_width, dtype=BF16), starts_of(batch, num_positions, packed)
    given = q, k, v, choice_like(q, num_positions), starts
    assert check(chosen_op._chosen_attention, *given, 0.3, 9, None) == 0
    out, lse = torch.empty_like(v), torch.empty(batch, heads, num_positions)
    delta = 4 * batch * heads * num_positions
    assert check(chosen_op._chosen_attention_backward, out, *given, None, out, lse, 0.3, None, [True] * 4) == delta
    assert (
        check(chosen_op._chosen_attention_backward, out, *given, None, out, lse, 0.3, None, [True, False, True, True]) == delta + k.nbytes
    )
    sinks = torch.empty(heads)
    assert check(chosen_op._chosen_attention, *given, 0.3, 9, sinks) == delta
    assert check(chosen_op._chosen_attention_backward, out, *given, sinks, out, lse, 0.3, None, [True] * 4) == 2 * delta
    wide = [torch.cat([each, each], 1) for each in (q, k, v)]
    mine = wide[0], *(torch.cat([each, each], 1) for each in wide[1:]), choice_like(wide[0], 4 * num_positions), None
    assert check(chosen_pieces._pieces, *mine, 0.3, None, None, [0, 3], [0, 3, 1, 2]) == 0
    out, lse = torch.empty_like(wide[2]), torch.empty(batch, heads, 2 * num_positions)
    assert check(chosen_pieces._pieces_backward, out, *mine, None, out, lse, 0.3, None, [0, 3], [0, 3, 1, 2]) == 2 * delta
    assert check(chosen_pieces._pieces_backward, out, *mine, sinks, out, lse, 0.3, None, [0, 3], [0, 3, 1, 2]) == 4 * delta


@PACKED
@DTYPES
@pytest.mark.parametrize("elements", [indexed_sizes.INDEX_CHUNK_ELEMENTS, 1])
def test_scratch_of_a_choice(dtypes: Any, packed: bool, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than without one by the bits, which are a result."""
    make_idle(monkeypatch)
    monkeypatch.setattr(indexed_sizes, "INDEX_CHUNK_ELEMENTS", elements)
    inputs, cos, sin = indexed(50, 0)
    given = [each.to(dtypes[1] if name.startswith("k_") else dtypes[0]) for name, each in inputs.items()]
    numbers = starts_of(2, 50, packed), 0.3, 4, 1.0, 1e-5, None, None
    plain = check(indexed_op._indexed_attention, *given, cos, sin, *numbers)
    choice = choice_like(given[0], 50)
    assert plain is not None
    assert check(indexed_op._indexed_attention_choice, *given, cos, sin, *numbers) == plain - choice.nbytes
    keys = torch.empty(2, 100, 8)
    wide = given[0], *(torch.cat([each, each], 1) for each in given[1:3]), given[3], keys, given[5], cos, sin, None
    settings = 0.3, 4, 1.0, None, None, [0, 3], [0, 3, 1, 2]
    plain = check(indexed_pieces._pieces, *wide, *settings)
    assert check(indexed_pieces._pieces_choice, *wide, *settings) == plain - choice_like(given[0], 100).nbytes
