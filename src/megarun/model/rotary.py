"""Rotary angles: one fp32 table per stage, shared by its attention layers (R-11), a function of the position alone (R-63)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megaplan.spec.models import GroupedQueryAttention, LatentAttention, LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from megarun.model.relation import Relations


class Rotary(NamedTuple):
    """Values that the attention layers of a stage share.

    Attributes:
        cos: Cosines of the angles, fp32 [T, R/2].
        sin: Sines of the angles, fp32 [T, R/2].
        window_cos: Cosines for layers with a window, if these have another base.
        window_sin: Sines for layers with a window, if these have another base.
        relations: A relation bias.
        given: Values of earlier layers, for a layer that reads them (`megaplan.blocks.payload`): its keys and values, or the keys that
            another one chose, int32 [B, T, words].
    """

    cos: Tensor
    sin: Tensor
    window_cos: Tensor | None = None
    window_sin: Tensor | None = None
    relations: Relations | None = None
    given: tuple[Tensor, ...] = ()

    def of(self, window: int | None) -> tuple[Tensor, Tensor]:
        """The table of a layer with this window."""
        if window is None or self.window_cos is None or self.window_sin is None:
            return self.cos, self.sin
        return self.window_cos, self.window_sin


def rotary_width(attention: GroupedQueryAttention | LatentAttention) -> int:
    """Number R of a head's trailing dims that are rotated."""
    return attention.qk_rope_head_dim if isinstance(attention, LatentAttention) else attention.rotary_dim or attention.head_dim


def window_rotary_width(attention: GroupedQueryAttention | LatentAttention) -> int:
    """The number R for layers with a window, if these have their own table."""
    own = attention.window_rotary_dim if isinstance(attention, GroupedQueryAttention) else None
    return own or rotary_width(attention)


def rotary_table(positions: Tensor, width: int, theta: float, device: torch.device, scaling: RopeScaling | None = None) -> Rotary:
    """Angles position · frequency, computed in fp64 and kept in fp32; frequency theta^(−2i/R), i < R/2, before any scaling.

    Args:
        positions: Positions of this rank's tokens, [T]; or of patches on n axes [T, n]; the R / 2 pairs are divided among the axes in
            order.
        width: Number of dims R that an axis rotates; even unless no layer uses the table.
        theta: Base of the geometric series of frequencies.
        device: Device of the table.
        scaling: Change of the frequencies for a longer context.

    Source: arXiv:2104.09864, section 3.2.2.
    """
    frequencies = rotary_frequencies(width, theta, device, scaling)
    angles = (positions.to(device, torch.float64)[..., None] * frequencies).flatten(1)
    del positions  # no other reference exists
    factor = scaling.table_factor if isinstance(scaling, YarnScaling) else 1.0
    return Rotary(angles.cos().mul_(factor).float(), angles.sin().mul_(factor).float())


def rotary_frequencies(width: int, theta: float, device: torch.device, scaling: RopeScaling | None = None) -> Tensor:
    """Rotation angle of each pair of dims per position, fp64 [R/2].

    Source: arXiv:2306.15595 (linear), arXiv:2407.21783 and the code published with it (llama3), arXiv:2309.00071, section 3.2 (yarn).
    """
    plain: Tensor = theta ** -(torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
    if scaling is None:
        return plain
    divided = plain / scaling.factor
    if isinstance(scaling, LinearScaling):
        return divided
    return torch.lerp(divided, plain, kept_share(plain, width, theta, scaling))


def kept_share(frequencies: Tensor, width: int, theta: float, scaling: Llama3Scaling | YarnScaling) -> Tensor:
    """Share of each frequency that is unchanged, 0 to 1; the rest is divided."""
    if isinstance(scaling, Llama3Scaling):
        turns = scaling.original_seq_length * frequencies / (2 * math.pi)
        if scaling.high_freq_factor == scaling.low_freq_factor:  # no frequency is between them
            return (turns >= scaling.low_freq_factor).to(turns.dtype)
        return ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    # the (fractional) index of the pair that makes this many rotations in the original context
    first, last = (
        width * math.log(scaling.original_seq_length / (2 * math.pi * turns)) / (2 * math.log(theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    ramp = (torch.arange(len(frequencies), dtype=torch.float64, device=frequencies.device) - first) / max(last - first, 0.001)
    return 1 - ramp.clamp(0, 1)


def unrotated(table: Rotary) -> Rotary:
    """The table of a layer without positions: angle 0, one fp32 value each, expanded to the shape of `table`."""
    return Rotary(torch.ones_like(table.cos[:1, :1]).expand_as(table.cos), torch.zeros_like(table.sin[:1, :1]).expand_as(table.sin))
