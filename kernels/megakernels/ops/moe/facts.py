"""Facts of the mixture of experts: routing, rows sent to experts, the experts' MLPs, rows summed.

Source: arXiv:2401.04088, section 2.1; arXiv:1701.06538, section 2 (routing); counting operands.
"""

from typing import NamedTuple

import megakernels.facts as base
from megakernels.ops.activation.facts import activation
from megakernels.ops.library import linear

PULL_COLS = 64
"""Columns of a bf16 tile of the backward's first product, which needs the most registers."""
BLOCK_ROWS, BLOCK_COLS, BLOCK_STEP = 128, 256, 64
"""Sides of a tile and inner step of products whose operands descriptors read."""
BLOCK_UP_COLS = {"swiglu": 128, "geglu": 128, "relu2": 256, "gelu": 128}
"""Columns of a tile of the forward's first product."""
BIAS_COLS = 128
"""Columns of a tile of the sums that are the biases' gradients."""
ROUTE = base.FixedRatios(
    base.KernelPass(launches=2, kinds=(base.KindShare(base.MEMORY),)),
    base.KernelPass(launches=5, products=200, kinds=(base.KindShare(base.MEMORY),)),  # in bf16, the gradient of the logits has two parts
    base.PlainPasses(base.PlainPass(500, launches=8), base.PlainPass(520, launches=20), is_fp32=True),
)
DISPATCH_LAUNCHES = 8
PLAIN_DISPATCH = base.PlainPasses(base.PlainPass(100, launches=2), base.PlainPass(820, launches=14))
PLAIN_COMBINE = base.PlainPasses(base.PlainPass(820, launches=14), base.PlainPass(160, launches=2))
EXPERTS_LAUNCHES = 7, 11
COPIES_LAUNCHES = 3
PLAIN_EXPERTS = base.PlainPasses(base.PlainPass(310, launches=12), base.PlainPass(650, launches=37))
WHOLE = -1
"""Number of tokens that says: every pair of a token and a slot has a row."""
SORT_PAIRS = 128
"""Pairs per program."""
POSITION_BYTES = 4
"""Bytes of the row of a pair."""
INVERT_PAIRS = 1024
"""Pairs per program that inverts a permutation."""
EXPERTS_AT_ONCE = 32
"""Experts that a program of the sort compares at once."""
LOSSES_TILE_ELEMENTS = 4096
"""Elements of a tile of the router losses."""
UP_COLS = {"swiglu": 64, "geglu": 64, "relu2": 128, "gelu": 64}
"""Columns of a bf16 tile of the forward's first product; with a gate there are two such tiles."""


class Permutation(NamedTuple):
    """Dispatch of tokens to rows, or combination of rows into tokens.

    Attributes:
        combines: True for the combination.
        shared: True if a shared expert's output is added.
        hidden_bytes: Bytes of a token.
    """

    combines: bool
    shared: bool
    hidden_bytes: int

    def kernels(self, work: base.Work, tokens: int) -> base.Passes:
        """One kernel each way; dispatch also plans the rows.

        The shared expert's output is added forward; the gradients of router, routed rows and shared expert are summed backward.
        """
        found = []
        for backward, (moved, flops) in enumerate(base.ideal(work, tokens)):
            launches = DISPATCH_LAUNCHES if not (self.combines or backward) else 1
            sums = self.combines != bool(backward)
            added = sums * (1 + backward) - (not self.shared)
            kinds = [base.KindWork("experts.sum" if sums else base.MEMORY, moved, 0, launches)]
            if added > 0:
                kinds.append(base.KindWork(base.ADD, added * 3 * tokens * self.hidden_bytes, 0, added))
            found.append(base.Pass(moved, flops, launches, tuple(kinds)))
        return found[0], found[1]

    def plain(self, work: base.Work, tokens: int) -> base.Passes:
        """Both passes by plain torch: every intermediate goes through memory."""
        return (PLAIN_COMBINE if self.combines else PLAIN_DISPATCH).passes(work, tokens)


class ExpertSizes(NamedTuple):
    """Sizes of a bank of experts on one rank.

    Attributes:
        tokens: Tokens, or rows that arrived from other ranks.
        slots: Rows of a token.
        experts: Experts of this rank.
        width: Width of an expert.
        hidden: Width of its input.
        gated: True if there are three matrices.
        bias: True if they have biases.
        itemsize: Bytes of an element.
        capacity: Rows of all experts together, if they have a capacity; None for every token's slots.
    """

    tokens: int
    slots: int
    experts: int
    width: int
    hidden: int
    gated: bool
    bias: bool
    itemsize: int
    capacity: int | None = None

    @property
    def rows(self) -> int:
        """Rows of all experts."""
        return self.tokens * self.slots if self.capacity is None else self.capacity

    @property
    def matrices(self) -> int:
        """Elements of the matrices of one kind."""
        return self.experts * self.width * self.hidden

    def row_work(self) -> base.Work:
        """Ideal work of a row: first products, activation, last product."""
        first, last = (linear(*widths, self.itemsize) for widths in ((self.hidden, self.width), (self.width, self.hidden)))
        return first * (1 + self.gated) + activation(self.width, self.itemsize, gated=self.gated) + last

    def kernels(self, work: base.Work, tokens: int) -> base.Passes:
        """Products of groups: forward up and down; backward the gradients through both, and of their weights, two for each forward one.

        The products of weights' gradients read copies of tokens and of their gradients in the rows' order.
        """
        first, prefix = 1 + self.gated, "gated_experts" if self.gated else "experts"
        kinds = (
            (base.KindShare(f"{prefix}.up", first, first, of=first + 1), base.KindShare(f"{prefix}.down", 1, 1, of=first + 1)),
            (
                base.KindShare(f"{prefix}.pull", first, first, of=2 * (first + 1)),
                base.KindShare(f"{prefix}.down", 1, 1, of=2 * (first + 1)),
                base.KindShare(f"{prefix}.outer", first + 1, first + 1, first + 1, of=2 * (first + 1)),
            ),
        )
        forward, backward = (
            base.Pass(moved, flops, launches, each)
            for (moved, flops), launches, each in zip(base.ideal(work, tokens), EXPERTS_LAUNCHES, kinds, strict=True)
        )
        copied = 2 * (self.tokens + self.rows) * self.hidden * self.itemsize
        copies = base.KindWork("experts.sum", copied, 0, COPIES_LAUNCHES)
        parts = *backward.parts(), copies
        return forward, base.Pass(backward.num_bytes + copied, backward.flops, backward.launches + COPIES_LAUNCHES, parts)

    def plain(self, work: base.Work, tokens: int) -> base.Passes:
        """Both passes by plain torch: every intermediate goes through memory."""
        return PLAIN_EXPERTS.passes(work, tokens)

    def tile_bytes(self) -> int:
        """Bytes of the running sums of rows and of tiles by expert."""
        return 2 * self.experts * 4

    def forward_bytes(self) -> int:
        """Bytes inside the forward: the activated rows; with several slots per token also their products, until they are summed."""
        counts = self.rows * self.width, self.rows * self.hidden, self.tokens * self.hidden
        hidden, products, y = (count * self.itemsize for count in counts)
        return self.tile_bytes() + (hidden if self.slots == 1 else max(hidden + products - y, products))

    def backward_bytes(self, needs: "ExpertGradients") -> int:
        """Bytes inside the backward: gradients of the first products and the activated rows, each until its own gradients exist."""
        inner, matrix, gates = self.rows * self.width * self.itemsize, self.matrices * self.itemsize, int(self.gated)
        num_shares = base.ceil_div(self.width, tile_cols(self.width, self.itemsize, PULL_COLS)) + self.bias_shares(weights=needs.weights)
        buffers = 2 + gates
        made = (self.rows * base.SUMS_BYTES if needs.weights else 0) + needs.down_bias
        peaks = [buffers * inner + num_shares * self.rows * base.SUMS_BYTES + made]
        if needs.x:
            own, products = (each * self.hidden * self.itemsize for each in (self.tokens, self.rows))
            peaks.append(buffers * inner + made + own + (0 if self.slots == 1 else products))
            made += own
        of_first = needs.up or (self.gated and needs.gate)
        positions = self.rows * POSITION_BYTES if needs.down or of_first else 0
        copied = self.rows * self.hidden * self.itemsize
        of_gate = ((needs.gate, needs.gate_bias, of_first),) if self.gated else ()
        for needed, of_bias, copies in ((needs.down, 0, needs.down), *of_gate, (needs.up, needs.up_bias, of_first)):
            made += of_bias + (matrix if needed else 0)
            peaks.append(buffers * inner + made + positions + (copied if copies else 0))
            buffers -= 1
        return self.tile_bytes() + max(peaks) - made

    def inside(self, *, frozen: bool) -> base.KernelScratch:
        """Scratch bytes of both passes, with all gradients or, if `frozen`, without gradients of matrices and biases."""
        biases = (0, 0, 0) if frozen or not self.bias else (self.width, self.width, self.hidden)
        gate, up, down = (self.experts * each * self.itemsize for each in biases)
        needs = ExpertGradients(True, True, not frozen, not frozen, not frozen, gate, up, down)
        return base.KernelScratch(self.forward_bytes(), self.backward_bytes(needs))

    def bias_shares(self, *, weights: bool) -> int:
        """Shares of the weights' gradient that the products with the bias of `down` are."""
        return base.ceil_div(self.hidden, BIAS_COLS) if self.bias and weights else 0


class ExpertGradients(NamedTuple):
    """Gradients that the backward of a bank makes: whether it makes each of the first five, and bytes of the biases' gradients."""

    x: bool
    weights: bool
    gate: bool
    up: bool
    down: bool
    gate_bias: int
    up_bias: int
    down_bias: int


class RouterBytes(NamedTuple):
    """Bytes of an element of the router's tokens, weight, bias and correction; 0 for one that it does not have."""

    x: int
    weight: int
    bias: int = 0
    correction: int = 0


def route_backward_bytes(
    rows: int, hidden: int, experts: int, sizes: RouterBytes, needs: tuple[bool, bool, bool, bool], *, parts: int
) -> int:
    """Bytes inside the router's backward: the gradient of the logits, fp32 products and widened copies, and sums before they are rounded.

    Args:
        rows: Tokens.
        hidden: Width of a token.
        experts: Number of experts.
        sizes: Bytes of elements.
        needs: True if tokens, weight, bias and correction have a gradient.
        parts: Parts of the gradient of the logits: two bf16 ones for products with bf16 operands, else one of fp32.
    """
    numbers, elements = rows * hidden, experts * hidden
    of_rows, of_experts, made = numbers * base.SUMS_BYTES, elements * base.SUMS_BYTES, 0
    inside = [0]
    if needs[0]:
        made = numbers * sizes.x
        copied = 0 if sizes.weight == base.SUMS_BYTES else of_experts
        product = 0 if sizes.x == base.SUMS_BYTES else of_rows
        inside.append(made + 2 * elements * sizes.weight if parts == 2 else max(product + copied, product + made))
    if needs[1]:
        own = elements * sizes.weight
        copied = 0 if sizes.x == base.SUMS_BYTES else of_rows
        product = 0 if sizes.weight == base.SUMS_BYTES else of_experts
        inside.append(made + (2 * of_experts + own if parts == 2 else max(product + own, of_experts + copied)))
        made += own
    if sizes.bias and needs[2]:
        own = experts * sizes.bias
        inside.append(made + parts * experts * base.SUMS_BYTES + (own if parts == 2 or sizes.bias != base.SUMS_BYTES else 0))
        made += own
    if sizes.correction and needs[3]:
        made += experts * sizes.correction
    return rows * experts * base.SUMS_BYTES + max(*inside, made) - made


def tile_cols(num_cols: int, itemsize: int, largest: int) -> int:
    """Columns of a product's tile: a power of two, at most `largest` for two-byte elements."""
    return min(largest if itemsize == 2 else largest // 2, base.block_of(num_cols, base.SMALLEST_DOT))


def product_options(num_cols: int, itemsize: int, largest: int = 128) -> dict[str, int]:
    """Columns of a tile, inner step, warps and stages of the products."""
    return {
        "COLS": tile_cols(num_cols, itemsize, largest),
        "STEP": 128 // itemsize,
        "num_warps": 8 if itemsize == 2 else 4,
        "num_stages": 3,
    }


def block_options(num_cols: int, largest: int, num_stages: int = 3) -> dict[str, int]:
    """The same of products whose matrices descriptors read: two-byte elements, many rows per expert, a large shared memory."""
    return {"COLS": tile_cols(num_cols, 2, largest), "STEP": BLOCK_STEP, "num_warps": 8, "num_stages": num_stages}


def up_options(activation: str, num_cols: int, itemsize: int, *, blocks: bool) -> dict[str, int]:
    """The same for the forward's first products."""
    return block_options(num_cols, BLOCK_UP_COLS[activation]) if blocks else product_options(num_cols, itemsize, UP_COLS[activation])


def pull_options(num_cols: int, itemsize: int, *, blocks: bool) -> dict[str, int]:
    """The same for the backward's first product."""
    return block_options(num_cols, 2 * PULL_COLS) if blocks else product_options(num_cols, itemsize, PULL_COLS)


def down_options(num_cols: int, itemsize: int, *, blocks: bool, pair: bool) -> dict[str, int]:
    """The same for the products whose results have a token's width; `pair`: of two operands."""
    return block_options(num_cols, BLOCK_COLS, num_stages=3 if pair else 4) if blocks else product_options(num_cols, itemsize)


def outer_options(num_across: int, num_cols: int, itemsize: int, *, blocks: bool) -> dict[str, int]:
    """The same for the matrices' gradients, and rows of a tile: with blocks the tile of 2¹⁵ elements with the least padding."""
    sides = ((BLOCK_ROWS, BLOCK_COLS), (BLOCK_COLS, BLOCK_ROWS)) if blocks else ((256 // itemsize, 128),)
    tiles = [(tile_cols(num_across, itemsize, rows), tile_cols(num_cols, itemsize, cols)) for rows, cols in sides]
    rows, cols = min(tiles, key=lambda each: base.ceil_div(num_across, each[0]) * each[0] * base.ceil_div(num_cols, each[1]) * each[1])
    return {**product_options(num_cols, itemsize), "TILE": rows, "COLS": cols}


def bias_options() -> dict[str, int]:
    """Tile and warps of the biases' gradients."""
    return {"ROWS": 16, "COLS": BIAS_COLS, "num_warps": 4}


def router_columns(num_experts: int, num_groups: int) -> tuple[int, int]:
    """Groups and columns of a group in a tile of the router: the powers of two that hold them."""
    return base.block_of(num_groups), base.block_of(num_experts // num_groups)


def routing_work(hidden: int, experts: int, itemsize: int) -> base.Work:
    """Ideal work of the router: the scores of all experts, whose fp32 probabilities are written and read."""
    return linear(hidden, experts, itemsize) + base.Work(moved_forward=experts * base.SUMS_BYTES, moved_input=experts * base.SUMS_BYTES)
