"""Shared by the recurrence's kernels: one position's gain, and document starts."""

import triton
import triton.language as tl

from megakernels._common.tiles import expm1, softplus


@triton.jit
def gain_of(f, bias, rate):  # type: ignore[no-untyped-def]
    """Returns f + dt_bias, the log decay and 1 − decay, which expm1 keeps exact near decay 1."""
    raw = tl.load(f).to(tl.float32) + bias
    log_decay = rate * softplus(raw)
    return raw, log_decay, -expm1(log_decay)


@triton.jit  # type: ignore[untyped-decorator]
def kept_of(starts, row, t, HAS_STARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """0 where a document begins, else 1."""
    if HAS_STARTS:
        return tl.where(tl.load(starts + row + t) == t, 0.0, 1.0)
    else:  # noqa: RET505  one branch is compiled
        return 1.0
