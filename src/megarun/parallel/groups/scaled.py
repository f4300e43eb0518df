"""Linears that multiply in eight bits (`precision.recipe`), alone or with the collectives of a TP group.

A call multiplies one input by several weights. A separate autograd node saves what its backward reads before the products run: the input's
copy for the weight gradients, or the input itself if it is saved anyway. The recomputation of a region stops when the last of its saved
tensors exists, so the products of a call at its end do not run again. The weights' copies are made for each product.

Under TP tokens are gathered in 16 bits, and the rank saves its local tokens' part of the quantised copy, with the scales of all tokens:
backward gathers the copy. Scales are powers of two, so a rank's scales need no maximum of other ranks (`megakernels.fp8_linears`); under
delayed scaling all ranks have the scales from the previous step.

Source: torchao 0.18, `Float8Linear` (which keeps the 16-bit input).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megakernels import fp8_input_gradients, fp8_linears, fp8_quantize, fp8_weight_gradients
from megakernels.ops.fp8_linear.facts import ONE_SCALE, SQUARE_ROWS
from megakernels.ops.fp8_linear.packing.facts import squares
from megarun.parallel.groups.deferred import leave_pending
from megarun.parallel.groups.delayed import OwnNumbers, numbers_of

KEPT_DTYPE = torch.float8_e4m3fn


class Scaling(NamedTuple):
    """Low-precision settings of a linear.

    Attributes:
        by: tensor or rows, the unit with one scale; delayed for scales of past steps; mxfp8, nvfp4 or fp8_blockwise for scales of blocks.
        gradient_format: e4m3 or e5m2, in which outputs' gradients multiply.
        keeps_low: True if the input's copy is kept in place of the input.
        may_wait: True if a split backward defers the weight gradients.
        numbers: Numbers of delayed scaling; None for others.
    """

    by: str
    gradient_format: str
    keeps_low: bool
    may_wait: bool = True
    numbers: OwnNumbers | None = None


class PackedMatrix:
    """A weight that FSDP2 gathers packed (`megarun.parallel.apply.packed`), which its placeholder of no elements carries.

    Attributes:
        largest: The weight's largest magnitude, fp32 [1], or of its columns, of each matrix of a bank; None if no scale depends on it.
        both: True if a row holds the elements of both products, the forward's first.
        has_other: True if the elements of the two products differ.
        turned: True if the gathered copy is only for the input's gradient, False if for the forward.
        rows: Packed rows, uint8.
    """

    def __init__(self, largest: Tensor | None, *, both: bool, has_other: bool) -> None:
        """Nothing is gathered yet."""
        self.largest, self.both, self.has_other, self.turned = largest, both, has_other, False
        self.rows: Tensor | None = None

    def operand(self, *, turned: bool) -> Tensor:
        """The packed rows for the forward, or turned for the gradient of the input."""
        if self.rows is None or (self.has_other and not self.both and turned != self.turned):
            raise RuntimeError("a packed weight is not gathered for this product, which is a bug")
        if not self.both:
            return self.rows
        half = self.rows.shape[1] // 2
        return self.rows[:, half:] if turned else self.rows[:, :half]


def attach(placeholder: Tensor, packed: PackedMatrix) -> None:
    """Attach a weight's gathered copy to its placeholder."""
    placeholder.packed_matrix = packed  # type: ignore[attr-defined]  # `packed_of` reads it


def packed_of(weight: Tensor | None) -> PackedMatrix | None:
    """The packed matrix of a weight that is gathered packed; None for others."""
    return getattr(weight, "packed_matrix", None)


def given_matrices(weights: Sequence[Tensor], *, turned: bool) -> tuple[list[Tensor], list[Tensor | None]]:
    """The matrices of a product for these weights, and the largest magnitudes of packed ones."""
    packed = [packed_of(weight) for weight in weights]
    given = [weight if each is None else each.operand(turned=turned) for weight, each in zip(weights, packed, strict=True)]
    return given, [None if each is None else each.largest for each in packed]


def given_rows(weight: Tensor, part: slice, by: str) -> tuple[Tensor, Tensor | None, slice | None]:
    """Some rows of the forward's matrix for a weight, with values shared by more rows.

    Returns:
        The rows of all blocks that have these, the largest magnitudes that scales depend on, and where these rows are if they are fewer.
    """
    (whole,), (largest,) = given_matrices([weight], turned=False)
    height = SQUARE_ROWS.get(by, 1)
    first, last = part.start // height, -(-part.stop // height)
    if by == "nvfp4" and largest is None:
        largest = torch.linalg.vector_norm(whole, float("inf")).float()
    if by == "fp8_blockwise" and largest is not None:
        largest = largest.view(squares(*weight.shape))[first:last].flatten()
    rows = whole[first * height : last * height]
    taken = slice(part.start - first * height, part.stop - first * height)
    return rows, largest, None if taken == slice(0, rows.shape[0]) else taken


class _Arriving(Protocol):
    def wait(self) -> Tensor: ...


class TensorGroup(Protocol):
    """A TP group's collectives (`megarun.parallel.groups.tensor.TensorParallel`)."""

    @property
    def degree(self) -> int:
        """Number of ranks."""
        ...

    @property
    def index(self) -> int:
        """Rank within the group."""
        ...

    def start_gather(self, x: Tensor) -> _Arriving:
        """Start to gather local tokens."""
        ...

    def start_reduce(self, partial: Tensor) -> _Arriving:
        """Start a reduce-scatter of partial results."""
        ...


def scaling_of(module: nn.Module) -> Scaling | None:
    """Low-precision settings of a linear; None if it does not multiply in eight bits."""
    return getattr(module, "scaling", None)


def multiply(
    group: TensorGroup, scalings: Sequence[Scaling], x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Multiply one input by several linears, which are column-parallel under TP.

    Args:
        group: The TP group that gathers the input's tokens; a group of one rank if all tokens are already there.
        scalings: Low-precision settings of each product, which differ in their numbers alone.
        x: [B, t, in], 16 bits or fp32.
        weights: [out, in] each, as gathered.
        biases: [out] each or None.

    Returns:
        [B, T, out] each.
    """
    scaling, records = scalings[0], torch.is_grad_enabled()
    numbers = numbers_of((each.numbers for each in scalings), records=records)
    if not records:
        return tuple(_Products.forward(None, None, group, scaling, numbers, x, None, None, *weights, *biases))
    multiplied, scale = None, None
    if scaling.keeps_low:
        with torch.no_grad():
            multiplied, scale, low, scales = _copies(group, scaling, numbers, x)
        x = _apply(_Keep, x, low, scales)
        del low, scales
    else:
        x = _apply(_Keep, x)
    results: tuple[Tensor, ...] = _apply(_Products, x.grad_fn, group, scaling, numbers, x, multiplied, scale, *weights, *biases)
    return results


def _copies(group: TensorGroup, scaling: Scaling, numbers: list[Tensor], x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """The operand with its scale, each None for x itself, and the kept copy with its scales."""
    by_row, own = scaling.by not in ONE_SCALE, numbers[0] if numbers else None
    kept_scaling = "columns" if scaling.by == "rows" else scaling.by
    if group.degree == 1:
        low, scales = fp8_quantize(x, kept_scaling, own)
        return (None, None, low, scales) if by_row else (low, scales, low, scales)
    gathered: Tensor | None = group.start_gather(x).wait()
    assert gathered is not None
    whole, scales = fp8_quantize(gathered, kept_scaling, own)
    if not by_row:
        gathered = None
    low = torch.unflatten(whole, 1, (group.degree, -1))[:, group.index].clone(memory_format=torch.contiguous_format)
    return (gathered, None, low, scales) if by_row else (whole, scales, low, scales)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)  # type: ignore[no-untyped-call]


class _Keep(torch.autograd.Function):
    """Saves the tensors that the backward of a call reads, before its products run; passes x on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *kept: Tensor) -> Tensor:
        """Identity of x; saves the given tensors for backward, or x if none is given."""
        ctx.save_for_backward(*(kept or (x,)))
        ctx.num_kept = len(kept)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient as it is."""
        return gradient, *(None for _ in range(ctx.num_kept))


class _Products(torch.autograd.Function):
    """The products of a call; the preceding node saves the tensors that its backward reads."""

    @staticmethod
    def forward(
        ctx: Any,
        kept: Any,
        group: TensorGroup,
        scaling: Scaling,
        numbers: list[Tensor],
        x: Tensor,
        multiplied: Tensor | None,
        scale: Tensor | None,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Weights and the same number of biases follow the multiplied tensor: if that is None, x's local tokens, gathered under TP."""
        half = len(parameters) // 2
        weights, biases = [weight for weight in parameters[:half] if weight is not None], parameters[half:]
        if ctx is not None:
            ctx.kept, ctx.group, ctx.scaling, ctx.numbers, ctx.width = kept, group, scaling, numbers, x.shape[-1]
            ctx.weights = weights  # save the parameters themselves, whose storages FSDP2 gathers again
            ctx.biased = [bias is not None for bias in biases]
        if multiplied is None:
            multiplied = group.start_gather(x).wait() if group.degree > 1 else x
        given, largest = given_matrices(weights, turned=False)
        return tuple(fp8_linears(multiplied, scale, given, biases, scaling.by, weights[0].dtype, largest, numbers))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Gradients of x, of the weights and of the biases."""
        group, (by, gradient_format, _, may_wait, _), weights, numbers = ctx.group, ctx.scaling, ctx.weights, ctx.numbers
        rows, *scales = ctx.kept.saved_tensors
        product = _WeightProduct(scales[0] if scales else None, ctx.width, by, gradient_format, numbers)
        gather = _RowGather(group, low=bool(scales))
        given, largest = given_matrices(weights, turned=True)
        gathers = group.degree > 1
        pending = may_wait and leave_pending(weights, rows, gradients, gather.whole if gathers else None, product.one_by_one)
        arriving = gather.start(rows) if gathers and not pending else None
        own = fp8_input_gradients(gradients, given, by, gradient_format, largest, numbers)
        leaving = group.start_reduce(own) if gathers else None
        made: list[Tensor | None] = [None] * len(weights)
        if pending:
            sums = [gradient.flatten(0, -2).sum(0) for gradient, biased in zip(gradients, ctx.biased, strict=True) if biased]
        else:
            made[:], sums = product.of(rows if arriving is None else gather.arrived(arriving), gradients, ctx.biased)
        own = own if leaving is None else leaving.wait()
        each = iter(sums)
        return None, None, None, None, own, None, None, *made, *(next(each) if biased else None for biased in ctx.biased)


class _WeightProduct(NamedTuple):
    """The product that makes the gradients of a call's weights; a deferred one outlives the node of the call."""

    scale: Tensor | None
    width: int
    by: str
    gradient_format: str
    numbers: list[Tensor]

    def of(self, rows: Tensor, gradients: Sequence[Tensor], biased: Sequence[bool]) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of the weights, and of existing biases."""
        found = fp8_weight_gradients(gradients, rows, self.scale, self.width, self.by, self.gradient_format, biased, self.numbers)
        return found[: len(gradients)], found[len(gradients) :]

    def one_by_one(self, rows: Tensor, gradients: Sequence[Tensor]) -> Iterator[Tensor]:
        """Gradients of the weights, each freed by its reader."""
        made, _ = self.of(rows, gradients, [False] * len(gradients))
        while made:
            yield made.pop(0)


class _RowGather(NamedTuple):
    """Gathers each rank's saved part of a call's input, in eight bits if it is a copy."""

    group: TensorGroup
    low: bool

    def start(self, own: Tensor) -> _Arriving:
        """Start with the rank's own rows."""
        return self.group.start_gather(own.view(torch.uint8) if self.low else own)

    def arrived(self, arriving: _Arriving) -> Tensor:
        """Rows of all ranks."""
        return arriving.wait().view(KEPT_DTYPE) if self.low else arriving.wait()

    def whole(self, own: Tensor) -> Tensor:
        """Rows of all ranks, waited for."""
        return self.arrived(self.start(own))
