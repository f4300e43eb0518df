"""Bytes that the experts' MLPs in eight bits hold inside themselves on CUDA, in addition to operands and results, in the order of `run`.

Plain torch's own intermediates between products are not counted, as those of `experts` are not.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megakernels._common import chooses_triton
from megakernels.ops.fp8_experts.reference import turned_columns
from megakernels.ops.fp8_linear.sizes import BY_ROW, SCALE, WHOLE, num_maxima
from megakernels.ops.moe.sizes import BIAS_COLS

INDEX = 4


class Walk:
    """What is alive, and the most that was."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def make(self, num_bytes: int, inside: int = 0) -> int:
        """What was made, and what is held inside in addition while it is made."""
        self.now += num_bytes
        self.peak = max(self.peak, self.now + inside)
        return num_bytes

    def drop(self, *each: int) -> None:
        """What is not there any more."""
        self.now -= sum(each)


class Sizes:
    """Sizes of a call: bytes of its copies, and the walk over them."""

    def __init__(self, tokens: int, num_rows: int, stack: Tensor, scaling: str) -> None:
        self.experts, self.width, self.hidden = stack.shape
        self.tokens, self.rows, self.size = tokens, num_rows, stack.itemsize
        self.by_row, self.fused = scaling == "rows", chooses_triton(stack)
        self.columns = turned_columns(num_rows, self.experts)
        self.walk = Walk()
        self.walk.make(2 * self.experts * INDEX)

    def row_copy(self, columns: int, *, gathers: int | None = None) -> int:
        """Of rows, a scale for each; `gathers` has the slots of the tokens that they are read from."""
        walk, given = self.walk, self.rows if gathers is None else self.tokens
        if not self.rows:
            return 0
        data = walk.make(given * columns)
        scale = walk.make(SCALE * (given if self.by_row else 1), self._maxima(given, columns))
        if gathers is not None:
            token = walk.make(0 if gathers == 1 else INDEX * self.rows)
            other = walk.make(self.rows * columns)
            walk.drop(data)
            data = other
            if self.by_row:
                other = walk.make(SCALE * self.rows)
                walk.drop(scale)
                scale = other
        else:
            token = 0
        if not self.by_row:
            other = walk.make(SCALE * self.rows)
            walk.drop(scale)
            scale = other
        walk.drop(token)
        return data + scale

    def stack_copy(self, rows: int) -> int:
        """Of all matrices as they are, a scale for each of their rows."""
        walk, elements = self.walk, self.experts * self.width * self.hidden
        count = self.experts * rows
        data = walk.make(elements)
        scale = walk.make(SCALE * (count if self.by_row else 1), self._maxima(count, elements // count))
        if not self.by_row:
            other = walk.make(SCALE * count)
            walk.drop(scale)
            scale = other
        return data + scale

    def turned_copy(self, columns: int, given_rows: int) -> int:
        """Of rows, or of tokens, transposed."""
        walk = self.walk
        made = walk.make(columns * self.columns) + walk.make(SCALE * self.experts * columns)
        self._whole(given_rows, columns)
        return made

    def turned_stack(self, columns: int) -> int:
        """Of all matrices, transposed."""
        walk, elements = self.walk, self.experts * self.width * self.hidden
        places = walk.make(2 * self.experts * INDEX)
        made = walk.make(elements) + walk.make(SCALE * self.experts * columns)
        self._whole(elements // columns, columns)
        walk.drop(places)
        return made

    def _whole(self, rows: int, columns: int) -> None:
        """The one scale of a matrix, while its copy is made."""
        if not self.by_row:
            self.walk.drop(self.walk.make(SCALE, self._maxima(rows, columns)))

    def _maxima(self, rows: int, columns: int) -> int:
        return SCALE * num_maxima(rows, columns, BY_ROW if self.by_row else WHOLE) if self.fused else 0


def forward_scratch(
    x: Tensor,
    weights: Tensor,
    rows: Tensor,
    _counts: Tensor,
    gate: Tensor | None,
    up: Tensor,
    _down: Tensor,
    _activation: str,
    scaling: str,
    keeps: bool,
    *_others: Any,
) -> int:
    """Of `fp8_experts`."""
    sizes, top_k = Sizes(x.shape[0], rows.shape[0], up, scaling), weights.shape[1]
    walk, inner = sizes.walk, sizes.rows * sizes.width * sizes.size
    made = sizes.turned_copy(sizes.hidden, sizes.tokens) if keeps else 0
    first = sizes.row_copy(sizes.hidden, gathers=top_k)
    for _ in range(1 if gate is None else 2):
        second = sizes.stack_copy(sizes.width)
        made += walk.make(inner)
        walk.drop(second)
    walk.drop(first)
    hidden = walk.make(inner)
    first = sizes.row_copy(sizes.width)
    walk.drop(hidden)
    second = sizes.stack_copy(sizes.hidden)
    products = walk.make(sizes.rows * sizes.hidden * sizes.size)
    walk.drop(second, first)
    made += _summed(sizes, products)
    return walk.peak - made


def backward_scratch(
    _grad_y: Tensor,
    _x: Tensor,
    scales: Tensor | None,
    weights: Tensor,
    rows: Tensor,
    _counts: Tensor,
    _gate_out: Tensor | None,
    _up_out: Tensor,
    gate: Tensor | None,
    up: Tensor,
    _down: Tensor,
    _activation: str,
    scaling: str,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    *_others: Any,
) -> int:
    """Of `fp8_experts_backward`."""
    tokens, top_k = weights.shape
    sizes = Sizes(tokens, rows.shape[0], up, scaling)
    walk, inner, matrix = sizes.walk, sizes.rows * sizes.width * sizes.size, up.nbytes
    gates = 0 if gate is None else 1
    first, second = sizes.row_copy(sizes.hidden, gathers=top_k), sizes.turned_stack(sizes.width)
    pulled = walk.make(inner)
    walk.drop(first, second)
    gradients, hidden = [walk.make(inner) for _ in range(1 + gates)], walk.make(inner)
    made = walk.make(weights.nbytes)
    walk.drop(pulled)
    second = sizes.turned_copy(sizes.width, sizes.rows)
    walk.drop(hidden)
    first = sizes.turned_copy(sizes.hidden, tokens)
    made += walk.make(matrix)
    walk.drop(first, second)
    made += _biases(sizes, (gate_bias, up_bias), down_bias, weights)
    products = 0
    for index in range(1 + gates):
        first, second = sizes.row_copy(sizes.width), sizes.turned_stack(sizes.hidden)
        again = walk.make(sizes.rows * sizes.hidden * sizes.size)
        walk.drop(first, second, *((again,) if index else ()))
        products = products or again
    made += _summed(sizes, products)
    second = sizes.turned_copy(sizes.hidden, tokens) if scales is None else 0
    for gradient in gradients:
        first = sizes.turned_copy(sizes.width, sizes.rows)
        made += walk.make(matrix)
        walk.drop(first, gradient)
    return walk.peak - made


def _summed(sizes: Sizes, products: int) -> int:
    """The sum of each token's rows, in whose place they are dropped."""
    walk = sizes.walk
    made = walk.make(sizes.tokens * sizes.hidden * sizes.size)
    places = walk.make(INDEX * sizes.rows if sizes.fused else 0)
    walk.drop(places, products)
    return made


def _biases(sizes: Sizes, others: Sequence[Tensor | None], down: Tensor | None, weights: Tensor) -> int:
    """The biases' gradients, with the shares of the weights' while that of `down` is made, and their sum."""
    walk = sizes.walk
    made = sum(walk.make(bias.nbytes) for bias in others if bias is not None)
    if down is not None:
        shares = walk.make(-(-sizes.hidden // BIAS_COLS) * sizes.rows * SCALE if sizes.fused else 0)
        made += walk.make(down.nbytes)
        walk.drop(shares, walk.make(weights.nbytes if sizes.fused else 0))
    return made
