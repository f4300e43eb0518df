"""Grouped matrix products: row group e times matrix e."""

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from megakernels._common import upcast

ALIGNMENT_BYTES = 16
"""Alignment in bytes that torch's grouped product requires of every row stride and address."""


class RowGroups:
    """Consecutive groups of rows, `counts[e]` rows in group e; the counts sum to `num_rows`.

    bf16 operands with aligned widths use torch's grouped product, which reads the counts on the device. Others run one product per group,
    which copies the counts to the host: fp32 and fp64 have no grouped product on every device.
    """

    def __init__(self, counts: Tensor, num_rows: int) -> None:
        self._counts, self._num_rows = counts, num_rows
        self._ends = counts.cumsum(0, dtype=torch.int32)

    def times(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Rows [M, a] times matrices [E, a, b]: [M, b]."""
        if _groupable(rows, matrices):
            return grouped_mm(rows, matrices, offs=self._ends)
        out = torch.empty(rows.shape[0], matrices.shape[2], dtype=rows.dtype, device=rows.device)
        sizes = self._sizes()
        for block, found, matrix in zip(torch.split(rows, sizes), torch.split(out, sizes), matrices, strict=True):
            torch.mm(block, matrix, out=found)
        return out

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """Σ over each group's rows of left [M, a] ⊗ right [M, b]: [E, a, b]; zero for an empty group."""
        if _groupable(left, right):
            return grouped_mm(left.mT, right, offs=self._ends)
        out = torch.empty(self._counts.shape[0], left.shape[1], right.shape[1], dtype=left.dtype, device=left.device)
        sizes = self._sizes()
        for first, second, found in zip(torch.split(left, sizes), torch.split(right, sizes), out, strict=True):
            torch.mm(first.mT, second, out=found)
        return out

    def of_rows(self, values: Tensor) -> Tensor:
        """A row's own of each group's values [E, a]: [M, a]."""
        return torch.cat([value.expand(size, -1) for value, size in zip(values, self._sizes(), strict=True)])

    def add(self, rows: Tensor, values: Tensor | None, scale: Tensor | None = None) -> Tensor:
        """Rows [M, a], in place, with their group's values [E, a], times a row's scale [M, 1] if given; unchanged without values."""
        if values is None:
            return rows
        own = upcast(self.of_rows(values))
        return rows.copy_(upcast(rows) + (own if scale is None else own * scale))

    def total(self, rows: Tensor, scale: Tensor | None = None) -> Tensor:
        """The sum of each group's rows [M, a], times a row's scale [M, 1] if given: [E, a] in the accumulation dtype."""
        wide = upcast(rows) if scale is None else upcast(rows) * scale
        return torch.stack([block.sum(0) for block in torch.split(wide, self._sizes())])

    def _sizes(self) -> list[int]:
        return sizes_of(self._counts, self._num_rows)


def sizes_of(counts: Tensor, num_rows: int) -> list[int]:  # noqa: ARG001  the implementation on fake tensors reads the number of rows
    """The rows of each group on the host; they sum to `num_rows`."""
    sizes: list[int] = counts.tolist()
    return sizes


def _groupable(*operands: Tensor) -> bool:
    return all(
        operand.dtype == torch.bfloat16
        and operand.numel() > 0
        and operand.data_ptr() % ALIGNMENT_BYTES == 0
        and min(operand.stride()) == 1
        and all(stride == 1 or stride * operand.element_size() % ALIGNMENT_BYTES == 0 for stride in operand.stride())
        for operand in operands
    )
