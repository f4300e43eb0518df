"""Causal attention whose dot products are of eight-bit operands. Saved: the operands, their scales, starts, lse."""

import torch
from torch import Tensor
from torch.library import custom_op

from megakernels._common import join, only_needed, register_scratch, require, require_starts
from megakernels.ops.fp8_attention import reference
from megakernels.ops.fp8_attention.facts import NUM_SCALES, LowAttention
from megakernels.ops.fp8_attention.reference import E4M3, Form, Low
from megakernels.ops.fp8_linear.inputs import DTYPES, FORMATS

__all__ = ["fp8_attention"]


def fp8_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None,
    starts: Tensor | None = None, cap: float | None = None, gradient_format: str = "e5m2",
) -> Tensor:  # fmt: skip
    """Causal softmax attention of operands in eight bits; query head i reads key head i // (Hq / Hkv).

    Args:
        q: [B, T, Hq, D], fp32 or bf16.
        k: [B, T, Hkv, D], Hkv divides Hq.
        v: [B, T, Hkv, Dv].
        scale: factor on the scores.
        window: position i sees j with i − window < j ≤ i; None sees all j ≤ i.
        starts: int32 [B, T] or None: index of the first position of each position's document. No gradient.
        cap: scaled scores s become cap · tanh(s / cap); None leaves them.
        gradient_format: e4m3 or e5m2, in which the gradients of the output and of scores multiply.

    Returns:
        [B, T, Hq, Dv], contiguous, in q's dtype.

    Saves:
        q_low: e4m3 [B, T, Hq, D].
        k_low: e4m3 [B, T, Hkv, D].
        v_low: e4m3 [B, T, Hkv, Dv].
        scales: fp32 [3].
        lse: fp32 [B, Hq, T].

    Scratch:
        The operands in fp32, and of a block of queries its scores; backward also the gradient of the output and the sums of those of keys
        and values in fp32, and three times a block's scores. Plain torch runs on every device, and multiplies the values in fp32.

    Raises:
        ValueError: shapes or dtypes do not fit, window < 1 or cap ≤ 0.

    Source: Transformer Engine, `UnfusedDotProductAttention`; arXiv:2407.08608, section 3.3.
    """
    fits = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3]
    require(fits, "fp8_attention", "q must be [B,T,Hq,D], k [B,T,Hkv,D], v [B,T,Hkv,Dv]", q=q.shape, k=k.shape, v=v.shape)
    require(q.shape[2] % k.shape[2] == 0, "fp8_attention", "Hkv must divide Hq", Hq=q.shape[2], Hkv=k.shape[2])
    one = q.dtype == k.dtype == v.dtype and q.dtype in DTYPES
    require(one, "fp8_attention", "q, k and v must be fp32 or bf16", q=q.dtype, k=k.dtype, v=v.dtype)
    require(window is None or window >= 1, "fp8_attention", "window must be at least 1", window=window)
    require(cap is None or cap > 0, "fp8_attention", "cap must be above 0", cap=cap)
    require(gradient_format in FORMATS, "fp8_attention", "gradient_format must be e4m3 or e5m2", gradient_format=gradient_format)
    require_starts("fp8_attention", starts, q.shape[:2])
    out: Tensor = _fp8_attention(q, k, v, starts, scale, window, cap, gradient_format)[0]
    return out


@custom_op("megakernels::fp8_attention", mutates_args=())
def _fp8_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, scale: float, window: int | None, cap: float | None,
    gradient_format: str,  # noqa: ARG001  of the backward, which takes its constants from here
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    out, lse, low = reference.forward(q, k, v, Form(starts, scale, window, cap))
    return out, lse, *low


@_fp8_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    low_q, low_k, low_v = (each.new_empty(each.shape, dtype=E4M3) for each in (q, k, v))
    return out, lse, low_q, low_k, low_v, q.new_empty(NUM_SCALES, dtype=torch.float32)


@custom_op("megakernels::fp8_attention_backward", mutates_args=())
def _fp8_attention_backward(
    grad_out: Tensor, q_low: Tensor, k_low: Tensor, v_low: Tensor, scales: Tensor, starts: Tensor | None, lse: Tensor,
    scale: float, window: int | None, cap: float | None, gradient_format: str, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    low, form = Low(q_low, k_low, v_low, scales), Form(starts, scale, window, cap)
    made = reference.backward(grad_out, low, lse, form, FORMATS[gradient_format])
    return only_needed(each if need else None for each, need in zip(made, needs, strict=True))


@_fp8_attention_backward.register_fake
def _(grad_out: Tensor, q_low: Tensor, k_low: Tensor, v_low: Tensor, *others: list[bool]) -> list[Tensor]:
    return [grad_out.new_empty(each.shape) for each, need in zip((q_low, k_low, v_low), others[-1], strict=True) if need]


join(
    _fp8_attention,
    _fp8_attention_backward,
    outputs=("out", "lse", "q_low", "k_low", "v_low", "scales"),
    gradients=("q", "k", "v"),
)


def _sizes(q: Tensor, k: Tensor, v: Tensor, itemsize: int, starts: Tensor | None, window: int | None, cap: float | None) -> LowAttention:
    (batch, positions, heads, width), flags = q.shape, (starts is not None, cap is not None)
    return LowAttention(batch, positions, heads, k.shape[2], width, v.shape[3], itemsize, window, *flags)


def _forward_scratch(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, _scale: float, window: int | None, cap: float | None, _format: str
) -> int:
    return _sizes(q, k, v, q.itemsize, starts, window, cap).forward_bytes


def _backward_scratch(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, _scales: Tensor, starts: Tensor | None, _lse: Tensor,
    _scale: float, window: int | None, cap: float | None, *_: object,
) -> int:  # fmt: skip
    return _sizes(q, k, v, grad_out.itemsize, starts, window, cap).backward_bytes


register_scratch(_fp8_attention, _forward_scratch)
register_scratch(_fp8_attention_backward, _backward_scratch)
