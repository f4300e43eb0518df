"""Mamba-2's state-space scan. Saved: the inputs, starts and the state at each chunk's start."""

import math
from typing import Any

from torch import Tensor
from torch.library import custom_op

from megakernels._common import dropped_bytes, fake_like, join, only_needed, require, require_starts, state_scratch
from megakernels.ops.ssd.choice import chooses_kernel, chosen
from megakernels.ops.ssd.sizes import backward_inside, forward_inside

__all__ = ["ssd"]


def ssd(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    chunk_size: int,
    starts: Tensor | None = None,
    *,
    dt_limits: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """Runs h_t = exp(Δ_t a) h_{t−1} + Δ_t x_t B_tᵀ, y_t = h_t C_t + D x_t from h = 0, with Δ = softplus(dt + dt_bias) and a = −exp(A_log).

    Args:
        x: [B, T, H, P].
        dt: [B, T, H].
        A_log: [H].
        B: [B, T, G, S]; head i reads group i // (H / G).
        C: [B, T, G, S].
        D: [H].
        dt_bias: [H].
        chunk_size: positions computed at once; T need not be a multiple. It changes what is saved, not the result beyond rounding.
        starts: int32 [B, T] or None: index of the first position of each position's document, for rows that hold several documents;
            None is one document a row. Each begins with h = 0. No gradient.
        dt_limits: smallest and largest Δ; one beyond them is taken as the limit, and its dt has no gradient.

    Returns:
        [B, T, H, P], contiguous, in x's dtype.

    Raises:
        ValueError: shapes do not fit, chunk_size < 1, or not 0 ≤ smallest Δ ≤ largest Δ.

    Source: arXiv:2405.21060, section 6.
    """
    num_heads = x.shape[2]
    per_head = A_log.shape == D.shape == dt_bias.shape == (num_heads,)
    fits = x.dim() == 4 and B.dim() == 4 and B.shape == C.shape and B.shape[:2] == x.shape[:2] and dt.shape == x.shape[:3] and per_head
    sizes = {"x": x.shape, "dt": dt.shape, "A_log": A_log.shape, "B": B.shape, "C": C.shape, "D": D.shape, "dt_bias": dt_bias.shape}
    require(fits, "ssd", "x must be [B,T,H,P], dt [B,T,H], B and C [B,T,G,S], A_log, D and dt_bias [H]", **sizes)
    require(num_heads % B.shape[2] == 0, "ssd", "G must divide H", H=num_heads, G=B.shape[2])
    require(chunk_size >= 1, "ssd", "chunk_size must be at least 1", chunk_size=chunk_size)
    require(0 <= dt_limits[0] <= dt_limits[1], "ssd", "dt_limits must rise from 0 or more", dt_limits=dt_limits)
    require_starts("ssd", starts, x.shape[:2])
    y: Tensor = _ssd(x, dt, A_log, B, C, D, dt_bias, starts, chunk_size, *dt_limits)[0]
    return y


@custom_op("megakernels::ssd", mutates_args=())
def _ssd(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    starts: Tensor | None,
    chunk_size: int,
    dt_min: float,
    dt_max: float,
) -> tuple[Tensor, Tensor]:
    y, states, _ = chosen(x, B, C).forward(None, x, dt, A_log, B, C, D, dt_bias, starts, chunk_size, dt_min, dt_max)
    return y, states


@custom_op("megakernels::ssd_backward", mutates_args=())
def _ssd_backward(
    grad_y: Tensor,
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    starts: Tensor | None,
    states: Tensor,
    chunk_size: int,
    dt_min: float,
    dt_max: float,
    needs: list[bool],
) -> list[Tensor]:
    found, _ = chosen(x, B, C).backward(None, grad_y, x, dt, A_log, B, C, D, dt_bias, starts, states, chunk_size, dt_min, dt_max)
    return only_needed(gradient if need else None for gradient, need in zip(found, needs, strict=True))


@_ssd.register_fake
def _(x: Tensor, _dt: Tensor, _A_log: Tensor, B: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, num_positions, num_heads, width = x.shape
    num_chunks = -(-num_positions // rest[-3])
    return fake_like(x), x.new_empty((batch, num_chunks, num_heads, width, B.shape[-1]))


join(_ssd, _ssd_backward, outputs=("y", "states"), gradients=("x", "dt", "A_log", "B", "C", "D", "dt_bias"))


def _of_forward(*operands: Any) -> int:
    *inputs, starts, chunk_size, _, _ = operands
    if not chooses_kernel(inputs[0], inputs[3], inputs[4]):
        return 0
    inside = forward_inside(None, inputs, starts, chunk_size)
    return inside.last + inside.scratch


def _of_backward(grad_y: Tensor, *operands: Any) -> int:
    *inputs, starts, states, chunk_size, _, _, needs = operands
    if not chooses_kernel(inputs[0], inputs[3], inputs[4]):
        return 0
    inside = backward_inside(None, grad_y, inputs, starts, states, chunk_size)
    return dropped_bytes(inputs, needs) + inside.last + inside.scratch


state_scratch(_ssd, _of_forward)
state_scratch(_ssd_backward, _of_backward)
