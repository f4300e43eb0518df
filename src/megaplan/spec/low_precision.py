"""The section `precision.recipe`: how linears multiply in 8 or 4 bits."""

from typing import Literal

from megaplan.dtypes import DType
from megaplan.families.registry import Letter
from megaplan.low_precision import RecipeName
from megaplan.scalars import NaturalInt, PositiveInt, Section, StrictBool


class LowPrecision(Section):
    """Products that run in 8 or 4 bits, and the scaling of their operands; all others use `precision.params`.

    Attributes:
        name: Scaling granularity: a tensor (delayed: by its past maxima), a row, or a block of 128 (blockwise), 32 (mxfp8) or 16 (nvfp4).
        format: hybrid multiplies gradients as e5m2; null for the recipe's default: hybrid for per-tensor scales, e4m3 for others.
        families: Letters whose linears and expert banks use the recipe; null for all.
        first_last_bf16: Number of layers at each end of the stack that keep 16 bits.
        param_gather: Weights are gathered in the recipe's type, and there is no 16-bit copy; Megatron-Core also stores them in it.
        head: The output projection uses the recipe too.
        prediction: Multi-token prediction uses the recipe too.
        attention: The attention core uses the recipe too; megarun takes it under fp8_current.
        amax_history: Steps whose maxima fp8_delayed remembers.
        amax_compute: The maximum that fp8_delayed scales by: the largest of these steps, or the most recent.
        margin: Under fp8_delayed factors are divided by two to this power.
    """

    name: RecipeName
    format: Literal["hybrid", "e4m3"] | None = None
    families: tuple[Letter, ...] | None = None
    first_last_bf16: tuple[NaturalInt, NaturalInt] = (0, 0)
    param_gather: StrictBool = False
    head: StrictBool = False
    prediction: StrictBool = True
    attention: StrictBool = False
    amax_history: PositiveInt = 1024
    amax_compute: Literal["max", "most_recent"] = "max"
    margin: NaturalInt = 0

    def covers(self, letter: str, layer: int, num_layers: int) -> bool:
        """True if the linears of a layer of the stack multiply in the recipe's type."""
        first, last = self.first_last_bf16
        return (self.families is None or letter in self.families) and first <= layer < num_layers - last


def keeps_plain(own: DType, params: DType) -> bool:
    """True if layers with a separate dtype multiply in it even under a recipe: it is not bf16 and not the other layers' dtype."""
    return own not in (params, DType.BF16)
