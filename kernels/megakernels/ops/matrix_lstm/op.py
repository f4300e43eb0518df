"""mLSTM, in plain torch on every device, chunk by chunk. Saved: the inputs, starts and the state at each chunk's start."""

from torch import Tensor

from megakernels._common import accumulator_dtype, operation, require, require_starts, types_of
from megakernels.ops.matrix_lstm import reference
from megakernels.ops.matrix_lstm.facts import LARGEST_CAP, MatrixLstmSizes
from megakernels.ops.matrix_lstm.inputs import GRADIENTS, MatrixLstmInputs

__all__ = ["mlstm"]


def mlstm(
    q: Tensor, k: Tensor, v: Tensor, input_gate: Tensor, forget_gate: Tensor,
    chunk_size: int,
    starts: Tensor | None = None,
    *, soft_cap: float = 15.0,
) -> Tensor:  # fmt: skip
    """Runs S' = f S + i k vᵀ and n' = f n + i k from zero, y = S'ᵀ q / max(|n' · q|, 1), with q over √K, i = exp(cap(input gate)) and f = σ(cap(forget gate)).

    cap(x) = soft_cap · tanh(x / soft_cap).

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K].
        v: [B, T, H, V].
        input_gate: [B, T, H].
        forget_gate: [B, T, H].
        chunk_size: positions computed at once; T need not be a multiple. It changes the saved states, and results only by rounding.
        starts: int32 [B, T] or None: index of the first position of each position's document, for rows that hold several documents;
            None for one document per row. Each starts with S = 0. No gradient.
        soft_cap: Bound of the gates before exp and σ, at most 30.

    Returns:
        [B, T, H, V], contiguous, in v's dtype.

    Saves:
        states: fp32 [B, ceil(T / chunk_size), H, V + 1, K], S and n at each chunk's start.

    Scratch:
        Operands, pairs of positions and states of one chunk in fp32.

    Raises:
        ValueError: shapes do not fit, chunk_size < 1, or a soft_cap that is not in (0, 30].

    Source: arXiv:2405.04517, equations 19 to 27; arXiv:2503.13427, section 3.2.
    """  # noqa: E501
    sizes = {"q": q.shape, "k": k.shape, "v": v.shape, "input_gate": input_gate.shape, "forget_gate": forget_gate.shape}
    fits = q.dim() == v.dim() == 4 and q.shape == k.shape and q.shape[:3] == v.shape[:3] == input_gate.shape == forget_gate.shape
    require(fits, "mlstm", "q and k must be [B,T,H,K], v [B,T,H,V], both gates [B,T,H]", **sizes)
    require(chunk_size >= 1, "mlstm", "chunk_size must be at least 1", chunk_size=chunk_size)
    require(0 < soft_cap <= LARGEST_CAP, "mlstm", f"soft_cap must be above 0 and at most {LARGEST_CAP}", soft_cap=soft_cap)
    require_starts("mlstm", starts, q.shape[:2])
    y: Tensor = _mlstm(q, k, v, input_gate, forget_gate, starts, chunk_size, soft_cap)[0]
    return y


def _sizes(given: MatrixLstmInputs) -> MatrixLstmSizes:
    (batch, positions, heads, key), value = given.q.shape, given.v.shape[3]
    return MatrixLstmSizes(batch, positions, heads, key, value, given.chunk_size, given.q.element_size())


def _fake(given: MatrixLstmInputs) -> tuple[Tensor, Tensor]:
    v = given.v
    return v.new_empty(v.shape), v.new_empty(_sizes(given).states, dtype=accumulator_dtype(v.dtype))


_mlstm, _mlstm_backward = operation(
    "mlstm",
    types_of(MatrixLstmInputs),
    MatrixLstmInputs,
    outputs=("y", "states"),
    saved=("states",),
    gradients=GRADIENTS,
    forward=reference.forward,
    backward=lambda grad_y, given, states, _needs: reference.backward(grad_y, given, states),
    fake=_fake,
    forward_scratch=lambda given: _sizes(given).scratch_bytes()[0],
    backward_scratch=lambda _grad_y, given, _states, _needs: _sizes(given).scratch_bytes()[1],
)
