"""Attention of a rank that has some equal pieces of a sequence, whatever chooses its keys.

The kernels read all pieces in place; plain torch attends piece by piece, and sums the gradients of the keys.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from megakernels._common import Cost, accumulator_dtype, as_stored, operation, types_of
from megakernels.ops.attention.choice import chooses_kernels, of_relations, runs_kernels
from megakernels.ops.attention.inputs import Attention, QueryPieces
from megakernels.ops.attention.reference import made_like
from megakernels.ops.attention.sinks import add_sinks, gradient_of_sinks
from megakernels.ops.attention.sizes import backward_cost, forward_cost


class AttentionOfPieces(NamedTuple):
    """Functions of an attention for its record of arguments, which every one of them takes.

    Attributes:
        record: The record.
        queries: Arguments with a row for each query.
        ordered: Arguments with a row for each key, in the order of the sequence.
        gradients: Arguments that have a gradient: q, k, v, sinks and, if there are any, relations.
        attended: Function that returns the attention to all visible keys.
        run: The kernels' forward of the record and places, without sinks.
        run_backward: The kernels' gradients of the output's gradient, the record, the outputs and places.
        plain: The forward in plain torch of the record and the first position.
        plain_backward: The gradients in plain torch of the output's gradient, the record, the outputs and the first position: of q, k, v
            and, if there are any, of the scores of keys.
        inside: Bytes of the kernels' forward in addition to operands and results.
        inside_backward: The same of their backward, of the output's gradient, the record and the outputs.
    """

    record: type
    queries: Sequence[str]
    ordered: Sequence[str]
    gradients: Sequence[str]
    attended: Callable[[Any], Attention]
    run: Callable[..., tuple[Tensor, Tensor]]
    run_backward: Callable[..., Sequence[Tensor | None]]
    plain: Callable[..., tuple[Tensor, Tensor]]
    plain_backward: Callable[..., tuple[Tensor | None, ...]]
    inside: Callable[[Any], int]
    inside_backward: Callable[..., int]

    def register(self, name: str) -> tuple[CustomOpDef, CustomOpDef]:
        """The torch ops of this name, forward and backward."""
        return operation(
            name,
            types_of(self.record) | {"query_pieces": list[int], "key_pieces": list[int]},
            QueryPieces.binder(self.record),
            outputs=("out", "lse"),
            saved=("out", "lse"),
            gradients=self.gradients,
            forward=lambda pieces: add_sinks(*self._without_sinks(pieces), pieces.given.sinks),
            backward=self._backward,
            fake=lambda pieces: made_like(self.attended(pieces.given)),
            differentiable=False,
            forward_scratch=lambda pieces: self.inside(pieces.given) if self._chooses_kernels(pieces) else 0,
            backward_scratch=self._backward_scratch,
            forward_cost=self._forward_cost,
            backward_cost=self._backward_cost,
        )

    def _split(self, pieces: QueryPieces) -> Iterator[tuple[slice, slice, int, Any]]:
        return pieces.split(self.queries, ("k", "v"), self.ordered)

    def _without_sinks(self, pieces: QueryPieces) -> tuple[Tensor, Tensor]:
        places = pieces.places()
        if places is not None and runs_kernels(self.attended(pieces.given)):
            return self.run(pieces.given, places)
        outs, sums = zip(*(self.plain(given, first) for _, _, first, given in self._split(pieces)), strict=True)
        return torch.cat(outs, 1), torch.cat(sums, 2)

    def _backward(self, grad_out: Tensor, pieces: QueryPieces, out: Tensor, lse: Tensor) -> Sequence[Tensor | None]:
        places = pieces.places()
        if places is not None and runs_kernels(self.attended(pieces.given)):
            return self.run_backward(grad_out, pieces.given, out, lse, places)
        q, k, v = pieces.given[:3]
        grad_keys, grad_values = (torch.zeros(like.shape, dtype=accumulator_dtype(q.dtype), device=like.device) for like in (k, v))
        added = None
        queries = []
        for rows, seen, first, given in self._split(pieces):
            found = self.plain_backward(grad_out[:, rows], given, out[:, rows], lse[:, :, rows], first)
            grad_q, grad_k, grad_v, *more = (gradient for gradient in found if gradient is not None)
            queries.append(grad_q)
            grad_keys[:, seen] += grad_k
            grad_values[:, seen] += grad_v
            for part in more:
                added = part.new_zeros(*part.shape[:2], k.shape[1]) if added is None else added
                added[..., seen] += part
        stored = (as_stored(grad, pieces.key_pieces).to(q.dtype) for grad in (grad_keys, grad_values))
        of_sinks = gradient_of_sinks(grad_out, out, lse, pieces.given.sinks)
        found = torch.cat(queries, 1), *stored, of_sinks, of_relations(self.attended(pieces.given), added)
        return found[: len(self.gradients)]

    def _chooses_kernels(self, pieces: QueryPieces) -> bool:
        return pieces.places() is not None and chooses_kernels(self.attended(pieces.given))

    def _backward_scratch(self, grad_out: Tensor, pieces: QueryPieces, out: Tensor, lse: Tensor) -> int:
        return self.inside_backward(grad_out, pieces.given, out, lse) if self._chooses_kernels(pieces) else 0

    def _forward_cost(self, pieces: QueryPieces) -> Cost:
        places = pieces.places()
        return Cost({}) if places is None else forward_cost(self.attended(pieces.given), places)

    def _backward_cost(self, _grad_out: Tensor, pieces: QueryPieces, _out: Tensor, _lse: Tensor) -> Cost:
        places = pieces.places()
        return Cost({}) if places is None else backward_cost(self.attended(pieces.given), places)
