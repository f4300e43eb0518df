"""Rotary angles: one fp32 table per stage, shared by its attention layers (R-11), a function of the position alone (R-63)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megaplan.spec.models import GroupedQueryAttention, LatentAttention


class Rotary(NamedTuple):
    """cos and sin of the angles, fp32 [T, R/2] each."""

    cos: Tensor
    sin: Tensor


def rotary_width(attention: GroupedQueryAttention | LatentAttention) -> int:
    """How many trailing dims R of a head are rotated."""
    return attention.qk_rope_head_dim if isinstance(attention, LatentAttention) else attention.rotary_dim or attention.head_dim


def rotary_table(positions: Tensor, width: int, theta: float, device: torch.device) -> Rotary:
    """Angles position · theta^(−2i/R), i < R/2, computed in fp64 and kept in fp32.

    Args:
        positions: Positions of this rank's tokens, [T].
        width: Number of rotated dims R; even unless no layer uses the table.
        theta: Base of the geometric series of frequencies.
        device: Device of the table.

    Source: arXiv:2104.09864, section 3.2.2.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    angles = positions.to(device, torch.float64)[:, None] * theta**-exponents
    del positions  # no other reference exists
    return Rotary(angles.cos().float(), angles.sin().float())


def unrotated(table: Rotary) -> Rotary:
    """The table of a layer without positions: angle 0, one fp32 value each, expanded to the shape of `table`."""
    return Rotary(torch.ones_like(table.cos[:1, :1]).expand_as(table.cos), torch.zeros_like(table.sin[:1, :1]).expand_as(table.sin))
