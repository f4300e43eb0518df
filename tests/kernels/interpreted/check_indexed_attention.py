"""The kernels of indexed attention: what is chosen at ties and at the edges of what is visible, all gradients, chunks and pieces."""

import random
from typing import Any, NamedTuple

import pytest
import torch
from kernel_checks import TOLERANCE, check_values, contract_tests, no_reference, seeds, shuffled_grid, strided
from op_cases import CASES
from op_checks import rms_ratio
from torch import Tensor

from megakernels import (
    index_keys,
    index_keys_backward,
    indexed_attention,
    indexed_attention_pieces,
    indexed_attention_pieces_backward,
)
from megakernels.ops.attention.tiles import facts as attention_sizes
from megakernels.ops.indexed_attention import choice, facts, reference
from megakernels.ops.indexed_attention.inputs import Arguments
from megakernels.ops.indexed_attention.pieces import IndexedSettings

BY_NAME = {case.name: case for case in CASES if case.name.startswith("indexed_attention")}
EACH = pytest.mark.parametrize("name", BY_NAME)
EACH_PACKED = pytest.mark.parametrize(
    "name", [name if name.endswith("packed") else pytest.param(name, marks=pytest.mark.slow) for name in BY_NAME]
)
NAMES = ("q", "k", "v", "index_q", "index_k", "index_weights", "k_scale", "k_bias", "sinks")
SMALL = 32
"""Queries and keys of a tile, so that a short row has several: the shipped ones have up to 128."""


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles per row, and several chunks per sequence."""
    for tables in (attention_sizes.TILES, attention_sizes.MASKED_TILES):
        for name, tiles in tables.items():
            monkeypatch.setitem(tables, name, {key: tile._replace(queries=SMALL, keys=SMALL) for key, tile in tiles.items()})
    for name, tiles in facts.INDEX_TILES.items():  # of their shipped proportions: a tile of gradients may be less than one of scores
        halves = {key: tile._replace(queries=tile.queries // 2, keys=tile.keys // 2) for key, tile in tiles.items()}
        monkeypatch.setitem(facts.INDEX_TILES, name, halves)
    monkeypatch.setattr(facts, "INDEX_TILE", SMALL)
    for key, tile in facts.MASS_TILES.items():
        monkeypatch.setitem(facts.MASS_TILES, key, tile._replace(queries=SMALL, keys=SMALL))
    monkeypatch.setattr(facts, "INDEX_CHUNK_ELEMENTS", 1)


@EACH_PACKED
@pytest.mark.usefixtures("small_tiles")
def test_values(name: str) -> None:
    check_values(BY_NAME[name], 37, torch.float32, reference, views=True)


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_positions", [1, 64, 140])
def test_shipped_tiles(name: str, dtype: torch.dtype, num_positions: int) -> None:
    check_values(BY_NAME[name], num_positions, dtype, reference)


class Drawn(NamedTuple):
    """A random case: operands of one dtype, angles, and arguments that are not tensors."""

    tensors: dict[str, Tensor]
    cos: Tensor
    sin: Tensor
    starts: Tensor | None
    numbers: dict[str, Any]

    def arguments(self) -> Arguments:
        return Arguments(**self.tensors, cos=self.cos, sin=self.sin, starts=self.starts, **self.numbers)


def drawn(seed: int) -> Drawn:
    """Every other score of one index head is 0, so that ties decide; the widest heads are those of published models."""
    draw = random.Random(seed)
    dtype = draw.choice([torch.float32, torch.bfloat16])
    exact = dtype == torch.float32
    batch, positions = draw.choice([1, 2]), draw.choice([1, 2, 15, 33, 40, 53] if exact else [15, 33, 40, 53])
    heads, index_heads = draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 5])
    width, value_width = draw.choice(
        [(16, 16), (5, 7), (24, 40), (1, 1), (48, 17)] if exact else [(16, 16), (96, 64), (33, 128), (192, 128)]
    )
    index_width = draw.choice([4, 8, 17, 64, 100])
    rotated = draw.choice([0, 2, index_width // 2 * 2])
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    tokens = batch, positions
    tensors = {
        "q": normal(*tokens, heads, width),
        "k": normal(*tokens, heads, width),
        "v": normal(*tokens, heads, value_width),
        "index_q": normal(*tokens, index_heads, index_width),
        "index_k": normal(*tokens, index_width),
        "index_weights": normal(*tokens, index_heads),
        "k_scale": normal(index_width),
        "k_bias": normal(index_width),
    }
    angles = torch.randn(positions, rotated // 2, generator=generator)
    starts = None
    if draw.random() < 0.5:
        begins = torch.rand(batch, positions, generator=generator) < draw.choice([0.05, 0.1, 0.5 if exact else 0.1])
        begins[:, 0] = True
        starts = torch.where(begins, torch.arange(positions), 0).cummax(1).values.int()
    window = draw.choice([None, None, 1 if exact else 20, 16, 33, 1000])
    top_k = draw.choice([1 if exact else 5, 3, 8, positions, positions + 3, 1000])
    numbers = {"scale": width**-0.5, "top_k": top_k, "loss_factor": draw.choice([0.7, 1e-4]), "eps": 1e-5, "window": window}
    if draw.random() < 0.5:
        tensors["sinks"] = normal(heads)
    return Drawn(tensors, angles.cos(), angles.sin(), starts, numbers)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[..., T, D] as complex numbers of the first dims, half-split."""
    half = cos.shape[1]
    if not half:
        return x
    turn = torch.complex(cos.double(), sin.double())
    found = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
    return torch.cat([found.real, found.imag, x[..., 2 * half :]], -1)


def chosen_keys(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """A row at a time, by a stable sort."""
    chosen = torch.zeros_like(visible)
    for row, sees, takes in zip(scores.flatten(0, 1), visible.flatten(0, 1), chosen.flatten(0, 1), strict=True):
        keys = sees.nonzero().squeeze(1)
        takes[keys[row[keys].sort(descending=True, stable=True).indices[:top_k]]] = True
    return chosen


def independent(case: Drawn, wide: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Output, the indexer's loss, and its normed keys, in fp64 by torch's own functions."""
    numbers, positions = case.numbers, case.cos.shape[0]
    a = turned(wide["index_q"].transpose(1, 2), case.cos, case.sin)
    width = (a.shape[-1],)
    normed = torch.nn.functional.layer_norm(wide["index_k"], width, wide["k_scale"], wide["k_bias"], numbers["eps"])
    b = turned(normed, case.cos, case.sin)
    weights = wide["index_weights"] / (a.shape[1] * a.shape[3]) ** 0.5
    scores = torch.einsum("bits,bti->bts", (a @ b.unsqueeze(1).mT).relu(), weights)
    at = torch.arange(positions)
    visible = (at <= at[:, None]).expand(scores.shape)
    if numbers["window"] is not None:
        visible = visible & (at > at[:, None] - numbers["window"])
    if case.starts is not None:
        visible = visible & (at >= case.starts.unsqueeze(-1))
    chosen = chosen_keys(scores.detach(), visible, numbers["top_k"])
    q, k, v = (wide[name].transpose(1, 2) for name in "qkv")
    hidden = ~chosen.unsqueeze(1)
    logits = (q @ k.mT * numbers["scale"]).masked_fill(hidden, -torch.inf)
    if "sinks" in wide:
        logits = torch.cat([logits, wide["sinks"][:, None, None].expand_as(logits[..., :1])], -1)
    log_p = logits.log_softmax(-1)[..., :positions]
    log_c = scores.masked_fill(~chosen, -torch.inf).log_softmax(-1).unsqueeze(1)
    p = log_p.exp().detach()
    divergence = torch.where(hidden, 0.0, p * (log_p.detach().masked_fill(hidden, 0.0) - log_c.masked_fill(hidden, 0.0)))
    return (log_p.exp() @ v).transpose(1, 2), numbers["loss_factor"] * divergence.sum(), normed


@pytest.mark.usefixtures("small_tiles")
@seeds(range(4), [*range(4, 24), *range(100, 150)])
def test_random_shapes(seed: int) -> None:
    case = drawn(seed)
    wide = {name: value.double().requires_grad_() for name, value in case.tensors.items()}
    out, loss, normed = independent(case, wide)
    dtype = case.tensors["q"].dtype
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    gradients = torch.autograd.grad((out * grad.double()).sum() + loss, [*wide.values(), normed])
    expected = dict(zip((*wide, "normed"), gradients, strict=True))
    with no_reference(reference), shuffled_grid(seed):
        arguments = case.arguments()
        made = choice.forward(arguments)
        found = dict(zip(NAMES, choice.backward(grad, arguments, *made, [True] * 9), strict=True))
    ratios = {"out": rms_ratio(made[0], out)}
    index = NAMES[3:8]
    sizes_of = {"q": expected["v"], "k": expected["v"], "sinks": expected["v"], **dict.fromkeys(index, expected["index_weights"])}
    for name, gradient in found.items():
        if gradient is None:
            assert name == "sinks"
            assert name not in expected
            continue
        # the gradients of q and k, and the indexer's, may vanish: a row with one key has none
        smallest = 0.1 * sizes_of[name].norm().item() if name in sizes_of else 0.0
        if name in index:
            smallest = max(smallest, 0.01 * case.numbers["loss_factor"])
        if name in ("k_scale", "k_bias"):  # sums of one gradient of each row, which may cancel except for the rounding of each
            smallest = max(smallest, expected["normed"].norm().item())
        size = max(expected[name].norm().item(), smallest)
        ratios[name] = (gradient.double() - expected[name]).norm().item() / size
        assert gradient.dtype == case.tensors[name].dtype
    assert {name: ratio for name, ratio in ratios.items() if not ratio <= TOLERANCE[dtype]} == {}
    with shuffled_grid(seed + 1):
        again = choice.backward(grad, arguments, *made, [True] * 9)
    assert all(one is other or torch.equal(one, other) for one, other in zip(again, found.values(), strict=True))


def test_the_draw_covers_what_it_should() -> None:
    cases = [drawn(seed) for seed in range(24)]
    assert {case.tensors["q"].dtype for case in cases} == {torch.float32, torch.bfloat16}
    found = {(case.starts is None, case.numbers["window"] is None) for case in cases}
    assert found == {(a, b) for a in (True, False) for b in (True, False)}
    assert any(case.tensors["q"].shape[3] == 96 and case.tensors["v"].shape[3] == 64 for case in cases)
    assert {case.tensors["index_q"].shape[2] for case in cases} == {1, 2, 3, 5}
    assert {"sinks" in case.tensors for case in cases} == {True, False}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("name", "factor"), [("q", 1e3), ("index_weights", 1e6), ("index_weights", 1e-12), ("index_q", 1e-20)])
def test_extreme_scores(name: str, factor: float) -> None:
    """A softmax of one key, or of equal ones: the relative error of a weight is the absolute one of its logit."""
    case = drawn(14)
    case.tensors[name].mul_(factor)
    wide = {name: value.double() for name, value in case.tensors.items()}
    out, *_ = independent(case, wide)
    with no_reference(reference):
        arguments = case.arguments()
        made = choice.forward(arguments)
        found = choice.backward(torch.ones_like(made[0]), arguments, *made, [True] * 9)
    largest = (wide["q"].transpose(1, 2) @ wide["k"].transpose(1, 2).mT * case.numbers["scale"]).abs().max().item()
    assert rms_ratio(made[0], out) < TOLERANCE[case.tensors["q"].dtype] * max(largest, 1.0)
    assert all(each is None or each.isfinite().all() for each in (*made[:2], *found))


@pytest.mark.usefixtures("small_tiles")
def test_of_equal_scores_the_first_keys_are_chosen() -> None:
    """Zero weights score all keys equally, negative ones score most keys −0 or less; both directions have the bits of the reference."""
    case = drawn(5)
    for weights in (torch.zeros(2, 40, 1), -torch.ones(2, 40, 1)):
        tensors = {name: torch.randn(2, 40, *shape) for name, shape in (("q", (2, 8)), ("k", (2, 8)), ("v", (2, 8)))}
        tensors |= {"index_q": torch.randn(2, 40, 1, 8), "index_k": torch.randn(2, 40, 8), "index_weights": weights}
        tensors |= {"k_scale": torch.ones(8), "k_bias": torch.zeros(8)}
        table = torch.ones(40, 2), torch.zeros(40, 2)
        given = Drawn(tensors, *table, None, case.numbers | {"top_k": 7, "window": None})
        arguments = given.arguments()
        with no_reference(reference):
            found = choice.forward(arguments)
        plain = arguments.with_keys(reference.make_keys(*arguments[4:5], *arguments[6:10], arguments.eps))
        expected = reference.forward(plain)
        assert max(map(rms_ratio, found[:2], expected[:2])) < TOLERANCE[torch.float32]
        assert (found[2] - expected[2]).nan_to_num(0.0).abs().max() < 1e-5


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("num_ranks", "window", "packed"), [(2, None, True), pytest.param(3, 20, False, marks=pytest.mark.slow)])
def test_pieces_are_the_whole(num_ranks: int, window: int | None, packed: bool) -> None:
    """Each rank's two pieces against all ranks' keys, read in place."""
    length = 10
    positions = 2 * num_ranks * length
    torch.manual_seed(0)
    shapes = {"q": (3, 24), "k": (3, 24), "v": (3, 9), "index_q": (2, 8), "index_k": (8,), "index_weights": (2,)}
    inputs = {name: torch.randn(2, positions, *shape, requires_grad=True) for name, shape in shapes.items()}
    norm = [torch.randn(8, requires_grad=True) for _ in range(2)]
    angles = torch.randn(1, positions, 2)
    starts = torch.randint(0, 8, (2, positions)).eq(0).int().mul(torch.arange(positions).int()).cummax(1).values if packed else None
    starts = None if starts is None else starts.int()
    pieces = [(rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks)]
    stored = [piece for each in pieces for piece in each]
    numbers = {"scale": 0.3, "top_k": 6, "loss_factor": 0.7, "window": window}

    def own(tensor: Tensor, *wanted: int) -> Tensor:
        return torch.cat([tensor[:, number * length : (number + 1) * length] for number in wanted], 1).detach()

    with no_reference(reference):
        out = indexed_attention(*inputs.values(), *norm, angles[0].cos(), angles[0].sin(), **numbers, eps=1e-5, starts=starts)
        grad = torch.randn_like(out)
        expected = dict(zip((*inputs, "k_scale", "k_bias"), torch.autograd.grad(out, (*inputs.values(), *norm), grad), strict=True))
        tables = [(own(angles.cos(), *mine)[0], own(angles.sin(), *mine)[0]) for mine in pieces]
        scale, bias = (each.detach() for each in norm)
        keys = torch.cat(
            [index_keys(own(inputs["index_k"], *mine), scale, bias, *table, 1e-5) for mine, table in zip(pieces, tables, strict=True)], 1
        )
        k, v = own(inputs["k"], *stored), own(inputs["v"], *stored)
        sums = [torch.zeros_like(each) for each in (k, v, keys)]
        for mine, table in zip(pieces, tables, strict=True):
            here = None if starts is None else (own(starts, *mine) - torch.tensor(mine).repeat_interleave(length) * length).int()
            mine_of = {name: own(inputs[name], *mine) for name in ("q", "index_q", "index_weights")}
            given = mine_of["q"], k, v, mine_of["index_q"], keys, mine_of["index_weights"], *table, here
            settings = IndexedSettings(**numbers, query_pieces=mine, key_pieces=stored)
            made = indexed_attention_pieces(*given, settings)
            assert rms_ratio(made[0], own(out, *mine)) < TOLERANCE[torch.float32]
            *of_queries, grad_k, grad_v, grad_keys = indexed_attention_pieces_backward(own(grad, *mine), *given, made, settings)
            for name, found in zip(mine_of, of_queries, strict=True):
                assert rms_ratio(found, own(expected[name], *mine)) < TOLERANCE[torch.float32], name
            for total, part in zip(sums, (grad_k, grad_v, grad_keys), strict=True):
                total.add_(part)
        for name, total in zip("kv", sums, strict=False):
            assert rms_ratio(total, own(expected[name], *stored)) < TOLERANCE[torch.float32], name
        of_norm = [torch.zeros_like(scale), torch.zeros_like(bias)]
        for mine, table, part in zip(pieces, tables, sums[2].chunk(num_ranks, 1), strict=True):
            grad_k, *grads = index_keys_backward(part, own(inputs["index_k"], *mine), scale, *table, 1e-5)
            assert rms_ratio(grad_k, own(expected["index_k"], *mine)) < TOLERANCE[torch.float32]
            for total, each in zip(of_norm, grads, strict=True):
                total.add_(each)
    for name, total in zip(("k_scale", "k_bias"), of_norm, strict=True):
        assert rms_ratio(total, expected[name]) < TOLERANCE[torch.float32], name


def test_rows_that_one_program_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search by two bits at a time, over blocks of a row, has the bits of that in one block."""
    positions = 140
    torch.manual_seed(0)
    shapes = {"q": (1, 8), "k": (1, 8), "v": (1, 8), "index_q": (2, 8), "index_k": (8,), "index_weights": (2,)}
    tensors = {name: torch.randn(1, positions, *shape) for name, shape in shapes.items()}
    tensors |= {"k_scale": torch.ones(8), "k_bias": torch.zeros(8)}
    table = torch.ones(positions, 2), torch.zeros(positions, 2)
    numbers = {"scale": 0.3, "top_k": 60, "loss_factor": 1.0, "eps": 1e-5, "window": None}
    arguments = Drawn(tensors, *table, None, numbers).arguments()
    expected = choice.forward(arguments)
    assert facts.select_constants(arguments.k.shape[1])[0]["HELD"]
    monkeypatch.setattr(facts, "LARGEST_HELD", 128)
    assert not facts.select_constants(arguments.k.shape[1])[0]["HELD"]
    found = choice.forward(arguments)
    assert all(torch.equal(found[index], expected[index]) for index in range(3))
    assert rms_ratio(found[3], expected[3]) < TOLERANCE[torch.float32]


test_contract, test_only_wanted_gradients, test_gradient_of_a_sum = contract_tests(
    reference, [BY_NAME["indexed_attention_window"]], [BY_NAME["indexed_attention"]], slow=("needs",), fixture="small_tiles"
)


def test_no_positions() -> None:
    arguments = drawn(3).arguments()
    empty = arguments._replace(
        **{name: getattr(arguments, name)[:, :0] for name in NAMES[:6]}, cos=arguments.cos[:0], sin=arguments.sin[:0]
    )
    empty = empty._replace(starts=None)
    made = choice.forward(empty)
    assert made[0].shape == empty.v.shape
    found = choice.backward(made[0], empty, *made, [True] * 9)
    expected = (getattr(empty, name) for name in NAMES)
    assert [each is None or each.shape for each in found] == [each is None or each.shape for each in expected]


def test_what_stays_with_the_reference() -> None:
    def given(width: int, index_width: int, **changes: Any) -> Any:
        q, keys = torch.empty(1, 1, 1, width).bfloat16(), torch.empty(1, 1, index_width)
        index_q, weights, table = torch.empty(1, 1, 2, index_width), torch.empty(1, 1, 2), torch.empty(1, 0)
        return reference.Indexed(q, q, q, index_q, keys, weights, table, table, None, 1.0, 1, 1.0, None)._replace(**changes)

    assert choice.runs_kernels(given(256, 128))
    assert not any(choice.runs_kernels(each) for each in (given(257, 8), given(8, 129), given(8, 8, scale=-1.0)))
    assert not choice.runs_kernels(given(8, 8, index_weights=torch.empty(1, 1, 2).double()))


def test_strided_operands_have_the_bits_of_dense_ones() -> None:
    arguments = drawn(9).arguments()
    views = arguments._replace(**{name: strided(getattr(arguments, name)) for name in NAMES[:6]})
    assert all(torch.equal(a, b) for a, b in zip(choice.forward(views), choice.forward(arguments), strict=True))
