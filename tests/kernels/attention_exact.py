"""Attention with sinks and relations by its definition, in fp64, and inputs to compare it with the operations on."""

import torch
from torch import Tensor

BATCH, LENGTH, HEADS, KEY_HEADS, WIDTH, SCALE = 2, 12, 4, 2, 6, 0.4


def random_inputs(*more: tuple[int, ...]) -> list[Tensor]:
    """q, k, v, sinks, and tensors of further shapes, all with gradients."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(BATCH, LENGTH, HEADS, WIDTH), *[(BATCH, LENGTH, KEY_HEADS, WIDTH)] * 2, (HEADS,), *more]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    window: int | None,
    added: Tensor | float = 0.0,
    cap: float | None = None,
    *,
    causal: bool = True,
) -> Tensor:
    """A softmax with one more column.

    Args:
        q: Queries; the others as for `megakernels.attention`.
        k: Keys.
        v: Values.
        sinks: A score of each head.
        window: Positions that a query sees, or None.
        added: To the scaled scores, which are [B, Hq, T, T].
        cap: Cap of these scores, applied before that.
        causal: False if every position sees all.
    """
    keys, values = (each.repeat_interleave(HEADS // KEY_HEADS, 2) for each in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) * SCALE
    scores = (scores if cap is None else cap * torch.tanh(scores / cap)) + added
    index = torch.arange(LENGTH)
    hidden = (index > index.unsqueeze(1)) & torch.tensor(causal)
    if window is not None:
        hidden |= index <= index.unsqueeze(1) - window
    column = sinks.view(1, HEADS, 1, 1).expand(BATCH, HEADS, LENGTH, 1)
    weights = torch.cat([scores.masked_fill(hidden, float("-inf")), column], -1).softmax(-1)[..., :-1]
    return torch.einsum("bhij,bjhd->bihd", weights, values)


def assert_same(found: Tensor, expected: Tensor, tensors: list[Tensor]) -> None:
    """Values, and the gradients of all tensors for one random cotangent, in fp64."""
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    cotangent = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pairs = zip(torch.autograd.grad(found, tensors, cotangent), torch.autograd.grad(expected, tensors, cotangent), strict=True)
    for gradient, value in pairs:
        torch.testing.assert_close(gradient, value, rtol=1e-10, atol=1e-12)
