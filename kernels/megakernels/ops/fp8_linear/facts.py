"""Facts of linears in eight bits: copies of both operands that a pass makes for itself, and products of two copies.

An operand has one scale for the whole matrix, or one for each row of the product (`by_row`). Triton kernels read a matrix twice, for the
maxima and to be rounded, and write the copy; one whose rows have scales and fit in a program they read once. Plain torch also writes and
reads it scaled. torch's scaled product takes dims that 16 divides.
"""

from typing import NamedTuple

from megakernels.facts import Pass, ceil_div

MULTIPLE = 16
"""Divisor of the dims of torch's scaled product; operands are padded with zeros."""
SCALED_SLICE_ELEMENTS = 1 << 22
"""Elements that plain torch scales at once before they are rounded to eight bits."""
SCALE_BYTES, INDEX_BYTES = 4, 8
"""Bytes of a scale, and of a row's block."""
BLOCKS = {"mxfp8": 32, "nvfp4": 16, "fp8_blockwise": 128}
"""Elements of the summed dim that have a scale, by scaling; products of such operands are emulated in fp32."""
BLOCK_SCALE_BYTES = {"mxfp8": 1, "nvfp4": 1, "fp8_blockwise": 4}
"""Bytes of the scale of a block."""
SQUARE_ROWS = {"mxfp8": 1, "nvfp4": 16, "fp8_blockwise": 128}
"""Rows of a weight whose blocks share a scale."""
VALUE_BYTES = 4
"""Bytes of an emulated operand's element."""
SCALED_TILE = 128
"""Rows and columns of a tile of the Triton kernels."""
LONGEST_ROW, ROW_TILE_ELEMENTS = 16384, 8192
"""Columns of a row that a program holds to scale and round it in one pass, and elements that it holds of shorter rows."""
WHOLE, BY_ROW, BY_COLUMN, GIVEN = 0, 1, 2, 3
"""Parts of a matrix, as it is given, that have a scale each; GIVEN for a scale of the matrix that does not follow from it."""
DELAYED = "delayed"
"""Scaling of matrices by factors that follow from earlier steps."""
ONE_SCALE = ("tensor", DELAYED)
"""Scalings whose saved copy of an input is also the forward's operand."""
DELAYED_NUMBERS, DELAYED_ROLES = 3, 3
"""Numbers of an operand under delayed scaling, and operands of a linear that have them (`delayed`)."""
READS_FUSED, READS_PLAIN = 2, 4
"""Passes over a matrix in 16 or 32 bits that the making of a copy takes, reads and writes; one where `in_one_pass`."""
LAUNCHES_FUSED, LAUNCHES_PLAIN, LAUNCHES_OF_SLICE = 3, 11, 2
LAUNCHES_GIVEN, LAUNCHES_OF_GIVEN_SLICE = 3, 3
"""Launches of a copy with a given scale in plain torch: once and for each slice; a Triton kernel is one."""
NOTHING = Pass(0, 0, 0)
ROUND, SCALED_PRODUCT = "fp8.round", "fp8.product"
"""Kinds of the kernels: copies, and products of two copies."""


class ScaledPass(NamedTuple):
    """One pass of a linear or a bank.

    Attributes:
        copies: Bytes and launches of copies.
        product: The product of two copies, FLOPs in eight bits.
    """

    copies: Pass
    product: Pass


ScaledPasses = tuple[ScaledPass, ScaledPass, ScaledPass]
"""Forward, gradient of the input, gradient of the weight."""


class ScaledLinears(NamedTuple):
    """Sizes of several linears of one input.

    Attributes:
        rows: Tokens that they multiply.
        width: Width of the input.
        outs: Widths of the outputs.
        itemsize: Bytes of an element of activations, and of the weights.
        by_row: True if scales are per row and column instead of per matrix.
        fused: True if Triton kernels make the copies; plain torch scales a slice of the matrix at once.
        packed: True for each weight that is given packed; of none if empty.
        delayed: True if scales are per matrix and given.
    """

    rows: int
    width: int
    outs: tuple[int, ...]
    itemsize: int
    by_row: bool
    fused: bool
    packed: tuple[bool, ...] = ()
    delayed: bool = False

    @property
    def makes_operand(self) -> bool:
        """True if the copy that forward multiplies is not the one that is kept."""
        return self.by_row

    @property
    def scale_bytes(self) -> int:
        """Bytes of one scale of the kept copy."""
        return SCALE_BYTES

    def kept_shape(self, rows: int) -> tuple[int, int]:
        """Shape of the kept copy of `rows` tokens."""
        return rows, padded(self.width)

    @property
    def num_scales(self) -> int:
        """Scales of the kept copy: of the columns that the weight gradient's product has, or one."""
        return padded(self.width) if self.by_row else 1

    def keeping_bytes(self) -> int:
        """Bytes inside the operation that makes the kept copy."""
        return self._making(self.rows, self.width, BY_COLUMN)

    def forward_bytes(self, *, given: bool) -> int:
        """Bytes inside the products, with the input's copy given or made inside; one weight's copy exists at a time."""
        own = peak = 0
        if not given:
            own = self._copy(self.rows, padded(self.width))
            peak = own + self._making(self.rows, self.width, BY_ROW)
        for out, packed in each_weight(self.outs, self.packed):
            in_place = packed and not self.by_row and padded(out) == out
            copy = own + (SCALE_BYTES if in_place else self._copy(padded(out), padded(self.width)))
            result = self.rows * padded(out) * self.itemsize if padded(out) != out else 0
            peak = max(peak, copy + max(0 if packed else self._making(out, self.width, BY_ROW), result))
        return peak

    @property
    def input_gradient_bytes(self) -> int:
        """Bytes inside the products that make the input's gradient: one gradient and weight at a time, later ones with their product."""
        return max(self._input_gradient(index, *each) for index, each in enumerate(each_weight(self.outs, self.packed)))

    def _input_gradient(self, index: int, out: int, packed: bool) -> int:
        first = self._copy(self.rows, padded(out))
        both = first + self._copy(padded(self.width), padded(out))
        widths = (padded(self.width) if padded(self.width) != self.width else 0) + (self.width if index else 0)
        scaled = 0 if packed else self._making(out, self.width, BY_COLUMN)
        return max(first + self._making(self.rows, out, BY_ROW), both + max(scaled, self.rows * widths * self.itemsize))

    def weight_gradient_bytes(self, *, given: bool) -> int:
        """Bytes inside the products that make the weights' gradients, where the input's kept copy is given or its copy made inside."""
        own = padded(self.width) * padded(self.rows) if given else self._copy(padded(self.width), padded(self.rows))
        peak = own if given else own + self._making(self.rows, self.width, BY_COLUMN)
        for out in self.outs:
            copy = own + self._copy(out, padded(self.rows))
            result = out * padded(self.width) * self.itemsize if padded(self.width) != self.width else 0
            peak = max(peak, copy + max(self._making(self.rows, out, BY_COLUMN), result))
        return peak

    def _copy(self, rows: int, columns: int) -> int:
        return rows * columns + SCALE_BYTES * (rows if self.by_row else 1)

    def _making(self, rows: int, columns: int, scaled: int) -> int:
        parts = scaled if self.by_row else GIVEN if self.delayed else WHOLE
        return making_bytes(rows, columns, parts, self.itemsize, fused=self.fused)


class BlockLinears(NamedTuple):
    """Sizes of several linears of one input whose blocks have scales: operands are values in fp32, and products are made in it.

    Attributes:
        rows: Tokens that they multiply.
        width: Width of the input.
        outs: Widths of the outputs.
        itemsize: Bytes of an element of activations.
        scaling: mxfp8, nvfp4 or fp8_blockwise.
        packed: True for each weight that is given packed; of none if empty.
    """

    rows: int
    width: int
    outs: tuple[int, ...]
    itemsize: int
    scaling: str
    packed: tuple[bool, ...] = ()

    @property
    def makes_operand(self) -> bool:
        """True: blocks of the kept copy are along tokens."""
        return True

    @property
    def scale_bytes(self) -> int:
        """One: scales of the kept copy are counted as bytes."""
        return 1

    def kept_shape(self, rows: int) -> tuple[int, int]:
        """Shape of the kept copy of `rows` tokens."""
        return rows, padded(self.width) // (2 if self.scaling == "nvfp4" else 1)

    @property
    def num_scales(self) -> int:
        """Bytes of the kept copy's scales, with the factor of the matrix."""
        count = ceil_div(self.rows, BLOCKS[self.scaling]) * padded(self.width)
        return count * BLOCK_SCALE_BYTES[self.scaling] + (SCALE_BYTES if self.scaling == "nvfp4" else 0)

    def keeping_bytes(self) -> int:
        """Bytes inside the operation that makes the kept copy, which is allocated last."""
        values, kept = self._values(self.width, self.rows), self.rows * self.kept_shape(self.rows)[1]
        last = values // 2 + 2 * SCALE_BYTES if self.scaling == "nvfp4" else kept
        return values + max(self._making(self.width, self.rows), last) - kept

    def forward_bytes(self, *, given: bool) -> int:  # noqa: ARG002  (as for other scalings)
        """Bytes inside the products; the input's copy is never given."""
        return max(self.product_bytes(out, out, packed=packed) for out, packed in each_weight(self.outs, self.packed))

    def product_bytes(self, out: int, count: int, *, packed: bool) -> int:
        """Bytes inside the product with `count` rows of a weight of which `out` are made."""
        own = self._values(self.rows, self.width)
        making = self._restoring(out, self.width) if packed else self._making(out, self.width, weight=True)
        product = own + self._values(out, self.width) + max(making, VALUE_BYTES * self.rows * count)
        return max(own + self._making(self.rows, self.width), product)

    @property
    def input_gradient_bytes(self) -> int:
        """Bytes inside the products that make the input's gradient: one gradient and weight at a time, later ones with their product."""
        return max(self._input_gradient(index, *each) for index, each in enumerate(each_weight(self.outs, self.packed)))

    def _input_gradient(self, index: int, out: int, packed: bool) -> int:
        first, product = self._values(self.rows, out), self.rows * self.width * (VALUE_BYTES + (self.itemsize if index else 0))
        making = self._restoring(self.width, out) if packed else self._making(self.width, out, weight=True)
        second = self._values(self.width, out) + max(making, product)
        return first + max(self._making(self.rows, out, random=True), second)

    def weight_gradient_bytes(self, *, given: bool) -> int:
        """Bytes inside the products that make the weights' gradients, where the input's kept copy is given or its values made inside."""
        own = self._values(self.width, self.rows)
        decoded = 0 if self.scaling == "fp8_blockwise" else self.num_scales
        restoring = VALUE_BYTES * (decoded + (self.rows * self.width if self.scaling == "nvfp4" else 0))
        peak = own + (restoring if given else self._making(self.width, self.rows))
        for out in self.outs:
            inside = max(self._making(out, self.rows, random=True), VALUE_BYTES * out * self.width)
            peak = max(peak, own + self._values(out, self.rows) + inside)
        return peak

    def _restoring(self, rows: int, columns: int) -> int:
        """Bytes inside the making of values of a packed weight: its scales, or codes and levels of every other element."""
        scales, elements = rows * ceil_div(columns, BLOCKS[self.scaling]), rows * columns if self.scaling == "nvfp4" else 0
        return VALUE_BYTES * max(scales, elements)

    def _values(self, rows: int, columns: int) -> int:
        return VALUE_BYTES * rows * rounded_up(columns, BLOCKS[self.scaling])

    def _making(self, rows: int, columns: int, *, random: bool = False, weight: bool = False) -> int:
        """Bytes inside the rounding of one slice: elements in eight bits, or units and random numbers; scales and their values."""
        size, square, stored = BLOCKS[self.scaling], max(16, SQUARE_ROWS[self.scaling]), self.scaling != "fp8_blockwise"
        summed = rounded_up(columns, size)
        elements = min(rows, rounded_up(slice_rows(rows, summed), square)) * summed
        scales = rounded_up(elements // summed, square if weight else 16) * summed // size * (stored + 2 * VALUE_BYTES)
        return scales + (VALUE_BYTES * (elements * (1 + random) + 2) if self.scaling == "nvfp4" else elements)


def low_linears(
    sizes: tuple[int, int, tuple[int, ...], int], scaling: str, *, fused: bool, packed: tuple[bool, ...] = ()
) -> ScaledLinears | BlockLinears:
    """Linears of these rows, width, outputs and bytes of an element."""
    if scaling in BLOCKS:
        return BlockLinears(*sizes, scaling, packed)
    return ScaledLinears(*sizes, scaling == "rows", fused, packed, scaling == DELAYED)


class Operands(NamedTuple):
    """Sizes of operands of products.

    Attributes:
        scaling: Scaling of `fp8_linears`.
        itemsize: Bytes of an element of the matrices that operands are made of.
        fused: True if Triton kernels make the copies.
    """

    scaling: str
    itemsize: int
    fused: bool

    @property
    def emulated(self) -> bool:
        """True if operands are values in fp32."""
        return self.scaling in BLOCKS

    def one(self, rows: int, columns: int, *, second: bool = False, transposed: bool = False, gradient: bool = False) -> tuple[int, int]:
        """Bytes of the operand [rows, columns] with its scales, and those inside its making; arguments as of `reference.operand`."""
        if self.emulated:
            sizes = BlockLinears(0, 0, (), self.itemsize, self.scaling)
            return sizes._values(rows, columns), sizes._making(rows, columns, random=gradient)
        scaled = ScaledLinears(0, 0, (), self.itemsize, self.scaling == "rows", self.fused, delayed=self.scaling == DELAYED)
        made = scaled._copy(padded(rows) if second else rows, padded(columns))
        return made, scaled._making(columns, rows, BY_COLUMN) if transposed else scaled._making(rows, columns, BY_ROW)

    def product_bytes(self, rows: int, columns: int, itemsize: int) -> int:
        """Bytes of a product in addition to its result, `itemsize` an element: its values in fp32, or the result with padded columns."""
        if self.emulated:
            return VALUE_BYTES * rows * columns
        return rows * padded(columns) * itemsize if padded(columns) != columns else 0


def each_weight(outs: tuple[int, ...], packed: tuple[bool, ...]) -> list[tuple[int, bool]]:
    """The widths of outputs, with true for each whose weight is packed."""
    return list(zip(outs, packed or (False,) * len(outs), strict=True))


def linear_passes(
    width: int, out: int, tokens: int, itemsize: int,
    *, by_row: bool, fused: bool, shares: bool, keeps: bool = True, has_weight_gradient: bool = True, packed: bool = False,
    delayed: bool = False,
) -> ScaledPasses:  # fmt: skip
    """The passes of one linear.

    Forward copies input and weight, and the input once more for the weight gradient where rows have scales; the input's gradient copies the
    output's gradient and the weight, the weight's the gradient again, and transposes the saved copy, or makes it from a saved input.

    Args:
        width: Width of the input.
        out: Width of the output.
        tokens: Tokens of the call.
        itemsize: Bytes of an element.
        by_row: True if rows and columns have scales.
        fused: True if Triton kernels make the copies.
        shares: True if the input is the previous linear's, whose copies are shared; the gradients of both are then added.
        keeps: True if the input's copy is kept in place of the input.
        has_weight_gradient: False for a frozen weight.
        packed: True for a weight that is given packed, which is turned for the input's gradient.
        delayed: True if matrices have scales that are given.
    """
    weight, given, made = width * out, tokens * width, tokens * out
    own = 0 if shares else given
    rows, columns = (BY_ROW, BY_COLUMN) if by_row else (GIVEN, GIVEN) if delayed else (WHOLE, WHOLE)
    of_input = copy_pass(own, width, itemsize, rows, fused=fused)
    for_weight = copy_pass(own if by_row or not keeps else 0, width, itemsize, columns, fused=fused)
    of_weight, of_turned_weight = (copy_pass(weight, width, itemsize, scaled, fused=fused) for scaled in (rows, columns))
    if packed:  # the input, or a copy without the scales between its rows; and its transpose
        of_turned_weight = Pass(2 * weight, 0, 1)
        of_weight = of_turned_weight if by_row else NOTHING
    of_gradient, of_turned_gradient = (copy_pass(made, out, itemsize, scaled, fused=fused) for scaled in (rows, columns))
    first, turned = (for_weight, Pass(2 * own, 0, 1 if own else 0)) if keeps else (NOTHING, for_weight)
    added = Pass(3 * given * itemsize, 0, 1) if shares else NOTHING
    flops = 2 * width * out * tokens
    forward, back = Pass(given + weight + made * itemsize, flops, 1), Pass(made + weight + given * itemsize, flops, 1)
    last = Pass(made + given + weight * itemsize, flops * has_weight_gradient, 1)
    return (
        ScaledPass(summed(of_input, first, of_weight), forward),
        ScaledPass(summed(of_gradient, of_turned_weight, added), back),
        ScaledPass(summed(of_turned_gradient, turned), last),
    )


def copy_pass(elements: int, columns: int, itemsize: int, scaled: int, *, fused: bool) -> Pass:
    """The making of one copy of a matrix with these columns, whose parts `scaled` have a scale each."""
    if not elements:
        return NOTHING
    if fused:
        reads, launches = (1, 1) if scaled == GIVEN or in_one_pass(columns, scaled) else (READS_FUSED, LAUNCHES_FUSED)
        return Pass(elements * (reads * itemsize + 1), 0, launches)
    slices = ceil_div(elements, max(columns, SCALED_SLICE_ELEMENTS))
    if scaled == GIVEN:  # the input is read for the maximum, then multiplied, clamped and rounded in fp32
        return Pass(elements * (2 * itemsize + 4 * VALUE_BYTES + 1), 0, LAUNCHES_GIVEN + LAUNCHES_OF_GIVEN_SLICE * slices)
    return Pass(elements * (READS_PLAIN * itemsize + 1), 0, LAUNCHES_PLAIN + LAUNCHES_OF_SLICE * slices)


def summed(*each: Pass) -> Pass:
    """Bytes and launches of several passes together."""
    return Pass(sum(one.num_bytes for one in each), 0, sum(one.launches for one in each))


def making_bytes(rows: int, columns: int, scaled: int, itemsize: int, *, fused: bool) -> int:
    """Bytes inside the making of a copy: the maxima of tiles, or in plain torch the slice that is scaled and the factors in its dtype."""
    if fused:
        return SCALE_BYTES * num_maxima(rows, columns, scaled)
    if scaled == GIVEN:
        return slice_rows(rows, columns) * columns * VALUE_BYTES
    return (slice_rows(rows, columns) * columns + (1, rows, columns)[scaled]) * itemsize


def num_maxima(rows: int, columns: int, scaled: int) -> int:
    """Maxima that the Triton kernels hold between their passes: of each tile or, scaled by row or by column, its rows or columns."""
    if scaled == GIVEN or in_one_pass(columns, scaled):
        return 0
    down, across = ceil_div(rows, SCALED_TILE), ceil_div(columns, SCALED_TILE)
    return (down * across, rows * across, columns * down)[scaled]


def delayed_bytes(num_weights: int, steps: int) -> int:
    """Bytes of the numbers of linears under delayed scaling, and of their largest magnitudes in that number of earlier steps."""
    return SCALE_BYTES * DELAYED_ROLES * num_weights * (DELAYED_NUMBERS + steps)


def in_one_pass(columns: int, scaled: int) -> bool:
    """True if one Triton kernel finds the scales and rounds, because a program holds complete rows."""
    return scaled == BY_ROW and columns <= LONGEST_ROW


def rounded_up(size: int, multiple: int) -> int:
    """The next multiple."""
    return ceil_div(size, multiple) * multiple


def slice_rows(rows: int, columns: int) -> int:
    """Rows of a matrix that are scaled at once."""
    return min(rows, max(1, SCALED_SLICE_ELEMENTS // max(columns, 1)))


def padded(size: int) -> int:
    """The next multiple that torch's scaled product accepts."""
    return ceil_div(size, MULTIPLE) * MULTIPLE
