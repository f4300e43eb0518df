"""FlashAttention-4's two functions with their parameters, in plain torch, and the arrays of its backward."""

from typing import Any

import torch
from torch import Tensor

from megakernels.ops.attention import reference
from megakernels.ops.attention.inputs import Attention
from megakernels.ops.attention.sinks import add_sinks, gradient_of_sinks

CALLS: list[tuple[str, dict[str, Any]]] = []
SCRATCH: list[Tensor] = []
"""Arrays of the last backward, without storage."""


def _given(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int | None, cap: float | None, sinks: Tensor | None = None) -> Attention:
    window = None if left is None else left + 1
    return Attention(q, k, v, None, scale, window, sinks, None, None, cap or None)


def _flash_attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, qv: Any = None,
    cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, seqused_q: Any = None, seqused_k: Any = None,
    max_seqlen_q: Any = None, max_seqlen_k: Any = None, min_seqlen_k: Any = None, page_table: Any = None,
    softmax_scale: Any = None, causal: bool = False, softcap: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, learnable_sink: Tensor | None = None,
    *, return_lse: bool = False, out: Any = None, lse: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    CALLS.append(("forward", {"sinks": learnable_sink is not None, "window": (window_size_left, window_size_right), "cap": softcap}))
    assert None not in (softmax_scale, out, lse)
    assert (causal, return_lse) == (True, True)
    made = add_sinks(*reference.forward(_given(q, k, v, softmax_scale, window_size_left, softcap)), learnable_sink)
    out.copy_(made[0])
    lse.copy_(made[1])
    return out, lse, None, None, None


def _flash_attn_bwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor,
    softmax_scale: Any = None, causal: bool = False, softcap: float = 0.0,
    window_size_left: int | None = None, window_size_right: int | None = None,
    *, deterministic: bool = False, dq: Any = None, dk: Any = None, dv: Any = None,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    CALLS.append(("backward", {"sinks": learnable_sink is not None, "window": (window_size_left, window_size_right), "cap": softcap}))
    assert (causal, deterministic, type(softcap)) == (True, True, float)
    assert q.dtype == k.dtype == v.dtype == out.dtype == dout.dtype
    SCRATCH[:] = scratch(q, k, v)
    given = _given(q, k, v, softmax_scale, window_size_left, softcap)
    *made, _ = reference.backward(dout, given, out, lse, (True, True, True, False))
    for place, value in zip((dq, dk, dv), made, strict=True):
        place.copy_(value)
    sinks = () if learnable_sink is None else (gradient_of_sinks(dout, out, lse, learnable_sink),)
    return dq, dk, dv, *sinks


def scratch(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """The arrays that the package's backward allocates on Hopper for dense causal rows, as its source does."""
    (batch, rows, heads, width), (keys, groups), value = q.shape, k.shape[1:3], v.shape[3]
    if width <= 64:
        m, n, multiple = 128, 128, 32
    elif width <= 128:
        m, n, multiple = 64, 128, 32
    else:
        m, n, multiple = 64, 96 if width <= 192 else 48, 64

    def up(number: int, of: int) -> int:
        return (number + of - 1) // of * of

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, keys = up(rows, m), up(keys, n)
    found = [made(batch, heads, rows * up(width, multiple)), made(batch, heads, rows), made(batch, heads, rows)]
    found.append(made(batch, heads, rows // m, 1, dtype=torch.int32))
    if heads > groups:
        found += [made(batch, groups, keys * up(each, multiple)) for each in (width, value)]
        found += [made(batch, groups, keys // n, 2, dtype=torch.int32) for _ in range(2)]
    return found
