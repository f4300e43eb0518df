"""Chunks, bytes and cost of the kernels for given tensors: the facts of their sizes, and copies of operands; needs no triton."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megakernels._common.cost import Cost
from megakernels._common.scratch import copies_bytes
from megakernels.ops.attention import sizes as attention_sizes
from megakernels.ops.attention.inputs import Attention, Places
from megakernels.ops.indexed_attention.facts import LARGEST_INDEX_WIDTH, IndexedSizes, chunk_rows
from megakernels.ops.indexed_attention.reference import Indexed

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class QueryChunk(NamedTuple):
    """Some queries of one piece whose scores are held at once.

    Attributes:
        offset: Row of the first query.
        piece_first: Position of the first query of the piece.
        first: Position of the first query in the chunk.
        num_rows: Number of queries.
    """

    offset: int
    piece_first: int
    first: int
    num_rows: int


def sizes_of(given: Indexed, places: Places) -> IndexedSizes:
    """The sizes of these arguments."""
    heads, width = given.index_q.shape[2:]
    return IndexedSizes(attention_sizes.sizes_of(attended(given)), heads, width, len(places.firsts))


def accepts(given: Indexed) -> bool:
    """True if the kernels take these sizes and dtypes."""
    index = given.index_q.dtype in FLOATS and given.index_weights.dtype in FLOATS and given.keys.dtype in FLOATS
    return index and attention_sizes.accepts(attended(given)) and sizes_of(given, Places()).accepted


def accepts_keys(index_k: Tensor) -> bool:
    """True if the kernels make index keys of these."""
    return index_k.dtype in FLOATS and 0 < index_k.shape[2] <= LARGEST_INDEX_WIDTH


def attended(given: Indexed) -> Attention:
    """The attention to all keys that are visible."""
    return Attention(given.q, given.k, given.v, given.starts, given.scale, given.window, given.sinks)


def chunks(batch: int, num_queries: int, num_keys: int, places: Places) -> Iterator[QueryChunk]:
    """Chunks of all queries, none of two pieces."""
    length = num_queries // len(places.firsts)
    rows = max(1, chunk_rows(batch, length, num_keys))
    for piece, first in enumerate(places.firsts):
        for start in range(0, length, rows):
            yield QueryChunk(piece * length + start, first, first + start, min(rows, length - start))


def copied(given: Indexed) -> int:
    """Bytes of copies of operands that are not dense."""
    dense = [given.index_q, given.keys, given.index_weights, *([] if given.starts is None else [given.starts])]
    if given.cos.stride() != given.sin.stride():
        dense += [given.cos, given.sin]
    return copies_bytes(dense, rows=(given.q, given.k, given.v))


def forward_inside(given: Indexed, places: Places, *, returns_choice: bool = False) -> int:
    """Bytes of `kernel.forward` in addition to operands and results, of which out and lse come last.

    `returns_choice`: true if the bits are a result.
    """
    return sizes_of(given, places).inside((copied(given), 0, 0), returns_choice=returns_choice).forward


def backward_inside(grad_out: Tensor, given: Indexed, made: tuple[Tensor, ...], places: Places, *, sinks: bool = True) -> int:
    """Bytes of `kernel.backward` in addition to operands and results, of which those of q, k, v and, if `sinks`, of these come last."""
    out, lse, *saved = made
    own = out.numel() * given.q.element_size() if grad_out.dtype != given.q.dtype else copies_bytes(rows=(grad_out,))
    copies = 0, copied(given) + copies_bytes((lse, *saved)), own + copies_bytes((out,))
    sink_bytes = given.sinks.element_size() if sinks and given.sinks is not None else 0
    return sizes_of(given, places).inside(copies, sink_bytes=sink_bytes).backward


def forward_cost(given: Indexed, places: Places) -> Cost:
    """Cost of `kernel.forward`: index scores, and attention to all visible keys; those that are not chosen are masked."""
    found = dict(attention_sizes.forward_cost(attended(given), places).products)
    return _with_index(found, given, places, exact=1, narrow=0)


def backward_cost(given: Indexed, places: Places) -> Cost:
    """Cost of `kernel.backward`: attention's, its scores once more, index scores three times, and two products for their gradients."""
    found = dict(attention_sizes.backward_cost(attended(given), places).products)
    weights = 2 * attention_sizes.num_pairs(given.q, given.window, places) * given.q.shape[3]
    found[given.q.dtype] += weights
    return _with_index(found, given, places, exact=3, narrow=2)


def _with_index(found: dict[torch.dtype, int], given: Indexed, places: Places, *, exact: int, narrow: int) -> Cost:
    """The cost with index products added: `exact` in fp32, `narrow` in the dtype of the queries."""
    one = 2 * attention_sizes.num_pairs(given.index_q, given.window, places) * given.index_q.shape[3]
    for dtype, count in ((torch.float32, exact), (given.index_q.dtype, narrow)):
        found[dtype] = found.get(dtype, 0) + count * one
    return Cost({dtype: flops for dtype, flops in found.items() if flops})
