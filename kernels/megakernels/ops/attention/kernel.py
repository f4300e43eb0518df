"""Triton kernels of causal attention: one forward, two backward.

- `attention_forward_kernel`: one program per tile of queries and head; online softmax over tiles of keys.
- `attention_query_kernel`: the same loop over keys for the gradient of q and for δ.
- `attention_key_kernel`: one program per tile of keys and key head; loops over the queries that see it. This kernel makes the gradients of
  k and v, for wide heads in two launches.

Tiles outside the causal triangle, the window or the document are skipped in both directions. No program adds to another's result, so the
backward is bitwise reproducible; it computes the weights twice instead. Operands of products have the input's dtype; products, softmax and
sums are fp32.

With relations a launch of `attention_key_kernel` makes the gradient of the term that each head adds to each key's scores, which
`attention_relation_kernel` sums for each class.
"""

import torch
import triton
from torch import Tensor

from megakernels._common.tiles import LOG2_E, on_device_of, unit_stride
from megakernels._common.tuning import with_options
from megakernels.ops.attention.inputs import Attention, Places
from megakernels.ops.attention.kernel_backward import attention_key_kernel, attention_query_kernel, attention_relation_kernel
from megakernels.ops.attention.kernel_forward import attention_forward_kernel
from megakernels.ops.attention.stored.backward import stored_backward
from megakernels.ops.attention.stored.facts import StoredTiles
from megakernels.ops.attention.tiles.facts import RELATION_TILE, constants, key_parts

HAS_REGISTERS = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7)
"""True for Triton's versions that compile `LARGE_TILES` without spills: 3.9 spills 72 bytes of registers."""


def forward(given: Attention, places: Places, bits: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Follows the contract of `reference.forward`, for fp32, bf16 and fp16, of queries in pieces.

    `bits`, int32 [B, T, words], has one bit per key position, 1 if the query chose that key. The number of keys is padded to a multiple
    of 128, so that every tile of keys has its words.
    """
    q, k, v = (unit_stride(each) for each in given[:3])
    batch, num_queries, num_heads, width = q.shape
    out = torch.empty(batch, num_queries, num_heads, v.shape[3], dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, num_heads, num_queries, dtype=torch.float32, device=q.device)
    numbers, options = constants("forward", width, v.shape[3], q.element_size(), masked=bits is not None, bent=_is_bent(given))
    if out.numel():
        with on_device_of(q):
            attention_forward_kernel[_query_grid(q, places, numbers["M"])](
                q, k, v, _starts(given), q if bits is None else bits, *_relations(given), out, lse, *_extents(q, k, given, places, bits),
                given.scale * LOG2_E.value, (given.cap or 0.0) * LOG2_E.value,
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
                **_flags(given, places, bits), **numbers, **options,
            )  # fmt: skip
    return out, lse


def backward(
    grad_out: Tensor,
    given: Attention,
    out: Tensor,
    lse: Tensor,
    places: Places,
    bits: Tensor | None = None,
    delta: Tensor | None = None,
    parts: StoredTiles | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and, if given, of the relations, for queries in pieces: of all except q the part that these queries make.

    `bits` as in `forward`; `delta` is written with Σ ∂L/∂out ⊙ out, fp32 as lse; with `parts` scores are stored.
    """
    q, k, v = (unit_stride(each) for each in given[:3])
    grad_out, out, lse = unit_stride(grad_out.to(q.dtype)), out.contiguous(), lse.contiguous()
    widths = q.shape[3], v.shape[3], q.element_size()
    starts, extents, flags = _starts(given), _extents(q, k, given, places, bits), _flags(given, places, bits)
    words = q if bits is None else bits
    strides = (*grad_out.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    grad_q, grad_k, grad_v = (torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (q, k, v))
    delta = torch.empty(lse.shape, dtype=torch.float32, device=q.device) if delta is None else delta
    relations, factors = _relations(given), (given.scale, given.cap or 0.0)
    grad_added, grad_relations = q, None
    if given.relations is not None:
        grad_added = torch.empty(q.shape[0], q.shape[2], k.shape[1], dtype=torch.float32, device=q.device)
        grad_relations = torch.empty(given.relations.shape, dtype=given.relations.dtype, device=q.device)
    if not q.numel():
        return grad_q, grad_k.zero_(), grad_v.zero_(), None if grad_relations is None else grad_relations.zero_()
    if parts is not None:
        with on_device_of(q):
            stored_backward(grad_out, given._replace(q=q, k=k, v=v), out, lse, delta, (grad_q, grad_k, grad_v), parts)
        return grad_q, grad_k, grad_v, None
    with on_device_of(q):
        numbers, options = constants("query", *widths, masked=bits is not None, bent=_is_bent(given))
        settings = {**flags, **numbers}
        attention_query_kernel[_query_grid(q, places, numbers["M"])](
            grad_out, q, k, v, starts, words, *relations, out, lse, delta, grad_q, *extents, *factors,
            *strides,
            **with_options("attention_query_kernel", options, settings, q.device),
        )  # fmt: skip
        numbers, options = constants("key", *widths, **key_tile(given, places, bits))
        for part in key_parts(*widths, relations=given.relations is not None):
            columns = q.shape[2] if part["ADDED"] else k.shape[2]
            settings = {"NUM_PIECES": len(places.firsts), **part, **flags, **numbers}
            attention_key_kernel[columns, triton.cdiv(k.shape[1], numbers["N"]), k.shape[0]](
                grad_out, q, k, v, starts, words, *relations, lse, delta, grad_k, grad_v, grad_added, *extents, *factors,
                *strides,
                **with_options("attention_key_kernel", options, settings, q.device),
            )  # fmt: skip
        if grad_relations is not None:
            num_relations, num_heads = grad_relations.shape
            attention_relation_kernel[(num_heads, triton.cdiv(num_relations, RELATION_TILE["R"]))](
                grad_added, relations[0], grad_relations, q.shape[0], k.shape[1], num_relations, num_heads, **RELATION_TILE, num_warps=4
            )
    return grad_q, grad_k, grad_v, grad_relations


def _query_grid(q: Tensor, places: Places, tile: int) -> tuple[int, int, int]:
    """Heads (ordered by group), tiles of queries (none with two pieces), and sequences."""
    num_pieces = len(places.firsts)
    return q.shape[2], num_pieces * triton.cdiv(q.shape[1] // num_pieces, tile), q.shape[0]


def _starts(given: Attention) -> Tensor:
    return given.q if given.starts is None else given.starts.contiguous()


def key_tile(given: Attention, places: Places, bits: Tensor | None) -> dict[str, bool]:
    """Properties of a call that decide the tile of the key kernel."""
    large = HAS_REGISTERS and given.starts is None and bits is None
    return {"masked": bits is not None, "bent": _is_bent(given), "pieces": len(places.firsts) > 1 or places.num_ranks > 1, "large": large}


def _is_bent(given: Attention) -> bool:
    """True if something is done to scaled scores."""
    return given.cap is not None or given.relations is not None


def _relations(given: Attention) -> tuple[Tensor, Tensor]:
    """Classes and relations, or placeholders that the kernels do not read."""
    if given.classes is None or given.relations is None:
        return given.q, given.q
    return given.classes.contiguous(), given.relations.contiguous()


def _extents(q: Tensor, k: Tensor, given: Attention, places: Places, bits: Tensor | None) -> tuple[int, ...]:
    """Lengths and positions that every kernel takes."""
    pieces = q.shape[1] // len(places.firsts), places.firsts[0], places.firsts[-1]
    keys = k.shape[1] // (2 * places.num_ranks), places.num_ranks
    words = 0 if bits is None else bits.shape[2]
    return q.shape[1], k.shape[1], *pieces, *keys, q.shape[2] // k.shape[2], given.window or 0, words


def _flags(given: Attention, places: Places, bits: Tensor | None) -> dict[str, bool]:
    flags = {"HAS_WINDOW": given.window is not None, "HAS_STARTS": given.starts is not None, "ZIG_ZAG": places.num_ranks > 1}
    return flags | {"HAS_BITS": bits is not None, "CAPPED": given.cap is not None, "HAS_RELATIONS": given.relations is not None}
