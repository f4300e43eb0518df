"""Mamba-2's state-space scan. Saved: the inputs, starts and the state at each chunk's start."""

import math

from torch import Tensor

from megakernels._common import require, require_starts
from megakernels._common.scans import ScanOperation
from megakernels.ops.ssd import reference, sizes
from megakernels.ops.ssd.inputs import ACCUMULATED, GRADIENTS, SsdInputs

__all__ = ["ssd"]


def ssd(
    x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor,
    chunk_size: int,
    starts: Tensor | None = None,
    *, dt_limits: tuple[float, float] = (0.0, math.inf),
) -> Tensor:  # fmt: skip
    """Runs h_t = exp(Δ_t a) h_{t−1} + Δ_t x_t B_tᵀ, y_t = h_t C_t + D x_t from h = 0, with Δ = softplus(dt + dt_bias) and a = −exp(A_log).

    Args:
        x: [B, T, H, P].
        dt: [B, T, H].
        A_log: [H].
        B: [B, T, G, S]; head i reads group i // (H / G).
        C: [B, T, G, S].
        D: [H].
        dt_bias: [H].
        chunk_size: positions computed at once; T need not be a multiple. It changes the saved states, and results only by rounding.
        starts: int32 [B, T] or None: index of the first position of each position's document, for rows that hold several documents;
            None for one document per row. Each starts with h = 0. No gradient.
        dt_limits: smallest and largest Δ; Δ is clamped to them, and the dt of a clamped Δ has no gradient.

    Returns:
        [B, T, H, P], contiguous, in x's dtype.

    Saves:
        states: [B, ceil(T / chunk_size), H, P, S] in x's dtype, the state at each chunk's start.

    Scratch:
        Forward: the last state, two values per position and head (fp32: three), and one per chunk and head. Backward: the same values,
        the gradients of the saved states and of the first one, three values (fp32: four) per position, head and block of 64 columns, five
        per tile and head, and for as many chunks as fit in 256 MiB, at least one: states before all tiles, their gradients, and per 16
        heads of a group the gradients of overlaps and, in turn, of C and B.

    Triton:
        Forward four kernels: steps and running sums, what each chunk adds to the state, the states of all chunks, and outputs; only the
        third is serial over chunks. Backward the first three again, then states of tiles and their gradients, pairs of positions, the
        gradients of x, those of C and of B in two kernels each, and those of dt and the parameters. Heads or states wider than 128 (fp32:
        32), and x, B and C of different dtypes, use plain torch.

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
    require(0 <= dt_limits[0] <= dt_limits[1], "ssd", "dt_limits must be increasing and at least 0", dt_limits=dt_limits)
    require_starts("ssd", starts, x.shape[:2])
    y: Tensor = _ssd(x, dt, A_log, B, C, D, dt_bias, starts, chunk_size, *dt_limits)[0]
    return y


SCAN = ScanOperation(reference, sizes.accepts, "ssd", SsdInputs, GRADIENTS, ACCUMULATED, output_like="x", sizes=sizes, rounds_states=True)
_ssd, _ssd_backward = SCAN.register()
