"""Attention over depth, in plain torch on every device, value by value. Saved: values, parameters, scores and 1 / rms of each value."""

from collections.abc import Sequence

from torch import Tensor
from torch.library import custom_op

from megakernels._common import accumulator_dtype, join, only_needed, register_scratch, require
from megakernels.ops.depth_attention import reference
from megakernels.ops.depth_attention.facts import scratch_bytes

__all__ = ["attend_depth"]


def attend_depth(values: Sequence[Tensor], query: Tensor, scale: Tensor, eps: float) -> Tensor:
    """The sum of values by the softmax of their scores, for each token: the score is query · (scale · value / rms(value)).

    Args:
        values: n tensors [..., h] of one shape: results of blocks, the embedding's first.
        query: [h].
        scale: [h], of the norm of the values that are scored; the sum has no norm.
        eps: Added to the mean square.

    Returns:
        [..., h] in the values' dtype, contiguous.

    Saves:
        scores: fp32 [..., n].
        rstd: fp32 [..., n].

    Scratch:
        A sum of one value's size in fp32, and numbers of each token.

    Raises:
        ValueError: shapes do not fit.

    Source: arXiv:2603.15031 (attention residuals).
    """
    width = values[0].shape[-1] if values else 0
    fits = len(values) > 0 and query.shape == scale.shape == (width,) and all(each.shape == values[0].shape for each in values)
    shapes = {f"values[{index}]": each.shape for index, each in enumerate(values)} | {"query": query.shape, "scale": scale.shape}
    require(fits, "attend_depth", "values must be at least one tensor [..., h], all of one shape, query and scale [h]", **shapes)
    made: Tensor = _attend_depth(list(values), query, scale, eps)[0]
    return made


@custom_op("megakernels::attend_depth", mutates_args=())
def _attend_depth(values: list[Tensor], query: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return reference.attend(values, query, scale, eps)


@custom_op("megakernels::attend_depth_backward", mutates_args=())
def _attend_depth_backward(
    grad_made: Tensor, values: list[Tensor], query: Tensor, scale: Tensor, scores: Tensor, rstd: Tensor, needs: list[bool]
) -> list[Tensor]:
    return only_needed(reference.attend_backward(grad_made, values, query, scale, scores, rstd, needs))


@_attend_depth.register_fake
def _(values: list[Tensor], _query: Tensor, _scale: Tensor, _eps: float) -> tuple[Tensor, Tensor, Tensor]:
    first, wide = values[0], accumulator_dtype(values[0].dtype)
    scores, rstd = (first.new_empty((*first.shape[:-1], len(values)), dtype=wide) for _ in range(2))
    return first.new_empty(first.shape), scores, rstd


join(_attend_depth, _attend_depth_backward, outputs=("made", "scores", "rstd"), gradients=("values", "query", "scale"))


def _scratch(values: list[Tensor], *, backward: bool) -> int:
    width = values[0].shape[-1]
    return scratch_bytes(values[0].numel() // max(1, width), width, values[0].itemsize, len(values), backward=backward)


register_scratch(_attend_depth, lambda values, *_: _scratch(values, backward=False))
register_scratch(_attend_depth_backward, lambda _grad, values, *_: _scratch(values, backward=True))
