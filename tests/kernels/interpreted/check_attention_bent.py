"""Attention kernels with capped scores and with relations: tiles at edges, documents, shared key heads, sinks, pieces of a sequence."""

import random
import warnings
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import pytest
import torch
from kernel_checks import TOLERANCE, no_reference, seeds, shuffled_grid, strided
from op_checks import rms_ratio
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from megakernels import attention, attention_pieces, attention_pieces_backward
from megakernels.ops.attention import choice, facts, reference
from megakernels.ops.attention.inputs import Attention
from megakernels.ops.attention.relations import relations_gradient
from megakernels.ops.attention.tiles import facts as tiles_facts

SMALL = 32
"""Queries and keys of a tile, so that a short row has several."""


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for tiles in (tiles_facts.TILES, tiles_facts.BENT_TILES):
        for name, each in tiles.items():
            monkeypatch.setitem(tiles, name, {key: tile._replace(queries=SMALL, keys=SMALL) for key, tile in each.items()})
    monkeypatch.setattr(tiles_facts, "RELATION_TILE", {"N": 16, "R": 4})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flex_attention says that it is slow where it is not compiled
        yield


class Drawn(NamedTuple):
    """Random operands in their dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    relations: Tensor | None
    starts: Tensor | None
    window: int | None
    classes: Tensor | None
    cap: float | None
    scale: float

    def of(self, tensors: list[Tensor]) -> Attention:
        """A copy with these tensors in place of q, k, v and the relations."""
        q, k, v, *relations = tensors
        return Attention(q, k, v, self.starts, self.scale, self.window, None, self.classes, relations[0] if relations else None, self.cap)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that have gradients."""
        return [each for each in self[:4] if each is not None]


def drawn(seed: int) -> Drawn:
    """In bf16 rows see some keys: with one, gradients of q and k are zero except for rounding."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kind, dtype = seed % 3, draw.choice([torch.float32, torch.bfloat16])
    exact = dtype == torch.float32
    batch, positions = draw.choice([1, 2]), draw.choice([2, 15, 16, 17, 40, 53] if exact else [33, 40, 53])
    groups, shared = draw.choice([1, 2]), draw.choice([1, 1, 2, 3])
    width, value_width = draw.choice([(16, 16), (5, 7), (24, 40), (64, 64)] if exact else [(16, 16), (24, 40), (80, 80), (192, 128)])

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    starts = None
    if draw.random() < 0.5:
        begins = torch.rand(batch, positions, generator=generator) < draw.choice([0.05, 0.1])
        begins[:, 0] = True
        starts = torch.where(begins, torch.arange(positions), 0).cummax(1).values.int()
    heads, num_relations = groups * shared, draw.choice([1, 3, 9])
    relations = normal(num_relations, heads) * draw.choice([0.5, 2.0]) if kind > 0 else None
    classes = torch.randint(num_relations, (batch, positions), generator=generator, dtype=torch.int32) if kind > 0 else None
    cap = draw.choice([0.3, 2.0, 50.0]) if kind < 2 else None
    q = normal(batch, positions, heads, width) * draw.choice([1.0, 4.0])
    k, v = normal(batch, positions, groups, width), normal(batch, positions, groups, value_width)
    return Drawn(q, k, v, relations, starts, draw.choice([None, None, 20, 33]), classes, cap, width**-0.5)


def bent(given: Attention, score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Scaled scores after each option, by its definition; −∞ where a query may not look."""
    if given.cap is not None:
        score = given.cap * torch.tanh(score / given.cap)
    if given.classes is not None and given.relations is not None:
        score = score + given.relations[given.classes[batch, key].long(), head]
    seen = key <= query
    if given.window is not None:
        seen = seen & (key > query - given.window)
    if given.starts is not None:
        seen = seen & (key >= given.starts[batch, query])
    return torch.where(seen, score, -torch.inf)


def independent(given: Attention, probe: Tensor) -> Tensor:
    """Softmax attention of all pairs; autograd has its gradients, and torch's own `flex_attention` the same values.

    `probe` [B, H, T, T] is added to the scores, so its gradient is the scores'.
    """
    q, k, v = (each.transpose(1, 2) for each in given[:3])
    wide_k, wide_v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    places = torch.meshgrid(*(torch.arange(size) for size in probe.shape), indexing="ij")
    out = (bent(given, q @ wide_k.mT * given.scale, *places) + probe).softmax(-1) @ wide_v
    fixed = given._replace(relations=None if given.relations is None else given.relations.detach())
    torch._dynamo.reset()  # it takes a second cap for a variable, which `flex_attention` refuses
    operands = (each.detach() for each in (q, k, v))
    same: Tensor = flex_attention(*operands, score_mod=partial(bent, fixed), scale=given.scale, enable_gqa=True)  # type: ignore[misc]
    torch.testing.assert_close(same, out.detach(), rtol=1e-10, atol=1e-12)
    return out.transpose(1, 2)


@seeds([1, 2, 3], [0, *range(4, 64)])
def test_random_shapes(seed: int) -> None:
    """A gradient's error is relative to its size, or to a tenth of v's gradient if it nearly vanishes.

    The gradient of relations is a sum of scores' gradients, which cancel within a query: its error is relative to the sum of their sizes.
    """
    draw = drawn(seed)
    given, wide = draw.of(draw.tensors), [each.double().requires_grad_() for each in draw.tensors]
    batch, positions, heads = draw.q.shape[:3]
    probe = torch.zeros(batch, heads, positions, positions, dtype=torch.float64, requires_grad=True)
    exact, dtype = independent(draw.of(wide), probe), draw.q.dtype
    grad = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    of_scores, *gradients = torch.autograd.grad(exact, [probe, *wide], grad.double())
    with no_reference(reference):
        out, lse = choice.forward(given)
        found = [out, *(each for each in choice.backward(grad, given, out, lse, [True] * 5) if each is not None)]
        with shuffled_grid(seed):
            again, lse = choice.forward(given)
            repeated = [again, *(each for each in choice.backward(grad, given, again, lse, [True] * 5) if each is not None)]
    assert all(torch.equal(a, b) for a, b in zip(found, repeated, strict=True))
    sizes_of = [exact.norm().item(), *(max(each.norm().item(), 0.1 * gradients[2].norm().item()) for each in gradients[:3])]
    if draw.classes is not None and draw.relations is not None:
        sums = relations_gradient(of_scores.abs().sum(2), draw.classes, wide[3].detach())
        sizes_of.append(sums.norm().item())
    errors = [(a.double() - b).norm().item() for a, b in zip(found, [exact, *gradients], strict=True)]
    ratios = dict(zip(("out", "q", "k", "v", "relations"), (a / b for a, b in zip(errors, sizes_of, strict=True)), strict=False))
    assert {name: ratio for name, ratio in ratios.items() if not ratio <= TOLERANCE[dtype]} == {}


def test_pieces_are_the_whole() -> None:
    """Each rank's two pieces against all ranks' keys, read in place, with a cap, relations and sinks."""
    torch.manual_seed(0)
    length, num_ranks, cap, window = 9, 2, 1.5, 20
    positions = 2 * num_ranks * length
    q, k, v, sinks, relations = (torch.randn(shape) for shape in ((1, positions, 4, 24), *[(1, positions, 2, 24)] * 2, (4,), (5, 4)))
    classes = torch.randint(5, (1, positions), dtype=torch.int32)
    pieces = [(rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks)]

    def own(tensor: Tensor, *numbers: int) -> Tensor:
        return torch.cat([tensor[:, number * length : (number + 1) * length] for number in numbers], 1)

    stored = [piece for each in pieces for piece in each]
    grad, leaves = torch.randn(1, positions, 4, 24), [each.requires_grad_() for each in (q, k, v, sinks, relations)]
    with no_reference(reference):
        whole = attention(q, k, v, 0.3, window, None, sinks, classes, relations, cap)
        expected = torch.autograd.grad(whole, leaves, grad)
        q, keys, values, sinks, relations = (each.detach() for each in (q, own(k, *stored), own(v, *stored), sinks, relations))
        sums = [torch.zeros_like(each) for each in (keys, values, sinks, relations)]
        for mine in pieces:
            settings = 0.3, window, mine, stored, sinks, classes, relations, cap
            out, lse = attention_pieces(own(q, *mine), strided(keys), values, None, *settings)
            assert rms_ratio(out, own(whole, *mine)) < TOLERANCE[torch.float32]
            grad_q, *parts = attention_pieces_backward(own(grad, *mine), own(q, *mine), strided(keys), values, None, out, lse, *settings)
            assert rms_ratio(grad_q, own(expected[0], *mine)) < TOLERANCE[torch.float32]
            for total, part in zip(sums, parts, strict=True):
                total.add_(part)
    wanted = own(expected[1], *stored), own(expected[2], *stored), *expected[3:]
    assert max(map(rms_ratio, sums, wanted)) < TOLERANCE[torch.float32]


def test_no_positions() -> None:
    q, relations = torch.randn(2, 0, 2, 8), torch.randn(3, 2, requires_grad=True)
    out = attention(q, q, q, 0.3, classes=torch.zeros(2, 0, dtype=torch.int32), relations=relations, cap=2.0)
    assert torch.autograd.grad(out.sum(), relations)[0].count_nonzero() == 0


def test_what_stays_with_the_reference() -> None:
    q, relations = torch.empty(1, 1, 1, facts.BENT_WIDTH + 1, dtype=torch.bfloat16), torch.empty(1, 1)
    given = Attention(q, q, q, None, 1.0, None, cap=1.0)
    assert choice.runs_kernels(given)
    assert choice.runs_kernels(given._replace(relations=relations, cap=None))
    assert not choice.runs_kernels(given._replace(relations=relations))
