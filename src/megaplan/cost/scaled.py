"""What linears of megarun take under a recipe in eight bits: copies of both operands, and products at the rate of eight bits.

A pass multiplies copies that it makes for itself, as `megakernels.fp8_linears` does. Triton kernels read a matrix twice, for the maxima and
to be rounded, and write the copy; plain torch also writes and reads it scaled. Forward copies input and weight, and the input once more for
the weight gradient where rows have scales; I copies the output's gradient and the weight, W the gradient again, and turns the kept copy.
Linears that follow one another with inputs of one width are those of one input: they share its copies, and I adds up what each makes.

A test holds bytes and launches to what `benchmarks/roofline.py` counts on the operations' own code.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from megaplan.blocks.work import Op, Ops
from megaplan.cost.kernels import Pass
from megaplan.low_precision import PER_TENSOR
from megaplan.spec.models import Spec

READS_FUSED, READS_PLAIN = 2, 4
"""Passes over a matrix in 16 or 32 bits that the making of a copy takes, reads and writes."""
LAUNCHES_FUSED, LAUNCHES_PLAIN = 3, 11
SLICE_ELEMENTS, LAUNCHES_OF_SLICE = 1 << 22, 2
"""Plain torch scales and rounds so many elements at once."""
NOTHING = Pass(0, 0, 0)


class ScaledPass(NamedTuple):
    """One pass of a linear.

    Attributes:
        copies: What copies take: bytes and launches.
        product: The product of two copies, FLOPs in eight bits.
    """

    copies: Pass
    product: Pass


class ScaledLinears:
    """Passes of a spec's linears in eight bits, of `size` bytes an element."""

    def __init__(self, spec: Spec, size: int) -> None:
        recipe = spec.precision.recipe
        self._by_row = recipe is not None and recipe.name not in PER_TENSOR
        self._size, self._fused = size, spec.host.uses_triton

    def passes(self, op: Op, tokens: int, *, shares: bool) -> tuple[ScaledPass, ScaledPass, ScaledPass]:
        """F, I and W of a linear; `shares` where the input is that of the linear before."""
        size, width = self._size, op.in_width
        out, weight = op.weights // width, op.weights
        given, made = tokens * width, tokens * out
        own = 0 if shares else given
        of_input = self._copy(own, width), self._copy(own if self._by_row else 0, width)
        of_weight, of_gradient = self._copy(weight, width), self._copy(made, out)
        turned = Pass(2 * own, 0, 1 if own else 0)
        added = Pass(3 * given * size, 0, 1) if shares else NOTHING
        forward, back, last = (
            Pass(num_bytes, flops * tokens, 1)
            for num_bytes, flops in (
                (given + weight + made * size, op.work.forward),
                (made + weight + given * size, op.work.input_grad),
                (made + given + weight * size, op.work.weight_grad),
            )
        )
        return (
            ScaledPass(summed(*of_input, of_weight), forward),
            ScaledPass(summed(of_gradient, of_weight, added), back),
            ScaledPass(summed(of_gradient, turned), last),
        )

    def _copy(self, elements: int, columns: int) -> Pass:
        return copy_pass(elements, columns, self._size, fused=self._fused)


def copy_pass(elements: int, columns: int, size: int, *, fused: bool) -> Pass:
    """The making of one copy of a matrix with these columns, of `size` bytes an element."""
    if not elements:
        return NOTHING
    if fused:
        return Pass(elements * (READS_FUSED * size + 1), 0, LAUNCHES_FUSED)
    slices = -(-elements // max(columns, SLICE_ELEMENTS))
    return Pass(elements * (READS_PLAIN * size + 1), 0, LAUNCHES_PLAIN + LAUNCHES_OF_SLICE * slices)


def in_eight_bits(op: Op) -> bool:
    """Whether a linear multiplies so: those that have an input's gradient."""
    return op.is_linear and bool(op.in_width) and bool(op.work.input_grad)


def sharing(ops: Ops) -> frozenset[int]:
    """Indices of linears whose input is that of the linear before."""
    return frozenset(
        index
        for index, (before, op) in enumerate(pairwise(ops), start=1)
        if in_eight_bits(before) and in_eight_bits(op) and (before.in_width, before.own_tokens) == (op.in_width, op.own_tokens)
    )


def summed(*each: Pass) -> Pass:
    """Bytes and launches of several together."""
    return Pass(sum(one.num_bytes for one in each), 0, sum(one.launches for one in each))
