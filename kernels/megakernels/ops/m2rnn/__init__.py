"""The M²RNN recurrence. Saved: the inputs, starts, the state before every segment and the last state."""

from typing import Any

from torch import Tensor
from torch.library import custom_op

from megakernels._common import accumulator_dtype, dropped_bytes, join, only_needed, require, require_starts, state_scratch
from megakernels.ops.m2rnn.choice import chooses_kernel, chosen
from megakernels.ops.m2rnn.sizes import backward_inside, forward_inside

__all__ = ["m2rnn"]


def m2rnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    state_map: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    save_every: int,
    starts: Tensor | None = None,
) -> Tensor:
    """Runs Z = tanh(S W + k vᵀ), S' = decay · S + (1 − decay) · Z, y = S'ᵀ q + D ⊙ v from S = 0, one state S [K, V] a head.

    Args:
        q: [B, T, K], shared by all heads.
        k: [B, T, K], shared by all heads.
        v: [B, T, H, V].
        f: [B, T, H]; decay = exp(−exp(A_log) · softplus(f + dt_bias)).
        state_map: W, [H, V, V].
        D: [H, V].
        dt_bias: [H].
        A_log: [H].
        save_every: positions of a segment; the state is saved before each. T need not be a multiple.
        starts: int32 [B, T] or None: index of the first position of each position's document, for rows that hold several documents;
            None is one document a row. Each begins with S = 0. No gradient.

    Returns:
        [B, T, H, V], contiguous, in q's dtype.

    Raises:
        ValueError: shapes do not fit, or save_every < 1.

    Source: arXiv:2603.14360.
    """
    sequences = {"q": q.shape, "k": k.shape, "v": v.shape, "f": f.shape}
    parameters = {"state_map": state_map.shape, "D": D.shape, "dt_bias": dt_bias.shape, "A_log": A_log.shape}
    fits = q.dim() == 3 and v.dim() == 4 and q.shape == k.shape and v.shape[:2] == q.shape[:2] and f.shape == v.shape[:3]
    require(fits, "m2rnn", "q and k must be [B,T,K], v [B,T,H,V], f [B,T,H]", **sequences)
    fits = state_map.shape == (*v.shape[2:], v.shape[3]) and D.shape == v.shape[2:] and dt_bias.shape == A_log.shape == v.shape[2:3]
    require(fits, "m2rnn", "for v [B,T,H,V], state_map must be [H,V,V], D [H,V], dt_bias and A_log [H]", v=v.shape, **parameters)
    require(save_every >= 1, "m2rnn", "save_every must be at least 1", save_every=save_every)
    require_starts("m2rnn", starts, q.shape[:2])
    y: Tensor = _m2rnn(q, k, v, f, state_map, D, dt_bias, A_log, starts, save_every)[0]
    return y


@custom_op("megakernels::m2rnn", mutates_args=())
def _m2rnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    state_map: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    starts: Tensor | None,
    save_every: int,
) -> tuple[Tensor, Tensor]:
    made: tuple[Tensor, Tensor] = chosen(q, v).forward(None, q, k, v, f, state_map, D, dt_bias, A_log, starts, save_every)
    return made


@custom_op("megakernels::m2rnn_backward", mutates_args=())
def _m2rnn_backward(
    grad_y: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    state_map: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    starts: Tensor | None,
    states: Tensor,
    save_every: int,
    needs: list[bool],
) -> list[Tensor]:
    found, _ = chosen(q, v).backward(None, grad_y, q, k, v, f, state_map, D, dt_bias, A_log, starts, states, save_every)
    return only_needed(gradient if need else None for gradient, need in zip(found, needs, strict=True))


@_m2rnn.register_fake
def _(q: Tensor, _k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, num_positions, key_width = q.shape
    num_states = -(-num_positions // rest[-1]) + 1
    states = q.new_empty((batch, num_states, v.shape[2], key_width, v.shape[3]), dtype=accumulator_dtype(q.dtype))
    return q.new_empty(v.shape), states


join(_m2rnn, _m2rnn_backward, outputs=("y", "states"), gradients=("q", "k", "v", "f", "state_map", "D", "dt_bias", "A_log"))


def _of_forward(*operands: Any) -> int:
    *inputs, starts, save_every = operands
    return forward_inside(None, inputs, starts, save_every).scratch if chooses_kernel(inputs[0], inputs[2]) else 0


def _of_backward(grad_y: Tensor, *operands: Any) -> int:
    *inputs, starts, states, save_every, needs = operands
    if not chooses_kernel(inputs[0], inputs[2]):
        return 0
    inside = backward_inside(grad_y, inputs, starts, states, save_every)
    return dropped_bytes(inputs, needs) + inside.last + inside.scratch


state_scratch(_m2rnn, _of_forward)
state_scratch(_m2rnn_backward, _of_backward)
