"""Shared by the recurrence's kernels: a head's parameters, one position's gain, and the starts of documents."""

import triton
import triton.language as tl

from megakernels._common.tiles import LOG2_E, exp2, expm1, reciprocal, softplus


@triton.jit
def quick_tanh(x):  # type: ignore[no-untyped-def]
    """Hyperbolic tangent within 1e-6 of it, however small x is: its series to the ninth power where |x| < 0.25.

    Two special functions and a third of the instructions of `tiles.tanh`, which every position waits for.
    """
    square = x * x
    series = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    far = 1.0 - 2.0 * reciprocal(1.0 + exp2(tl.minimum(x, 40.0) * (2.0 * LOG2_E)))
    return tl.where(square < 0.0625, series, far)


@triton.jit
def gain_of(gate, bias, rate):  # type: ignore[no-untyped-def]
    """Returns gate + dt_bias, the log decay and 1 − decay, which expm1 keeps exact near decay 1; `gate` is an element of f."""
    raw = gate + bias
    log_decay = rate * softplus(raw)
    return raw, log_decay, -expm1(log_decay)


@triton.jit  # type: ignore[untyped-decorator]
def kept_of(starts, row, t, HAS_STARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """0 where a document begins, else 1."""
    if HAS_STARTS:
        return tl.where(tl.load(starts + row + t) == t, 0.0, 1.0)
    else:  # noqa: RET505  one branch is compiled
        return 1.0


@triton.jit
def operands_at(k, v, f, t, strides, ks, vs, in_k, in_v):  # type: ignore[no-untyped-def]
    """k, v and f of one position, fp32; pointers are of a sequence and head, strides of a position.

    Loops load the operands of the next position while they compute this one: a load takes longer than the rest of a position.
    """
    far = tl.cast(t, tl.int64)
    keys = tl.load(k + far * strides[0] + ks, mask=in_k, other=0.0).to(tl.float32)
    values = tl.load(v + far * strides[1] + vs, mask=in_v, other=0.0).to(tl.float32)
    return keys, values, tl.load(f + far * strides[2]).to(tl.float32)


@triton.jit
def parameters_of(state_map, D, dt_bias, A_log, head, value_width, vs, in_v):  # type: ignore[no-untyped-def]
    """A head's parameters, fp32: its state map [V, V], the skip's factors [V], dt_bias and the rate."""
    place = head * value_width * value_width + vs[:, None] * value_width + vs[None, :]
    weights = tl.load(state_map + place, mask=in_v[:, None] & in_v[None, :], other=0.0).to(tl.float32)
    skip = tl.load(D + head * value_width + vs, mask=in_v, other=0.0).to(tl.float32)
    return weights, skip, tl.load(dt_bias + head).to(tl.float32), -tl.exp(tl.load(A_log + head).to(tl.float32))
