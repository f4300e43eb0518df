"""Launches of attention's backward with stored scores."""

import torch
import triton
from torch import Tensor

from megakernels.facts import SMALLEST_DOT, block_of
from megakernels.ops.attention.inputs import Attention
from megakernels.ops.attention.stored.facts import (
    DELTA_ROWS,
    PRODUCT_OPTIONS,
    SCORE_OPTIONS,
    SCORE_TILE,
    STORED_STEP,
    StoredTiles,
    score_columns,
)
from megakernels.ops.attention.stored.kernel import (
    attention_delta_kernel,
    attention_product_key_kernel,
    attention_product_query_kernel,
    attention_score_kernel,
)
from megakernels.ops.attention.tiles.facts import split_width


def stored_backward(
    grad_out: Tensor, given: Attention, out: Tensor, lse: Tensor, delta: Tensor, grads: tuple[Tensor, Tensor, Tensor], parts: StoredTiles
) -> None:
    """Writes the gradients of q, k and v, and δ: scores of a part of the batch, then their products; operands have a last stride of 1."""
    (q, k, v), (grad_q, grad_k, grad_v) = given[:3], grads
    starts = q if given.starts is None else given.starts.contiguous()
    (batch, length, heads, width), groups, value_width = q.shape, k.shape[2], v.shape[3]
    shared, extents = heads // groups, (parts.band, parts.slots)
    flags = {"HAS_WINDOW": given.window is not None, "HAS_STARTS": given.starts is not None}
    weights, scores = torch.empty(2, parts.num_bytes // (2 * q.element_size()), dtype=q.dtype, device=q.device)
    numbers = {"VALUE": value_width, "V": block_of(value_width, SMALLEST_DOT), "M": DELTA_ROWS}
    attention_delta_kernel[heads, triton.cdiv(length, DELTA_ROWS), batch](
        grad_out, out, delta, length, heads, *grad_out.stride()[:3], **numbers, num_warps=4
    )
    tile = {axis: min(rows, parts.side) for axis, rows in SCORE_TILE.items()}
    tile |= {"C": score_columns(width, value_width), "WIDTH": width, "VALUE": value_width, "CAPPED": given.cap is not None}
    programs, rows = parts.slots * (parts.side // tile["M"]) * (parts.side // tile["N"]), min(STORED_STEP, parts.side)
    (wide, rest), sides = split_width(width), {"S": parts.side, **flags}
    of_keys = {"WIDTH": width, "D": wide, "R": rest}
    of_values = {"WIDTH": value_width, **dict(zip("DR", split_width(value_width), strict=True))}
    for first_batch in range(0, batch, parts.sequences):
        sequences = min(parts.sequences, batch - first_batch)
        for first_group in range(0, groups, parts.groups):
            some = min(parts.groups, groups - first_group)
            first_head = first_group * shared
            attention_score_kernel[programs, some * shared, sequences](
                grad_out, q, k, v, starts, lse, delta, weights, scores, length, heads, shared, given.window or 0, *extents, given.scale,
                given.cap or 0.0, first_batch, first_head,
                *grad_out.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], **tile, **sides, **SCORE_OPTIONS,
            )  # fmt: skip
            products = (weights, grad_out, grad_v, 1.0, of_values), (scores, q, grad_k, given.scale, of_keys)
            for store, columns, grad, scale, numbers in products:
                attention_product_key_kernel[some, parts.tiles, sequences](
                    store, columns, starts, grad, length, groups, shared, *extents, scale, first_batch, first_group, *columns.stride()[:3],
                    **numbers, **sides, M=rows, **PRODUCT_OPTIONS,
                )  # fmt: skip
            attention_product_query_kernel[some * shared, parts.tiles, sequences](
                scores, k, starts, grad_q, length, heads, shared, *extents, given.scale, first_batch, first_head, *k.stride()[:3],
                **of_keys, **sides, N=rows, **PRODUCT_OPTIONS,
            )  # fmt: skip
