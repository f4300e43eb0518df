"""Values that later layers read: packed after the stream at the end of a stage, unpacked at the start of the next.

A value is sent as raw bits, so that any dtype fits into the stream's tensor, and its gradient returns at the same offset.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaplan.blocks.payload import Payload
from megaplan.spec.local import Boundary, Part
from megarun.dtypes import TORCH_DTYPES

Key = tuple[int, str]
"""Key of a value: the layer that passes it on, and its name in that layer."""
Values = dict[Key, Tensor]


class LayerValues(NamedTuple):
    """The values that a layer reads and passes on.

    Attributes:
        earlier: Values that it reads with its input.
        given: Values that its operations read.
        inputs: The input of the layer, where later layers read that too.
        made: Results that it passes on.
        ended: Values that no later layer reads.
    """

    earlier: tuple[Key, ...]
    given: tuple[Key, ...]
    inputs: tuple[Key, ...]
    made: tuple[Key, ...]
    ended: tuple[Key, ...]


def values_of(payload: Sequence[Payload], layer: int) -> LayerValues:
    """The values of a layer, by its global index."""

    def keys(found: Iterable[Payload]) -> tuple[Key, ...]:
        return tuple([(value.source, value.name) for value in found])

    inputs, results = ([value for value in payload if (value.kept == "input") is of_inputs] for of_inputs in (True, False))
    read, own = (lambda value: layer in value.readers), (lambda value: value.source == layer)
    return LayerValues(
        keys(filter(read, inputs)),
        keys(filter(read, results)),
        keys(filter(own, inputs)),
        keys(filter(own, results)),
        keys(value for value in payload if value.readers[-1] == layer),
    )


def pack_values(x: Tensor, values: Sequence[Tensor], sent: Boundary) -> Tensor:
    """The stream [B, t, n · h] and the values that a stage sends -> one tensor [elements] in the stream's dtype."""
    packed: Tensor = _Pack.apply(sent, x, *values)  # type: ignore[no-untyped-call]
    return packed


def unpack_values(received: Tensor, of: Boundary) -> tuple[Tensor, Values]:
    """The tensor that a stage has sent -> the stream and the values, views of it."""
    stream, *values = _Unpack.apply(of, received)  # type: ignore[no-untyped-call]
    return stream, dict(zip(carried(of), values, strict=True))


def carried(over: Boundary) -> tuple[Key, ...]:
    """The values that a boundary carries after the stream."""
    return tuple([(part.value.source, part.value.name) for part in over.values if part.value is not None])


def read_together(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors that a layer reads, unchanged: the gradients of values leave it with its input's, when its backward is done."""
    same: tuple[Tensor, ...] = _Together.apply(*tensors)  # type: ignore[no-untyped-call]
    return same


class _Together(torch.autograd.Function):
    """The identity of several tensors."""

    @staticmethod
    def forward(_ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors unchanged."""
        return tensors

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Gradients unchanged."""
        return gradients


class _Pack(torch.autograd.Function):
    """Copies of the parts, one after another; gradients are views of the packed one."""

    @staticmethod
    def forward(ctx: Any, sent: Boundary, *parts: Tensor) -> Tensor:
        """Parts [..] -> [elements]."""
        ctx.sent = sent
        packed = _made(sent, parts[0].device)
        for place, part in zip(_places(packed, sent), parts, strict=True):
            place.copy_(part)
        return packed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """[elements] -> the gradient of each part that has one."""
        pairs = zip(_places(gradient, ctx.sent), ctx.sent.parts, strict=True)
        return None, *(place if _has_gradient(part) else None for place, part in pairs)


class _Unpack(torch.autograd.Function):
    """Views of the parts; their gradients are copied into one tensor, with zeros for elements outside all parts."""

    @staticmethod
    def forward(ctx: Any, of: Boundary, received: Tensor) -> tuple[Tensor, ...]:
        """[elements] -> parts [..]."""
        ctx.of = of
        ctx.set_materialize_grads(False)
        parts = tuple(_places(received.detach(), of))
        ctx.mark_non_differentiable(*(place for place, part in zip(parts, of.parts, strict=True) if not _has_gradient(part)))
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, Tensor]:
        """The gradient of each part, if it has one -> [elements]."""
        made = next(each for each in gradients if each is not None)
        joined = _made(ctx.of, made.device)
        for place, gradient in zip(_places(joined, ctx.of), gradients, strict=True):
            if gradient is None:
                place.zero_()
            else:
                place.copy_(gradient)
        return None, joined


def _made(of: Boundary, device: torch.device) -> Tensor:
    """A packed tensor whose parts are to be written; zeros between them, if they do not end where the next ones begin."""
    make = torch.empty if all(part.bytes == part.own_bytes for part in of.parts) else torch.zeros
    return make(of.bytes // of.stream.dtype.bytes, dtype=TORCH_DTYPES[of.stream.dtype], device=device)


def _has_gradient(part: Part) -> bool:
    return part.value is None or part.value.has_gradient


def _places(packed: Tensor, of: Boundary) -> Iterator[Tensor]:
    """Views of a packed tensor's parts, in their shapes and dtypes."""
    start, width = 0, of.stream.dtype.bytes
    for part in of.parts:
        place = packed[start : start + part.own_bytes // width]
        yield place.view(TORCH_DTYPES[part.dtype]).view(part.shape)
        start += part.bytes // width
