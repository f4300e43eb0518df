"""The section `lora`: a frozen model with trained low-rank adapters at its linears.

Source: arXiv:2106.09685, section 4; with a base in four or eight bits arXiv:2305.14314.
"""

from typing import Annotated, Literal

from pydantic import Field

from megakernels.ops.packed_weight.facts import Packing
from megaplan.dtypes import DType
from megaplan.scalars import FloatType, PositiveFloat, PositiveInt, Section, StrictBool


class Lora(Section):
    """Low-rank adaptation: an adapted linear computes x Wᵀ + alpha / rank · x Aᵀ Bᵀ; only A and B are trained.

    Attributes:
        rank: Rows of A and columns of B.
        alpha: Scale of the adapters' product, before the division by rank.
        families: Adapted linears: letters, for all their linears, or names (`q_proj`, `shared.up_proj`); null for all linears of layers.
        dtype: Dtype in which a rank stores its shards of the frozen parameters; null for `precision.params`.
        base: Format of the frozen linears' weights: nf4 or int8, dequantised for each product; null to keep them in `dtype`.
        base_block: Block size: columns of such a weight with a common largest magnitude.
        double_quant: The magnitudes of blocks are in eight bits, with a mean and a step of each row; else in fp32.
    """

    rank: PositiveInt
    alpha: PositiveFloat
    families: Annotated[tuple[Annotated[str, Field(strict=True, min_length=1, max_length=64)], ...], Field(min_length=1)] | None = None
    dtype: FloatType | None = None
    base: Literal["nf4", "int8"] | None = None
    base_block: Annotated[int, Field(strict=True, ge=4, le=65536, multiple_of=4)] = 64
    double_quant: StrictBool = True

    @property
    def scale(self) -> float:
        """Factor of the adapters' product."""
        return self.alpha / self.rank

    def adapts(self, letter: str, linear: str) -> bool:
        """True if a linear of a letter's layers is adapted; `linear` is its name in the layer: `q_proj`, `shared.up_proj`."""
        named = self.families
        return named is None or any(entry in (letter, linear, linear.rpartition(".")[2]) for entry in named)

    def stored(self, params: DType) -> DType:
        """Dtype of the frozen parameters' shards; `params` is `precision.params`."""
        return params if self.dtype is None else self.dtype

    @property
    def packing(self) -> Packing | None:
        """Form of the frozen linears' weights; None if they are kept in `dtype`."""
        return None if self.base is None else Packing(self.base, self.base_block, self.double_quant)
