"""Attention to chosen keys in plain torch: attention to all keys with the others masked.

Queries may be a piece of a sequence: they come from position `first` on, and keys are all of the sequence up to the piece's end.

Source: the formulas of `megakernels.ops.attention.reference`.
"""

from torch import Tensor

from megakernels.ops.attention import reference
from megakernels.ops.chosen_attention.inputs import Chosen
from megakernels.ops.indexed_attention.bits import bit_values, unpacked


def forward(given: Chosen, first: int = 0) -> tuple[Tensor, Tensor]:
    """Returns out [B, T, H, V] in q's dtype and lse [B, H, T]."""
    return reference.forward(given.attended, first, _hides(given))


def backward(grad_out: Tensor, given: Chosen, out: Tensor, lse: Tensor, first: int = 0) -> tuple[Tensor, ...]:
    """Returns the gradients of q, k and v."""
    found = reference.backward(grad_out, given.attended, out, lse, (True, True, True, False), first, _hides(given))
    return tuple([gradient for gradient in found if gradient is not None])


def _hides(given: Chosen) -> reference.Hidden:
    bits = bit_values(given.q.device)

    def hidden(rows: slice, seen: slice) -> Tensor:
        return ~unpacked(given.choice[:, rows], seen, bits)[:, None, None]

    return hidden
