"""The gated delta rule. Saved: the inputs, starts and the state before every segment."""

from torch import Tensor

from megakernels._common import require, require_starts
from megakernels._common.scans import ScanOperation
from megakernels.ops.gated_delta import reference, sizes
from megakernels.ops.gated_delta.inputs import ACCUMULATED, GRADIENTS, GatedDeltaInputs

__all__ = ["gated_delta"]


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor,
    chunk_size: int, save_every: int,
    starts: Tensor | None = None,
    *, beta_limit: float = 1.0,
) -> Tensor:  # fmt: skip
    """Runs S = α ⊙ S, S' = S + β k (v − Sᵀ k)ᵀ, y = S'ᵀ q from S = 0, one state S [K, V] per value head.

    α = exp(−exp(A_log) · softplus(decay + dt_bias)), β = beta_limit · sigmoid(beta), k is k over its length, and q is q over its length and
    √K.

    Args:
        q: [B, T, G, K]; value head i reads head i // (H / G).
        k: [B, T, G, K].
        v: [B, T, H, V].
        decay: [B, T, H], one decay a head, or [B, T, H, K], one a row of the state.
        beta: [B, T, H].
        A_log: [H].
        dt_bias: [H], or [H, K] as decay.
        chunk_size: positions computed at once, in the kernels at most 64 (fp32: 16); T need not be a multiple. It changes only rounding.
        save_every: positions between two saved states. A new chunk starts at each.
        starts: int32 [B, T] or None: index of the first position of each position's document, for rows that hold several documents;
            None for one document per row. Each starts with S = 0. No gradient.
        beta_limit: the largest β; above 1 the state can change its sign.

    Returns:
        [B, T, H, V], contiguous, in q's dtype.

    Saves:
        states: fp32 [B, ceil(T / save_every), H, K, V], the state before each segment.

    Scratch:
        Forward: the last state, fp32; per position and head three rows as wide as a key and three as wide as a tile, one of them fp32; with
        a decay for each row of the state also its running sums, fp32. Backward: in addition two states per tile, two rows as wide as a
        value, and with a decay a row one more fp32 row as wide as a key. Of as many segments as fit 512 MiB, at least one.

    Triton:
        Three kernels forward, with a decay for each row of the state four; backward nine, or eleven: those of the forward again, then the
        gradients. Keys wider than 128 or values wider than 256 (fp32: 64 and 64), and q, k and v of different dtypes, use plain torch.

    Raises:
        ValueError: shapes do not fit, chunk_size < 1 or save_every < 1.

    Source: arXiv:2412.06464, section 3 (one decay a head); arXiv:2510.26692, section 3 (one a row of the state); arXiv:2411.12537 (β > 1).
    """
    sequences = {"q": q.shape, "k": k.shape, "v": v.shape, "beta": beta.shape}
    fits = q.dim() == v.dim() == 4 and q.shape == k.shape and v.shape[:2] == q.shape[:2] and beta.shape == v.shape[:3]
    require(fits, "gated_delta", "q and k must be [B,T,G,K], v [B,T,H,V], beta [B,T,H]", **sequences)
    require(v.shape[2] % q.shape[2] == 0, "gated_delta", "G must divide H", G=q.shape[2], H=v.shape[2])
    wide = (*v.shape[:3], q.shape[3])
    fits = decay.shape in (v.shape[:3], wide) and dt_bias.shape == decay.shape[2:] and A_log.shape == v.shape[2:3]
    rule = "decay must be [B,T,H] with dt_bias [H], or [B,T,H,K] with dt_bias [H,K]; A_log [H]"
    require(fits, "gated_delta", rule, v=v.shape, decay=decay.shape, dt_bias=dt_bias.shape, A_log=A_log.shape)
    require(min(chunk_size, save_every) >= 1, "gated_delta", "chunk_size and save_every must be at least 1", sizes=(chunk_size, save_every))
    require_starts("gated_delta", starts, q.shape[:2])
    y: Tensor = _gated_delta(q, k, v, decay, beta, A_log, dt_bias, starts, chunk_size, save_every, beta_limit)[0]
    return y


SCAN = ScanOperation(reference, sizes.accepts, "gated_delta", GatedDeltaInputs, GRADIENTS, ACCUMULATED, output_like="v", sizes=sizes)
_gated_delta, _gated_delta_backward = SCAN.register()
