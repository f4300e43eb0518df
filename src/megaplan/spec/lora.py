"""The section `lora`: a frozen model with trained low-rank adapters at its linears.

Source: arXiv:2106.09685, section 4.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megaplan.dtypes import DType
from megaplan.scalars import FloatType, PositiveFloat, PositiveInt, Section


class Lora(Section):
    """Low-rank adaptation: an adapted linear computes x Wᵀ + alpha / rank · x Aᵀ Bᵀ; only A and B are trained.

    Attributes:
        rank: Rows of A and columns of B.
        alpha: Scale of the adapters' product, before the division by rank.
        families: Adapted linears: letters, for all their linears, or names (`q_proj`, `shared.up_proj`); null for all linears of layers.
        dtype: Dtype in which a rank stores its shards of the frozen parameters; null for `precision.params`.
    """

    rank: PositiveInt
    alpha: PositiveFloat
    families: Annotated[tuple[Annotated[str, Field(strict=True, min_length=1, max_length=64)], ...], Field(min_length=1)] | None = None
    dtype: FloatType | None = None

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
