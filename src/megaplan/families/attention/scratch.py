"""What the Triton kernels of the attention core hold inside themselves: one number per query and head in backward."""

from __future__ import annotations

from megaplan.blocks.dims import Dims
from megaplan.blocks.scratch import Inside
from megaplan.dtypes import DType
from megaplan.families.attention.section import GroupedQueryAttention, LatentAttention

CORE_WIDTH = {DType.BF16: 256, DType.FP16: 256, DType.FP32: 64}
"""Of a head of keys or values, at most, by dtype."""


def core_inside(dims: Dims, attention: GroupedQueryAttention | LatentAttention) -> Inside | None:
    """Of the core without an indexer. None where plain torch runs: `host.kernels: reference`, or heads wider than the kernels accept."""
    if not dims.kernels or max(head_widths(attention)) > CORE_WIDTH[dims.dtype]:
        return None
    return Inside(0, dims.stat_dtype.bytes * dims.batch * (attention.num_heads // dims.tp) * dims.tokens)


def head_widths(attention: GroupedQueryAttention | LatentAttention) -> tuple[int, int]:
    """Of a key and of a value."""
    if isinstance(attention, GroupedQueryAttention):
        return attention.head_dim, attention.head_dim
    return attention.qk_nope_head_dim + attention.qk_rope_head_dim, attention.v_head_dim
