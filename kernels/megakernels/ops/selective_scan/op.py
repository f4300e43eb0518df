"""The selective scan of Mamba-1. Saved: the inputs, starts and the state before every segment."""

from torch import Tensor

from megakernels._common import require, require_starts
from megakernels._common.scans import ScanOperation
from megakernels.ops.selective_scan import reference, sizes
from megakernels.ops.selective_scan.inputs import ACCUMULATED, GRADIENTS, SelectiveScanInputs

__all__ = ["selective_scan"]


def selective_scan(
    x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor,
    save_every: int,
    starts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Runs h' = exp(−Δ · exp(A_log)) ⊙ h + Δ x B, y = Cᵀ h' + D x from h = 0, one state h [S] per channel; Δ = softplus(dt + dt_bias).

    Args:
        x: [B, T, I].
        dt: [B, T, I].
        A_log: [I, S].
        B: [B, T, S], of all channels.
        C: [B, T, S], of all channels.
        D: [I].
        dt_bias: [I].
        save_every: positions between two saved states.
        starts: int32 [B, T] or None: index of the first position of each position's document, for rows that hold several documents;
            None for one document per row. Each starts with h = 0. No gradient.

    Returns:
        [B, T, I], contiguous, in x's dtype.

    Saves:
        states: fp32 [B, ceil(T / save_every), I, S], the state before each segment.

    Scratch:
        Forward the last state, fp32 [B, I, S]. Backward the first state's gradient, every second state of a segment, and for each block of
        128 channels its parts of the gradients of B and C, fp32; sums of the parameters' gradients of each sequence. Both passes copy
        operands whose last dim is not dense.

    Triton:
        One kernel forward, one backward. Both iterate over positions, with a channel's states in one or two threads. More than 16 states a
        channel use plain torch.

    Raises:
        ValueError: shapes do not fit, or save_every < 1.

    Source: arXiv:2312.00752, section 3.2.
    """
    fits = x.dim() == 3 and dt.shape == x.shape and B.dim() == 3 and B.shape[:2] == x.shape[:2] and C.shape == B.shape
    require(fits, "selective_scan", "x and dt must be [B,T,I], B and C [B,T,S]", x=x.shape, dt=dt.shape, B=B.shape, C=C.shape)
    fits = A_log.shape == (x.shape[2], B.shape[2]) and D.shape == dt_bias.shape == x.shape[2:]
    require(fits, "selective_scan", "A_log must be [I,S], D and dt_bias [I]", A_log=A_log.shape, D=D.shape, dt_bias=dt_bias.shape)
    require(save_every >= 1, "selective_scan", "save_every must be at least 1", save_every=save_every)
    require_starts("selective_scan", starts, x.shape[:2])
    y: Tensor = _selective_scan(x, dt, A_log, B, C, D, dt_bias, starts, save_every)[0]
    return y


SCAN = ScanOperation(reference, sizes.accepts, "selective_scan", SelectiveScanInputs, GRADIENTS, ACCUMULATED, output_like="x", sizes=sizes)
_selective_scan, _selective_scan_backward = SCAN.register()
