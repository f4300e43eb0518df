"""The relation bias: one table [classes, heads] that all A layers of a stage add to their scores, by the class of the key.

Classes are the token file's, as of structure embeddings. Several layers make parts of the table's gradient. Autograd would keep their sum
with the activations from the last layer's backward to the first's, so each layer adds its part to a buffer of the stage, in fp32, and the
gradient is made of the buffer when the stage's backward has passed all its layers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Relations(NamedTuple):
    """Inputs of A layers' relation bias.

    Attributes:
        classes: int32 [B, T], of all positions of the sequence, in its order.
        weight: [classes, heads], the rank's heads, without a gradient: FSDP2 would make one of zeros for a layer's input.
        sums: fp32, as weight: parts of its gradient.
        empty: Tensor without elements that requires a gradient: autograd calls an operation's backward only if an input requires a
            gradient.
    """

    classes: Tensor
    weight: Tensor
    sums: Tensor
    empty: Tensor

    def table(self) -> Tensor:
        """The weight, whose gradient is added to the sums."""
        found: Tensor = _IntoSums.apply(self.weight, self.sums, self.empty)  # type: ignore[no-untyped-call]
        return found


class RelationBias(nn.Module):
    """The table of a stage, and the buffer of its gradient's parts."""

    gradient_parts: Tensor

    def __init__(self, num_relations: int, num_heads: int) -> None:
        super().__init__()
        self.shape = num_relations, num_heads
        self.weight = nn.Parameter(torch.empty(self.shape))

    def add_gradient_parts(self, device: torch.device) -> None:
        """Create the buffer, which is not in checkpoints."""
        self.register_buffer("gradient_parts", torch.zeros(self.shape, dtype=torch.float32, device=device), persistent=False)

    def forward(self, x: Tensor, classes: Tensor) -> tuple[Tensor, Relations]:
        """Return the residual stream, whose backward ends with the table's gradient, and the inputs of A layers; classes uint8 [B, T]."""
        through: Tensor = _FromSums.apply(x, self.weight, self.gradient_parts)  # type: ignore[no-untyped-call]
        return through, Relations(classes.to(torch.int32), self.weight.detach(), self.gradient_parts, x.new_empty(0, requires_grad=True))


class _IntoSums(torch.autograd.Function):
    """Identity of the weight; its gradient is added to the sums."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, sums: Tensor, _empty: Tensor) -> Tensor:
        """Return the weight."""
        ctx.sums = sums
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        """None, for it was added."""
        ctx.sums += gradient
        return None, None, None


class _FromSums(torch.autograd.Function):
    """The residual stream; in backward the sums become the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sums: Tensor) -> Tensor:
        """X as it is."""
        ctx.sums, ctx.dtype = sums, weight.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """The unchanged gradient, and the sums, which are then reset to zero."""
        made = ctx.sums.to(ctx.dtype, copy=True)
        ctx.sums.zero_()
        return gradient, made, None
