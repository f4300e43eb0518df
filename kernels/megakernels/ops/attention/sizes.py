"""Bytes and cost of attention's kernels for given tensors: the facts of their sizes, and copies of operands; needs no triton."""

from torch import Tensor

from megakernels._common.cost import Cost
from megakernels._common.scratch import copies_bytes
from megakernels.libraries import FLASH4, uses_library
from megakernels.ops.attention.facts import AttentionSizes, pairs_before
from megakernels.ops.attention.inputs import Attention, Places
from megakernels.ops.attention.vendor import is_aligned


def sizes_of(given: Attention) -> AttentionSizes:
    """The sizes of these arguments."""
    (batch, queries, heads, width), (keys, groups) = given.q.shape, given.k.shape[1:3]
    flags = given.cap is not None, given.relations is not None, given.sinks is not None, given.starts is not None
    found = AttentionSizes(batch, queries, keys, heads, groups, width, given.v.shape[3], given.q.element_size(), given.window, *flags)
    library = uses_library(FLASH4) and all(is_aligned(each) for each in given[:3])
    return found._replace(library=library, causal=given.causal)


def accepts(given: Attention) -> bool:
    """True if the kernels take these sizes and dtypes: products of one dtype, by a factor above 0."""
    return given.q.dtype == given.k.dtype == given.v.dtype and given.scale > 0 and sizes_of(given).accepted


def forward_inside(given: Attention, choice: Tensor | None = None) -> int:
    """Bytes of `kernel.forward` in addition to operands and results, with a mask of chosen keys if given."""
    copies = _copies(given) + (0 if choice is None else copies_bytes((choice,)))
    return sizes_of(given)._replace(masked=choice is not None).inside(copies=(copies, 0)).forward


def backward_inside(grad_out: Tensor, given: Attention, out: Tensor, lse: Tensor, *, sinks: bool = True, masked: bool = True) -> int:
    """Bytes of `kernel.backward` in addition to operands and results.

    Args:
        grad_out: The gradient of out.
        given: The arguments of the forward.
        out: The output of the forward.
        lse: The log-sum-exp of the forward.
        sinks: True if their gradient is a result.
        masked: True for queries in pieces, or with a mask of chosen keys.
    """
    own = out.numel() * out.element_size() if grad_out.dtype != given.q.dtype else copies_bytes(rows=(grad_out,))
    sink_bytes = given.sinks.element_size() if sinks and given.sinks is not None else 0
    return sizes_of(given)._replace(masked=masked).inside(sink_bytes, (0, own + copies_bytes((out, lse)) + _copies(given))).backward


def forward_cost(given: Attention, places: Places) -> Cost:
    """Cost of `kernel.forward`: the scores and their product with the values."""
    q, _, v = given[:3]
    return Cost({q.dtype: 2 * num_pairs(q, given.window, places) * (q.shape[3] + v.shape[3])})


def backward_cost(given: Attention, places: Places, *, masked: bool = True) -> Cost:
    """Cost of `kernel.backward`; `masked` as for `backward_inside`."""
    return Cost({given.q.dtype: 2 * num_pairs(given.q, given.window, places) * sizes_of(given)._replace(masked=masked).products()})


def num_pairs(q: Tensor, window: int | None, places: Places) -> int:
    """Pairs of a query and a key that it sees, of all sequences and heads. Rows count as one document, since `starts` has no values."""
    batch, num_queries, num_heads, _ = q.shape
    length = num_queries // len(places.firsts)
    return batch * num_heads * sum(pairs_before(first + length, window) - pairs_before(first, window) for first in places.firsts)


def _copies(given: Attention) -> int:
    dense = (each for each in (given.starts, given.classes, given.relations) if each is not None)
    return copies_bytes(dense, rows=given[:3])
