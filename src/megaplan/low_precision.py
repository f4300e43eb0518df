"""Low-precision copies of a matrix: bytes of elements and of scales, by recipe and by the generation of the device.

A matrix [M, K] multiplies from a row-wise copy, scaled along K, and its gradients from a column-wise one, scaled along M.

Source: `get_scale_shape` of `transformer_engine/pytorch/tensor/*.py` at d0067d0d; `torchao/float8` 0.18 for rows with a scale each.
"""

from dataclasses import dataclass
from typing import Literal

RecipeName = Literal["fp8_delayed", "fp8_current", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4"]
PER_TENSOR = frozenset({"fp8_delayed", "fp8_current"})
FORMATS = {
    "fp8_delayed": "hybrid",
    "fp8_current": "hybrid",
    "fp8_rowwise": "e4m3",
    "fp8_blockwise": "e4m3",
    "mxfp8": "e4m3",
}
"""Number formats. hybrid: e4m3 forward and e5m2 for gradients; 4 bits have one format."""
EMULATED = frozenset({"mxfp8", "nvfp4", "fp8_blockwise"})
"""Recipes whose products megarun computes in fp32 from the quantised values."""
SCALINGS = {"fp8_delayed": "delayed", "fp8_current": "tensor", "fp8_rowwise": "rows", **{name: name for name in sorted(EMULATED)}}
"""Scaling of a recipe's operands, as the operations of `megakernels` name it."""
GENERATIONS = {
    "fp8_delayed": ("ada", "hopper", "blackwell", "cdna"),
    "fp8_current": ("ada", "hopper", "blackwell", "cdna", "tpu"),
    "fp8_rowwise": ("ada", "hopper", "blackwell", "cdna"),
    "fp8_blockwise": ("hopper", "blackwell"),
    "mxfp8": ("blackwell",),
    "nvfp4": ("blackwell",),
}
"""Generations whose tensor cores multiply under a recipe; blockwise runs as MXFP8 on Blackwell, with its own scales."""
MULTIPLE = {"mxfp8": 32}
"""Required divisor of both dimensions of a weight, if it is not 16; partial blocks of 128 have a scale too."""
ROLES_FORWARD, ROLES_BACKWARD = 3, 2
"""Tensors of a linear with a history under delayed scaling: input, weight, output; the output's gradient, the input's."""
SCALE = 4


@dataclass(frozen=True, slots=True)
class Recipe:
    """Scaling of matrices on a generation of devices."""

    name: RecipeName
    generation: str

    @property
    def transposes(self) -> bool:
        """True if the column-wise copy has its own bytes: before Blackwell, and for scaled blocks."""
        return self.name not in PER_TENSOR or self.generation != "blackwell"

    @property
    def multiple(self) -> int:
        """Required divisor of the dimensions of a weight, and of the rows of an expert."""
        return MULTIPLE.get(self.name, 16)

    @property
    def row_padding(self) -> int:
        """Multiple to which an expert's rows are padded."""
        return 32 if self.name in ("mxfp8", "nvfp4") else 16

    def rowwise_bytes(self, rows: int, columns: int, *, weight: bool = False) -> int:
        """Bytes of a copy scaled along its columns."""
        return self._elements(rows * columns) + self._scales(rows, columns, weight)

    def columnwise_bytes(self, rows: int, columns: int, *, weight: bool = False) -> int:
        """Bytes of the separate copy scaled along its rows."""
        return self._elements(rows * columns) + self._scales(columns, rows, weight)

    def both_bytes(self, rows: int, columns: int, *, weight: bool = False) -> int:
        """Bytes of both copies, if the device needs two."""
        second = self.columnwise_bytes(rows, columns, weight=weight) if self.transposes else 0
        return self.rowwise_bytes(rows, columns, weight=weight) + second

    def _elements(self, count: int) -> int:
        return count // 2 if self.name == "nvfp4" else count

    def _scales(self, rows: int, columns: int, weight: bool) -> int:
        """Number of scales for blocks along `columns`, padded as the products read them."""
        if self.name in PER_TENSOR:
            return SCALE
        if self.name == "fp8_rowwise":
            return SCALE * rows
        if self.name == "fp8_blockwise":
            blocks = _up(columns, 128) // 128
            return SCALE * (_up(rows, 128) // 128 * _up(blocks, 4) if weight else blocks * _up(rows, 4))
        block = 32 if self.name == "mxfp8" else 16
        return _up(rows, 128) * _up(-(-columns // block), 4) + (SCALE if self.name == "nvfp4" else 0)


def history_bytes(length: int) -> int:
    """Bytes of one linear's histories of maxima under delayed scaling, with its scales."""
    return SCALE * (length + 1) * (ROLES_FORWARD + ROLES_BACKWARD)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
