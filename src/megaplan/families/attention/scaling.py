"""Scaling of rotary frequencies for a longer context: `model.attention.rope_scaling`."""

import math
from typing import Annotated, Literal

from pydantic import Field

from megaplan.scalars import PositiveFloat, PositiveInt, Section, StrictBool


class LinearScaling(Section):
    """All rotary frequencies are divided by one factor (arXiv:2306.15595).

    Attributes:
        kind: linear.
        factor: Divisor of the frequencies.
    """

    kind: Literal["linear"]
    factor: PositiveFloat


class Llama3Scaling(Section):
    """Low rotary frequencies are divided, high ones are unchanged, the ones between are interpolated (Llama 3.1, arXiv:2407.21783).

    Attributes:
        kind: llama3.
        factor: Divisor of the low frequencies.
        low_freq_factor: Frequencies with fewer rotations than this in original_seq_length tokens are divided.
        high_freq_factor: Frequencies with more rotations than this in original_seq_length tokens are unchanged; at least low_freq_factor.
        original_seq_length: Tokens of a sequence before the context was extended.
    """

    kind: Literal["llama3"]
    factor: PositiveFloat
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_seq_length: PositiveInt = 8192


class YarnScaling(Section):
    """Low rotary frequencies are divided, high ones are kept, with a linear ramp between; cos and sin get a factor (arXiv:2309.00071).

    Attributes:
        kind: yarn.
        factor: Divisor of the low frequencies.
        original_seq_length: Tokens of a sequence before the context was extended.
        beta_fast: Frequencies with more rotations than this in original_seq_length tokens are unchanged; at least beta_slow.
        beta_slow: Frequencies with fewer rotations than this in original_seq_length tokens are divided.
        truncate: The ends of the ramp are rounded outwards to whole frequencies.
        attention_factor: Factor of cos and sin; null for 0.1 ln(factor) + 1, or 1 where factor is at most 1.
    """

    kind: Literal["yarn"]
    factor: PositiveFloat
    original_seq_length: PositiveInt
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    truncate: StrictBool = True
    attention_factor: PositiveFloat | None = None

    @property
    def table_factor(self) -> float:
        """Factor of cos and sin."""
        return yarn_factor(self.factor) if self.attention_factor is None else self.attention_factor


def yarn_factor(factor: float, weight: float = 1.0) -> float:
    """YaRN's factor of scores for a context that is `factor` times as long: 0.1 · weight · ln(factor) + 1, 1 up to a factor of 1."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


RopeScaling = Annotated[LinearScaling | Llama3Scaling | YarnScaling, Field(discriminator="kind")]
