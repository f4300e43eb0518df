"""What a bank of experts of megarun takes in eight bits: copies of rows and matrices, what is between products, and products of groups.

As `megakernels.fp8_experts` runs it. Rows are quantised once a token and their copies gathered; each bank is quantised once for all its
experts, and once more in backward, by its columns and transposed. Triton kernels run as many launches for one expert as for many; plain
torch transposes each expert's rows and matrix alone. Products are one launch where torch has a scaled product of groups, bf16 on Hopper.

Sums over a token's slots are the ops dispatch and combine, except of rows that travelled, which one more kernel puts back in their order.

A test holds bytes and launches to what `benchmarks/roofline.py` counts on the operations' own code.
"""

from __future__ import annotations

from megaplan.blocks.ops import BANK
from megaplan.blocks.work import Op, Workload
from megaplan.cost.kernels import Pass
from megaplan.cost.scaled import NOTHING, ScaledPass, copy_pass, summed
from megaplan.dtypes import DType
from megaplan.low_precision import PER_TENSOR
from megaplan.scalars import GATED
from megaplan.spec.device import device_of
from megaplan.spec.models import Spec

GROUPS_LAUNCHES = 6
"""Where each expert's rows end, as they are and in a transposed copy."""
PLAIN_TURNED = {True: (2, 13), False: (9, 6)}
"""Launches of a transposed copy in plain torch, with scales of columns or with one: once, and for each expert."""
PLAIN_BETWEEN = {True: ((29, 11), (99, 51)), False: ((18, 8), (54, 37))}
"""Of what is between products in plain torch, with a gate or without: passes over the activations and launches, forward and backward."""
PLAIN_BIASES = ((16, 20, 8), (5, 21, 6))
"""Of biases in plain torch: passes over a first product, over the last one, and launches of each; backward also sums each expert's rows."""


class ScaledBank:
    """Passes of a spec's banks in eight bits.

    Args:
        spec: A checked spec.
        load: What a rank has to do.
        grad_bytes: Of an element of the gradients that accumulate.
        policy: Of the layer's recompute.
    """

    def __init__(self, spec: Spec, load: Workload, grad_bytes: int, policy: str) -> None:
        moe, recipe = spec.model.moe, spec.precision.recipe
        self._spec, self._moe, self._load = spec, moe, load
        self._by_row = recipe is not None and recipe.name not in PER_TENSOR
        self._fused, self._size, self._grad_bytes = spec.host.uses_triton, load.itemsize, grad_bytes
        self._travels = load.ep * load.etp > 1
        self._keeps = self._travels and policy != "selective"
        grouped = spec.precision.params is DType.BF16 and device_of(spec.device).generation == "hopper"
        self._products = 1 if moe is None or grouped else moe.num_experts // load.ep

    def passes(self, op: Op, tokens: int) -> tuple[ScaledPass, ScaledPass, ScaledPass] | None:
        """F, and backward with the gradients of the matrices; W is empty. None of an op that is no bank."""
        moe = self._moe
        if moe is None or op.name != BANK:
            return None
        rows = tokens * moe.top_k * self._load.etp
        given = rows if self._travels else tokens
        return self._forward(rows, given), self._backward(rows, given, op), ScaledPass(NOTHING, NOTHING)

    def _widths(self) -> tuple[int, int, int, int]:
        """Of an expert, of its input, elements of a bank's matrices of one kind, and first products."""
        assert self._moe is not None
        width, hidden = self._moe.ffn_hidden_size // self._load.etp, self._moe.row_width(self._spec.model.hidden_size)
        elements = self._moe.num_experts // self._load.ep * width * hidden
        return width, hidden, elements, 2 if self._moe.activation in GATED else 1

    def _forward(self, rows: int, given: int) -> ScaledPass:
        width, hidden, elements, first = self._widths()
        inner, outer, size = rows * width, rows * hidden, self._size
        copies = [
            Pass(0, 0, GROUPS_LAUNCHES),
            *([self._turned_rows(given, rows, hidden)] if self._keeps else ()),
            self._gathered(given, rows, hidden),
            *(self._copy(elements, hidden) for _ in range(first)),
            self._between(inner, outer, first, 0),
            self._copy(inner, width),
            self._copy(elements, width),
            *self._put_back(outer),
        ]
        num_bytes = first * (outer + elements + inner * size) + inner + elements + outer * size
        return ScaledPass(summed(*copies), Pass(num_bytes, 2 * (first + 1) * inner * hidden, (first + 1) * self._products))

    def _backward(self, rows: int, given: int, op: Op) -> ScaledPass:
        width, hidden, elements, first = self._widths()
        inner, outer, size = rows * width, rows * hidden, self._size
        each = (self._copy(inner, width), self._turned_bank(elements), self._turned_rows(rows, rows, width))
        copies = [
            Pass(0, 0, GROUPS_LAUNCHES),
            self._gathered(given, rows, hidden),
            self._turned_bank(elements),
            self._between(inner, outer, first, 1),
            self._turned_rows(rows, rows, width),
            self._turned_rows(given, rows, hidden),
            *(each * first),
            *([Pass(3 * outer * size, 0, 1)] if first > 1 else ()),
            *self._put_back(outer),
            *(() if self._keeps else [self._turned_rows(given, rows, hidden)]),
        ]
        inputs = (first + 1) * (inner + outer + elements) + inner * size + first * outer * size
        outers = (first + 1) * (inner + outer + elements * size) + op.weights * 2 * self._grad_bytes
        return ScaledPass(summed(*copies), Pass(inputs + outers, 4 * (first + 1) * inner * hidden, 2 * (first + 1) * self._products))

    def _copy(self, elements: int, columns: int) -> Pass:
        """Of a matrix as it is; one scale is written for each row."""
        made = copy_pass(elements, columns, self._size, fused=self._fused)
        return made if self._by_row else made._replace(launches=made.launches + 1)

    def _gathered(self, given: int, rows: int, columns: int) -> Pass:
        """Of tokens, whose eight-bit rows are gathered with their scales."""
        made, several = copy_pass(given * columns, columns, self._size, fused=self._fused), rows > given
        return Pass(made.num_bytes + 2 * rows * columns, 0, made.launches + 2 + several)

    def _turned_rows(self, given: int, rows: int, columns: int) -> Pass:
        """Of each expert's rows, transposed; in plain torch gathered in 16 bits before."""
        assert self._moe is not None
        elements = rows * columns
        made = self._turned(elements, elements if self._by_row else given * columns)
        return made if self._fused or given == rows else summed(made, Pass(2 * elements * self._size, 0, 2))

    def _turned_bank(self, elements: int) -> Pass:
        """Of each expert's matrix, transposed."""
        made = self._turned(elements, elements)
        return made._replace(launches=made.launches + 2)

    def _turned(self, elements: int, looked_at: int) -> Pass:
        """`looked_at` are those among which the largest is found."""
        assert self._moe is not None
        if self._fused:
            return Pass(elements * (self._size + 1) + looked_at * self._size, 0, 1 if self._by_row else 3)
        launches, of_each = PLAIN_TURNED[self._by_row]
        num_bytes = elements * (3 * self._size + 2) + looked_at * 3 * self._size
        return Pass(num_bytes, 0, launches + of_each * (self._moe.num_experts // self._load.ep))

    def _between(self, inner: int, outer: int, first: int, direction: int) -> Pass:
        """Activation, weights and biases forward, or backward their gradients."""
        assert self._moe is not None
        if self._fused:
            passes, launches = inner * (first + 1) * (1, 2)[direction], 1
            if self._moe.bias:
                passes, launches = passes + outer + direction * first * inner, launches + (1, 3 + first)[direction]
            return Pass(passes * self._size, 0, launches)
        times, launches = PLAIN_BETWEEN[first > 1][direction]
        passes = inner * times
        if self._moe.bias:
            of_first, of_last, each = PLAIN_BIASES[direction]
            passes += first * inner * of_first + outer * of_last
            launches += (first + 1) * (each + direction * self._moe.num_experts // self._load.ep) + direction * 25
        return Pass(passes * self._size, 0, launches)

    def _put_back(self, outer: int) -> tuple[Pass, ...]:
        return (Pass(2 * outer * self._size, 0, 2),) if self._travels else ()
