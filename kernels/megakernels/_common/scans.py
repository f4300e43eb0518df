"""Registration of scans over a sequence: of whole sequences, and of pieces that begin and end with a state."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from megakernels._common.device import Implementation
from megakernels._common.numerics import accumulator_dtype
from megakernels._common.operations import operation, piece, types_of
from megakernels._common.scratch import dropped_bytes


@dataclass(frozen=True)
class ScanOperation(Implementation):
    """A scan from an initial to a final state, which saves the state before every segment of positions.

    `reference`, and `kernel` of the same package, have `forward(state, inputs)`, which returns y, the saved states and the last state, and
    `backward(grad_last, grad_y, inputs, states)`, which returns the gradients of the inputs, in order, and that of the first state. None
    for a state or its gradient is zero.

    Attributes:
        name: Name of the torch op.
        inputs: NamedTuple of the arguments of the torch op.
        gradients: Arguments that have a gradient.
        accumulated: Inputs to whose gradients a piece adds; it overwrites all others.
        output_like: Argument that has the shape of y.
        sizes: Module with `sizes_of`, whose result has the shape `states`, and with `forward_bytes`, `backward_bytes`, `forward_cost` and
            `backward_cost`, which take the arguments of `forward` and `backward`.
        rounds_states: True if the saved states have the dtype of the inputs, False if they have the accumulation dtype.
    """

    name: str
    inputs: type
    gradients: Sequence[str]
    accumulated: Sequence[str]
    output_like: str
    sizes: ModuleType
    rounds_states: bool = False

    def forward(self, state: Tensor | None, given: Any) -> tuple[Tensor, ...]:
        """y, the saved states and the last state, from the initial state."""
        results: tuple[Tensor, ...] = self.module(given).forward(state, given)
        return results

    def backward(self, grad_last: Tensor | None, grad_y: Tensor, given: Any, states: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """The gradients of the inputs and of the initial state, from those of the last state and of y."""
        results: tuple[tuple[Tensor, ...], Tensor] = self.module(given).backward(grad_last, grad_y, given, states)
        return results

    def register(self) -> tuple[CustomOpDef, CustomOpDef]:
        """The torch ops over whole sequences: from a zero state to outputs y and states, and the gradients of the inputs."""
        return operation(
            self.name,
            types_of(self.inputs),
            self.inputs,
            outputs=("y", "states"),
            saved=("states",),
            gradients=self.gradients,
            forward=lambda given: self.forward(None, given)[:2],
            backward=lambda grad_y, given, states, _needs: self.backward(None, grad_y, given, states)[0],
            fake=self._fake,
            forward_scratch=lambda given: self.scratch(given, "forward", None, given),
            backward_scratch=self._backward_scratch,
            forward_cost=lambda given: self.sizes.forward_cost(None, given),
            backward_cost=lambda grad_y, given, states, _needs: self.sizes.backward_cost(None, grad_y, given, states),
        )

    def register_piece(
        self, forward: Callable[..., tuple[Tensor, ...]] | None = None, forward_scratch: Callable[..., int] | None = None
    ) -> tuple[CustomOpDef, CustomOpDef]:
        """The torch ops over a piece, which copy their results to tensors of the caller.

        Args:
            forward: Function in place of `self.forward`.
            forward_scratch: Function for the scratch bytes of that.
        """
        return piece(
            self.name,
            types_of(self.inputs),
            self.inputs,
            made=("y", "states"),
            gradients=self.gradients,
            summed=self.accumulated,
            forward=forward or self.forward,
            backward=self.backward,
            forward_scratch=forward_scratch or (lambda state, given: self.scratch(given, "forward", state, given, copied=True)),
            backward_scratch=lambda *operands: self.scratch(operands[2], "backward", *operands, copied=True),
            forward_cost=self.sizes.forward_cost,
            backward_cost=self.sizes.backward_cost,
        )

    def scratch(self, given: Any, direction: str, *operands: Any, copied: bool = False) -> int:
        """Scratch bytes of a pass: the kernels' scratch, and either the last result, which is dropped, or the others, which are copied."""
        if not self.chooses_kernel(given):
            return 0
        found = getattr(self.sizes, f"{direction}_bytes")(*operands)
        return int((found.results if copied else found.last) + found.scratch)

    def _backward_scratch(self, grad_y: Tensor, given: Any, states: Tensor, needs: Iterable[bool]) -> int:
        """Scratch bytes of the backward over whole sequences, which drops gradients that are not required."""
        found = self.scratch(given, "backward", None, grad_y, given, states)
        return found + dropped_bytes((getattr(given, name) for name in self.gradients), needs) if self.chooses_kernel(given) else 0

    def _fake(self, given: Any) -> tuple[Tensor, Tensor]:
        first = given[0]
        dtype = first.dtype if self.rounds_states else accumulator_dtype(first.dtype)
        shape = self.sizes.sizes_of(given).states
        return first.new_empty(getattr(given, self.output_like).shape), first.new_empty(shape, dtype=dtype)
