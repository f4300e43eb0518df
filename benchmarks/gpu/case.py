"""One operation at one size, as `benchmarks/gpu/run.py` checks and times it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megakernels.facts import Work

Inputs = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One row of the table.

    Attributes:
        name: Operation and size.
        num_tokens: Tokens of a call.
        shapes: Shapes of the inputs, by argument; the first begins with the rows, sequences and positions.
        call: The operation on the inputs.
        work: Per token, from the cost model.
        bound: Limit of which the target is a share: `copy` bandwidth, or `matmul` rate.
        scales: Standard deviations of inputs, where they are not 1.
        differentiable: True if all inputs have gradients.
        labels: Label of each of an input's rows, for a loss.
        window: Positions that a query sees, for attention.
        documents: True if rows hold several documents, for attention.
        capped: True if scores are capped, for attention.
        tile: Positions that a program of the kernels takes at once: a check looks at one less and one more.
    """

    name: str
    num_tokens: int
    shapes: dict[str, tuple[int, ...]]
    call: Callable[..., Tensor]
    work: Work
    bound: str
    scales: Mapping[str, float] = field(default_factory=dict)
    differentiable: bool = True
    labels: Callable[[Tensor], Tensor] | None = None
    window: int | None = None
    documents: bool = False
    capped: bool = False
    tile: int = 64

    def make(self, device: str, dtype: torch.dtype, num_tokens: int | None = None) -> Inputs:
        """Inputs, the same ones each time on a kind of device; of one sequence's first tokens, if so many are asked for."""
        generator, rows = torch.Generator(device).manual_seed(0), next(iter(self.shapes.values()))[:2]
        made = {}
        for name, whole in self.shapes.items():
            shape = (1, min(num_tokens, rows[1]), *whole[2:]) if num_tokens is not None and whole[:2] == rows else whole
            value = torch.randn(shape, generator=generator, dtype=torch.float32, device=device) * self.scales.get(name, 1.0)
            made[name] = (value - 4 if name == "dt_bias" else value).to(dtype).requires_grad_(self.differentiable)
        return made
