"""Hyper-connections, in plain torch on every device, stream by stream.

Saved: `collapse_streams` x, parameters, the tokens' numbers and norms; `expand_streams` all of its inputs.
"""

from typing import Any

from torch import Tensor
from torch.library import custom_op

from megakernels._common import accumulator_dtype, fake_like, join, only_needed, register_scratch, require
from megakernels.ops.hyper_connection import reference
from megakernels.ops.hyper_connection.facts import Connection, expand_scratch_bytes

__all__ = ["collapse_streams", "expand_streams"]


def collapse_streams(x: Tensor, weight: Tensor, base: Tensor, scale: Tensor, how: Connection) -> tuple[Tensor, Tensor]:
    """The stream that a block reads of n residual streams, and the weights by which they get its output.

    A token's numbers are u = weight · x / rms(x), its logits scale · u + base, where each kind of numbers has one scale: n of pre, n of
    post, n² of comb. The stream is Σ (σ(pre) + eps) · streams. Weights are post_scale · σ(post) and the matrix comb: the softmax of each
    row of its logits, divided alternately by the sums of its columns and rows until it is doubly stochastic. Without comb eps is added to
    post.

    Args:
        x: [..., n · h], the streams side by side.
        weight: [N, n · h], N = n (only pre), 2 · n, or 2 · n + n².
        base: [N].
        scale: [1], [2] or [3].
        how: n and the constants.

    Returns:
        [..., h] in x's dtype, and fp32 [..., N − n], contiguous.

    Saves:
        numbers: u, fp32 [..., N].
        rstd: fp32 [...].

    Scratch:
        A sum of one stream's size in fp32, copies of the numbers, and the divisors of each step.

    Raises:
        ValueError: shapes do not fit.

    Source: arXiv:2409.19606, section 2 (hyper-connections); arXiv:2512.24880, sections 4.2 and 4.3 (doubly stochastic).
    """
    n, factors = how.num_streams, scale.numel()
    numbers = {1: n, 2: 2 * n, 3: 2 * n + n * n}.get(factors, -1)
    fits = x.shape[-1] % n == 0 and weight.shape == (numbers, x.shape[-1]) and base.shape == (numbers,)
    shapes = {"x": x.shape, "weight": weight.shape, "base": base.shape, "scale": scale.shape}
    require(fits, "collapse_streams", f"weight must be [N, {n} · h], base [N], for as many kinds as scale has factors", **shapes)
    require(how.steps >= 1, "collapse_streams", "the matrix needs a step", steps=how.steps)
    made, weights = _collapse_streams(x, weight, base, scale, *how)[:2]
    return made, weights


def expand_streams(x: Tensor, made: Tensor, weights: Tensor, count: int, factor: float = 1.0) -> Tensor:
    """New residual streams: stream i is Σ comb[j, i] · stream j, or stream i itself without comb, plus factor · post[i] · made.

    Args:
        x: [..., n · h], the streams side by side.
        made: [..., h], the output of a block.
        weights: fp32 [..., n] or [..., n + n²], as `collapse_streams` returns them.
        count: n.
        factor: Factor of the output.

    Returns:
        [..., n · h], contiguous, in x's dtype.

    Scratch:
        A sum of one stream's size in fp32.

    Raises:
        ValueError: shapes do not fit.

    Source: arXiv:2409.19606; arXiv:2512.24880.
    """
    fits = x.shape == (*made.shape[:-1], count * made.shape[-1]) and weights.shape[:-1] == x.shape[:-1]
    fits = fits and weights.shape[-1] in (count, count + count * count)
    shapes = {"x": x.shape, "made": made.shape, "weights": weights.shape}
    require(fits, "expand_streams", f"made must be [..., h] for x [..., {count} · h], weights [..., n] or [..., n + n²]", **shapes)
    y: Tensor = _expand_streams(x, made, weights, count, factor)
    return y


@custom_op("megakernels::collapse_streams", mutates_args=())
def _collapse_streams(
    x: Tensor, weight: Tensor, base: Tensor, scale: Tensor, count: int, norm_eps: float, eps: float, post_scale: float, steps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor, Tensor] = reference.collapse(
        x, weight, base, scale, Connection(count, norm_eps, eps, post_scale, steps)
    )
    return found


@custom_op("megakernels::collapse_streams_backward", mutates_args=())
def _collapse_streams_backward(
    grad_made: Tensor, grad_weights: Tensor, x: Tensor, weight: Tensor, base: Tensor, scale: Tensor, numbers: Tensor, rstd: Tensor,
    count: int, norm_eps: float, eps: float, post_scale: float, steps: int, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    how = Connection(count, norm_eps, eps, post_scale, steps)
    return only_needed(reference.collapse_backward(grad_made, grad_weights, x, weight, base, scale, numbers, rstd, how, needs))


@custom_op("megakernels::expand_streams", mutates_args=())
def _expand_streams(x: Tensor, made: Tensor, weights: Tensor, count: int, factor: float) -> Tensor:
    return reference.expand(x, made, weights, factor, count)


@custom_op("megakernels::expand_streams_backward", mutates_args=())
def _expand_streams_backward(
    grad_y: Tensor, x: Tensor, made: Tensor, weights: Tensor, count: int, factor: float, needs: list[bool]
) -> list[Tensor]:
    return only_needed(reference.expand_backward(grad_y, x, made, weights, factor, count, needs))


@_collapse_streams.register_fake
def _(x: Tensor, weight: Tensor, _base: Tensor, _scale: Tensor, count: int, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lead, wide = x.shape[:-1], accumulator_dtype(x.dtype)
    given, numbers = (x.new_empty((*lead, size), dtype=wide) for size in (weight.shape[0] - count, weight.shape[0]))
    return x.new_empty((*lead, x.shape[-1] // count)), given, numbers, x.new_empty(lead, dtype=wide)


@_expand_streams.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return fake_like(x)


join(
    _collapse_streams,
    _collapse_streams_backward,
    outputs=("made", "weights", "numbers", "rstd"),
    gradients=("x", "weight", "base", "scale"),
)
join(_expand_streams, _expand_streams_backward, outputs=("y",), gradients=("x", "made", "weights"))


def _collapse_scratch(x: Tensor, numbers: int, constants: tuple[Any, ...], *, backward: bool) -> int:
    how = Connection(*constants)
    rows, hidden = x.numel() // max(1, x.shape[-1]), x.shape[-1] // how.num_streams
    return how.scratch_bytes(rows, hidden, x.itemsize, numbers, backward=backward)


def _expand_scratch(made: Tensor) -> int:
    return expand_scratch_bytes(made.numel() // max(1, made.shape[-1]), made.shape[-1], made.itemsize)


register_scratch(_collapse_streams, lambda x, weight, _base, _scale, *rest: _collapse_scratch(x, weight.shape[0], rest, backward=False))
register_scratch(_collapse_streams_backward, lambda *values: _collapse_scratch(values[2], values[3].shape[0], values[8:13], backward=True))
register_scratch(_expand_streams, lambda _x, made, *_: _expand_scratch(made))
register_scratch(_expand_streams_backward, lambda _grad, _x, made, *_: _expand_scratch(made))
