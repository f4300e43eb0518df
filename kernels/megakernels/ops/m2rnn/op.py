"""The M²RNN recurrence. Saved: the inputs, starts, the state before every segment and the last state."""

from torch import Tensor

from megakernels._common import require, require_starts
from megakernels._common.scans import ScanOperation
from megakernels.ops.m2rnn import reference, sizes
from megakernels.ops.m2rnn.inputs import ACCUMULATED, GRADIENTS, M2rnnInputs

__all__ = ["m2rnn"]


def m2rnn(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, state_map: Tensor, D: Tensor, dt_bias: Tensor, A_log: Tensor,
    save_every: int,
    starts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Runs Z = tanh(S W + k vᵀ), S' = decay · S + (1 − decay) · Z, y = S'ᵀ q + D ⊙ v from S = 0, one state S [K, V] per head.

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
            None for one document per row. Each starts with S = 0. No gradient.

    Returns:
        [B, T, H, V], contiguous, in q's dtype.

    Saves:
        states: fp32 [B, ceil(T / save_every) + 1, H, K, V], the state before each segment, and the last.

    Scratch:
        Backward: states of a span of segments, their tanh and gradients, and the partial gradients of q and k: up to 512 MiB, or one
            segment. Sums for the parameters' gradients for every 16 positions.

    Triton:
        One kernel forward; three backward for each span of segments. States of more than 128 keys or 16 values use plain torch.

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


SCAN = ScanOperation(reference, sizes.accepts, "m2rnn", M2rnnInputs, GRADIENTS, ACCUMULATED, output_like="v", sizes=sizes)
_m2rnn, _m2rnn_backward = SCAN.register()
