"""Mamba-3's scan, including gate and rank projections. Saved: the inputs, starts, and state and phase at each segment's start."""

from torch import Tensor

from megakernels._common import accumulator_dtype, dropped_bytes, fake_like, operation, require, require_starts, types_of
from megakernels._common.device import Implementation
from megakernels.ops.mamba3 import reference
from megakernels.ops.mamba3.chunk import GRADIENTS, Mamba3Inputs
from megakernels.ops.mamba3.sizes import accepts, backward_bytes, backward_cost, forward_bytes, forward_cost

__all__ = ["mamba3"]

IMPLEMENTATION = Implementation(reference, accepts)


def mamba3(
    x: Tensor, z: Tensor, B: Tensor, C: Tensor, dt: Tensor, A: Tensor, trapezoid: Tensor, angles: Tensor | None, B_bias: Tensor,
    C_bias: Tensor, D: Tensor, dt_bias: Tensor, mimo_x: Tensor | None, mimo_z: Tensor | None, mimo_o: Tensor | None,
    chunk_size: int,
    starts: Tensor | None = None,
    *, save_every: int | None = None, heavy_tail: bool = False,
) -> Tensor:  # fmt: skip
    """Runs a head's R-input, R-output state with trapezoidal steps and rotating keys, gates each output and adds them.

    With Δ = softplus(dt + dt_bias), a = max(f(A), 1e−4), f being softplus or, with `heavy_tail`, 1 + A from 0 on and 1 / (1 − A) below,
    α = exp(−aΔ), λ = sigmoid(trapezoid), θ the running sum of π tanh(angles) Δ, k_r and q_r = B_r + B_bias_r and C_r + C_bias_r rotated
    by θ, v_r = x ⊙ mimo_x_r, from h = 0:

        h_t = α_t h_{t−1} + (1 − λ_t) Δ_t α_t Σ_r v_{r,t−1} k_{r,t−1}ᵀ + λ_t Δ_t Σ_r v_{r,t} k_{r,t}ᵀ,
        y_t = Σ_r mimo_o_r ⊙ (h_t q_{r,t} + D v_{r,t}) ⊙ silu(z_t ⊙ mimo_z_r).

    Args:
        x: [B, T, H, P].
        z: [B, T, H, P].
        B: [B, T, R, G, S]; head i reads group i // (H / G).
        C: [B, T, R, G, S].
        dt: [B, T, H].
        A: [B, T, H].
        trapezoid: [B, T, H].
        angles: [B, T, N] with 2N ≤ S, shared by all heads, or None; angle i rotates dims 2i and 2i + 1 in the
            single-input form, without mimo weights, and dims i and i + S // 2 with them.
        B_bias: [H, R, S].
        C_bias: [H, R, S].
        D: [H].
        dt_bias: [H].
        mimo_x: [H, R, P], or None (with mimo_z and mimo_o) if R = 1: ones.
        mimo_z: [H, R, P] or None.
        mimo_o: [H, R, P] or None.
        chunk_size: positions computed at once, by kernels at most 64 / R; T need not be a multiple. It changes only rounding.
        starts: int32 [B, T] or None: index of the first position of each position's document, for rows that hold several documents;
            None for one document per row. Each starts with h = 0 and θ = 0. No gradient.
        save_every: positions between two saved states; None saves one per chunk. A new chunk starts at each.
        heavy_tail: True if f is the function with slow decay below 0 instead of softplus.

    Returns:
        [B, T, H, P], contiguous, in x's dtype.

    Saves:
        states: [B, ceil(T / save_every), H, P, S] in x's dtype, the weighted state before each segment.
        phases: fp32 [B, ceil(T / save_every), H, N], the angle before each segment, in [0, 2π).

    Scratch:
        Forward: the last state and phase, tables of steps, cosines and sines, and states before the tiles of some segments. Backward: the
        tables, gradients of angles and steps, and for some segments (1 GiB, or one) states and gradients of states, rows and outputs.

    Triton:
        Forward five kernels, backward eleven. Heads over 64 or states over 128 wide (fp32: 32) and more than 4 ranks use plain torch.

    Raises:
        ValueError: shapes do not fit, chunk_size < 1 or save_every < 1.

    Source: arXiv:2603.15569, section 3; which dims an angle rotates, the bound on a and tanh of the angles: state-spaces/mamba,
    `mamba_ssm/modules/mamba3.py`.
    """
    _check(x, z, B, C, angles, (dt, A, trapezoid), (B_bias, C_bias), (D, dt_bias), (mimo_x, mimo_z, mimo_o))
    every = _segment(chunk_size, save_every)
    require_starts("mamba3", starts, x.shape[:2])
    tensors = (x, z, B, C, dt, A, trapezoid, angles, B_bias, C_bias, D, dt_bias, mimo_x, mimo_z, mimo_o, starts)
    y: Tensor = _mamba3(*tensors, chunk_size, every, heavy_tail)[0]
    return y


def _check(
    x: Tensor, z: Tensor, B: Tensor, C: Tensor, angles: Tensor | None,
    steps: tuple[Tensor, ...], biases: tuple[Tensor, ...], per_head: tuple[Tensor, ...], mimo: tuple[Tensor | None, ...],
) -> None:  # fmt: skip
    fits = x.dim() == 4 and x.shape == z.shape and B.dim() == 5 and B.shape == C.shape and B.shape[:2] == x.shape[:2]
    require(fits, "mamba3", "x and z must be [B,T,H,P], B and C [B,T,R,G,S]", x=x.shape, z=z.shape, B=B.shape, C=C.shape)
    num_heads, width = x.shape[2:]
    rank, num_groups, state = B.shape[2:]
    require(num_heads % num_groups == 0, "mamba3", "G must divide H", H=num_heads, G=num_groups)
    wanted = [*[x.shape[:3]] * len(steps), *[(num_heads,)] * len(per_head), *[(num_heads, rank, state)] * len(biases)]
    shapes = [tuple(each.shape) for each in (*steps, *per_head, *biases)]
    fits = shapes == [tuple(each) for each in wanted]
    require(fits, "mamba3", "dt, A and trapezoid must be [B,T,H], D and dt_bias [H], B_bias and C_bias [H,R,S]", x=x.shape, found=shapes)
    fits = angles is None or (angles.shape[:2] == x.shape[:2] and 0 < 2 * angles.shape[2] <= state)
    require(fits, "mamba3", "angles must be [B,T,N] with 0 < 2N ≤ S", angles=None if angles is None else angles.shape, S=state)
    given = [each for each in mimo if each is not None]
    fits = (rank == 1 and not given) or (len(given) == 3 and all(each.shape == (num_heads, rank, width) for each in given))
    require(fits, "mamba3", "mimo_x, mimo_z and mimo_o must be [H,R,P], or None where R = 1", R=rank, found=[tuple(g.shape) for g in given])


def _segment(chunk_size: int, save_every: int | None) -> int:
    """Positions between two saved states."""
    require(chunk_size >= 1, "mamba3", "chunk_size must be at least 1", chunk_size=chunk_size)
    every = chunk_size if save_every is None else save_every
    require(every >= 1, "mamba3", "save_every must be at least 1", save_every=every)
    return every


def _forward(scan: Mamba3Inputs) -> tuple[Tensor, Tensor, Tensor]:
    results: tuple[Tensor, Tensor, Tensor] = IMPLEMENTATION.module(scan).forward(scan)
    return results


def _backward(grad_y: Tensor, scan: Mamba3Inputs, states: Tensor, phases: Tensor, _needs: list[bool]) -> tuple[Tensor | None, ...]:
    gradients: tuple[Tensor | None, ...] = IMPLEMENTATION.module(scan).backward(grad_y, scan, states, phases)
    return gradients


def _fake(scan: Mamba3Inputs) -> tuple[Tensor, Tensor, Tensor]:
    x, angles = scan.x, scan.angles
    batch, num_positions, num_heads, width = x.shape
    rows = (batch, -(-num_positions // scan.save_every), num_heads)
    num_angles = 0 if angles is None else angles.shape[-1]
    return fake_like(x), x.new_empty((*rows, width, scan.B.shape[-1])), x.new_empty((*rows, num_angles), dtype=accumulator_dtype(x.dtype))


def _forward_scratch(scan: Mamba3Inputs) -> int:
    if not IMPLEMENTATION.chooses_kernel(scan):
        return 0
    inside = forward_bytes(scan)
    return inside.last + inside.scratch


def _backward_scratch(grad_y: Tensor, scan: Mamba3Inputs, states: Tensor, phases: Tensor, needs: list[bool]) -> int:
    if not IMPLEMENTATION.chooses_kernel(scan):
        return 0
    inside = backward_bytes(None, None, grad_y, scan, None, states, phases)
    wanted = [each for each, name in zip(needs, GRADIENTS, strict=True) if getattr(scan, name) is not None]
    dropped = dropped_bytes((getattr(scan, name) for name in GRADIENTS if getattr(scan, name) is not None), wanted)
    return dropped + inside.last + inside.scratch


_mamba3, _mamba3_backward = operation(
    "mamba3",
    types_of(Mamba3Inputs),
    Mamba3Inputs,
    outputs=("y", "states", "phases"),
    saved=("states", "phases"),
    gradients=GRADIENTS,
    forward=_forward,
    backward=_backward,
    fake=_fake,
    forward_scratch=_forward_scratch,
    backward_scratch=_backward_scratch,
    forward_cost=forward_cost,
    backward_cost=lambda _grad_y, scan, *_: backward_cost(scan),
)
