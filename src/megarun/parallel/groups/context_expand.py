"""The up-projection of gathered latents by groups of heads, forward and backward (`megarun.parallel.groups.context_latent`).

In 16 bits a rank multiplies its own queries' gradients of all keys and values, and sums the latents' gradients over the group. An
adapter is a second term of the same products; packed rows (`lora.base`) are made a matrix for each group.

In eight bits a sum of rounded parts is not the rounded sum. So the gradients of keys and values are summed over the group first, each rank
for its own tokens, and multiplied once all heads exist: the same products as without context parallelism. Forward expands rows of the
weight, whose scales are those of the whole weight, or differ by a power of two.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from megakernels import fp8_input_gradients, fp8_linears, fp8_weight_gradients
from megarun.parallel.groups.adapters import Adapter, adapter_of
from megarun.parallel.groups.context import ContextParallel
from megarun.parallel.groups.delayed import numbers_of
from megarun.parallel.groups.packed import PackedWeight, matrix, weight_of
from megarun.parallel.groups.scaled import Scaling, given_matrices, given_rows, scaling_of
from megarun.parallel.groups.tensor import TensorParallel


class UpProjection(NamedTuple):
    """The up-projection of a rank's heads.

    Attributes:
        weight: [H · (n + v), R], or the bytes of its rows.
        adapter: Adapter of the linear, or None.
        scaling: Low-precision settings; None if it multiplies in 16 bits.
        numbers: Numbers of delayed scaling.
    """

    weight: Tensor | PackedWeight
    adapter: Adapter | None
    scaling: Scaling | None
    numbers: list[Tensor]

    @classmethod
    def of(cls, module: nn.Linear) -> "UpProjection":
        """The up-projection that a linear describes."""
        scaling = scaling_of(module)
        numbers = [] if scaling is None else numbers_of((scaling.numbers,), records=torch.is_grad_enabled())
        return cls(weight_of(module), adapter_of(module), scaling, numbers)

    @property
    def trained(self) -> tuple[Tensor, ...]:
        """Parameters that may have gradients."""
        if self.adapter is not None:
            return self.adapter.a, self.adapter.b
        return () if isinstance(self.weight, PackedWeight) else (self.weight,)

    @property
    def num_rows(self) -> int:
        """Rows of the weight."""
        return (self.weight.rows if isinstance(self.weight, PackedWeight) else self.weight).shape[0]

    def rows(self, part: slice, dtype: torch.dtype) -> Tensor:
        """Some rows of the weight in 16 bits."""
        weight = self.weight
        return matrix(weight._replace(rows=weight.rows[part]) if isinstance(weight, PackedWeight) else weight[part], dtype)

    def narrow(self, latents: Tensor) -> Tensor | None:
        """The adapter's narrow rows [B, T, rank]; None without one."""
        return None if self.adapter is None else linear(latents, self.adapter.a)

    def expanded(self, latents: Tensor, narrow: Tensor | None, part: slice) -> Tensor:
        """Products of gathered latents [B, T, R] with some rows of the weight."""
        if self.scaling is not None:
            assert isinstance(self.weight, Tensor)
            rows, largest, taken = given_rows(self.weight, part, self.scaling.by)
            (made,) = fp8_linears(latents, None, [rows], [None], self.scaling.by, self.weight.dtype, [largest], self.numbers, taken)
            return made
        made = linear(latents, self.rows(part, latents.dtype))
        if self.adapter is not None and narrow is not None:
            made.flatten(0, -2).addmm_(narrow.flatten(0, -2), self.adapter.b[part].mT, alpha=self.adapter.scale)
        return made


class Groups(NamedTuple):
    """The groups over which latents are gathered."""

    tp: TensorParallel
    cp: ContextParallel

    def gathered(self, own: Tensor) -> Tensor:
        """Latents of the rank's tokens -> latents of its positions in the context group."""
        return own if self.tp.degree == 1 else self.tp.start_gather(own).wait()

    def reduced(self, partial: Tensor) -> Tensor:
        """Partial gradients of these -> sums for the rank's tokens."""
        return partial if self.tp.degree == 1 else self.tp.start_reduce(partial).wait()


class Gradients:
    """Gradients of latents and of the up-projection in 16 bits, summed over groups of heads."""

    def __init__(self, groups: Groups, up: UpProjection, latents: Tensor, narrow: Tensor | None, *, trains: bool) -> None:
        self._groups, self._up, self._latents, self._narrow = groups, up, latents, narrow
        self._sum = latents.new_zeros(latents.shape, dtype=torch.float32)
        self._of_narrow = None if narrow is None else narrow.new_zeros(narrow.shape, dtype=torch.float32)
        self._of_rows = torch.empty_like(up.trained[-1]) if trains else None

    def take(self, part: slice, gradient: Tensor) -> None:
        """Take the gradients of a group's keys and values [B, T, rows]."""
        up, flat, multiplied = self._up, gradient.flatten(0, 1), self._latents
        if up.adapter is not None and self._narrow is not None and self._of_narrow is not None:
            self._of_narrow += (flat @ up.adapter.b[part]).view(self._narrow.shape)
            multiplied = self._narrow
        if self._of_rows is not None:
            torch.mm(flat.mT, multiplied.flatten(0, 1), out=self._of_rows[part])
        self._sum += (flat @ up.rows(part, flat.dtype)).view(self._latents.shape)

    def finish(self, own: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Gradients of the rank's own latents, and of `UpProjection.trained`; the object is of no use after."""
        adapter, found = self._up.adapter, (self._of_rows,) * len(self._up.trained)
        if adapter is not None and self._of_narrow is not None and self._of_rows is not None:
            of_narrow = self._of_narrow.mul_(adapter.scale).to(own.dtype).flatten(0, 1)
            found = of_narrow.mT @ self._latents.flatten(0, 1), self._of_rows.mul_(adapter.scale)
            self._sum += (of_narrow @ adapter.a).view(self._sum.shape)
            del of_narrow
        del self._latents, self._narrow, self._of_narrow
        return self._groups.reduced(self._groups.cp.reduce(self._sum.to(own.dtype))), found


class ScaledGradients:
    """The same in eight bits: gradients of keys and values of the rank's own tokens, which multiply at the end."""

    def __init__(self, groups: Groups, up: UpProjection, latents: Tensor) -> None:
        self._groups, self._up = groups, up
        shape = latents.shape[0], latents.shape[1] // groups.cp.degree, up.num_rows
        self._own = latents.new_empty(shape)

    def take(self, part: slice, gradient: Tensor) -> None:
        """Take the gradients of a group's keys and values [B, T, rows]."""
        self._own[..., part] = self._groups.cp.reduce(gradient)

    def finish(self, own: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Gradients of the rank's own latents, and of `UpProjection.trained`."""
        (weight,), scaling, numbers = self._up.trained, self._up.scaling, self._up.numbers
        assert scaling is not None
        given, largest = given_matrices([weight], turned=True)
        partial = fp8_input_gradients([self._own], given, scaling.by, scaling.gradient_format, largest, numbers)
        of_latent = self._groups.reduced(partial)
        del partial, given
        multiplied = self._groups.gathered(own)
        how = None, own.shape[-1], scaling.by, scaling.gradient_format, [False], numbers
        return of_latent, tuple(fp8_weight_gradients([self._own], multiplied, *how))
