"""Triton kernels of Mamba-3's scan: tables, states and outputs; in backward the same again, then their gradients.

A tile has 64 rows (fp32: 16): ranks of positions, fewer positions the more ranks there are. A segment is a sequence of tiles at whose
start state and phase are saved.

- `mamba3_table_kernel`: one program per segment and some heads: coefficients and running log decays of every position.
- `mamba3_turn_kernel`: one program per few positions: the rotation of their angles in a unit step, which all heads share.
- `mamba3_angle_kernel`: one program per sequence and head (in backward also per segment): cosines and sines of the angles.
- `mamba3_state_kernel`: one program per sequence and head, in backward also per segment: the states before each tile.
- `mamba3_output_kernel`: one program per few tiles and head: y, or the gradients of z, D, the output projections and rank outputs.
- `mamba3_state_gradient_kernel`: one program per sequence and head, in reverse: the gradients of the states after each tile, and of the
  angles at its start.
- `mamba3_pair_kernel`: one program per tile and head: gradients of rotated rows of C and B, and of angles.
- `mamba3_value_kernel`: one program per few tiles and head: gradients of x and the input projection.
- `mamba3_group_kernel`: one program per few tiles and group: gradients of C or B, summed over the group's heads, and of their biases.
- `mamba3_last_phase_kernel`, where the last angle has a gradient: one program per sequence and head: its part in all earlier angles.
- `mamba3_phase_gradient_kernel`: one program per tile and head: sums of the angles' gradients over later positions.
- `mamba3_step_gradient_kernel`: one program per tile of positions: dt, A, trapezoid and, summed over heads, the angles.

States before tiles go through memory: a program that carries the state while it makes outputs or gradients has more than 255 registers.
The states of a part of the segments are stored at once: the kernels between the tables and the sums of angles run for each part, from the
last. No program adds to another's result at the same time: results are bitwise reproducible. The formulas are the reference's. Operands of
products have x's dtype; products and the carried state accumulate in fp32; log decays are summed in fp64, and differences of the sums are
masked before they are exponentiated. An angle's gradient multiplies gradients of rotated rows by the rounded rows that the products took:
where it turns queries and keys by the same angle the parts then cancel except for fp32's rounding.
"""

import torch
from torch import Tensor

from megakernels._common.tiles import on_device_of, unit_stride
from megakernels.ops.mamba3.chunk import Mamba3Inputs
from megakernels.ops.mamba3.launch import make_tables, outputs, sizes_of
from megakernels.ops.mamba3.launch_backward import phase_gradients, step_gradients, tile_gradients
from megakernels.ops.mamba3.sizes import dense, facts_of


def forward(scan: Mamba3Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Follows the contract of `reference.forward`, for fp32, bf16 and fp16."""
    return forward_from(scan, None, None, None)[:3]


def forward_from(
    scan: Mamba3Inputs, state: Tensor | None, phase: Tensor | None, ahead: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Follows the contract of `reference.forward_from`; None is zero."""
    scan, sizes = dense(scan), facts_of(scan).extents()
    x = scan.x
    batch, num_heads, width, state_width, num_angles = sizes_of(scan)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    states = torch.empty(batch, sizes.segments, num_heads, width, state_width, dtype=x.dtype, device=x.device)
    phases = torch.empty(batch, sizes.segments, num_heads, num_angles, dtype=torch.float32, device=x.device)
    last = torch.empty(batch, num_heads, width, state_width, dtype=torch.float32, device=x.device)
    last_phase = torch.empty(batch, num_heads, num_angles, dtype=torch.float32, device=x.device)
    if last.numel():
        ahead, state, phase = (None if each is None else each.contiguous() for each in (ahead, state, phase))
        with on_device_of(x):
            tables = make_tables(scan, ahead, phase, sizes, (phases, last_phase))
            outputs(scan, state, tables, sizes, (y, states, last))
    return y, states, phases, last, last_phase


def backward(grad_y: Tensor, scan: Mamba3Inputs, states: Tensor, phases: Tensor) -> tuple[Tensor | None, ...]:
    """Follows the contract of `reference.backward`."""
    return backward_from(None, None, grad_y, scan, None, states, phases)[0]


def backward_from(
    grad_state: Tensor | None, grad_phase: Tensor | None, grad_y: Tensor,
    scan: Mamba3Inputs,
    ahead: Tensor | None, states: Tensor, phases: Tensor,
) -> tuple[tuple[Tensor | None, ...], Tensor, Tensor, Tensor]:  # fmt: skip
    """Follows the contract of `reference.backward_from`; None is zero."""
    given, sizes = dense(scan), facts_of(scan).extents()
    x, B, angles = given.x, given.B, given.angles
    batch, num_heads, width, state_width, num_angles = sizes_of(scan)
    num_positions = x.shape[1]
    grad_y, states, phases = unit_stride(grad_y.to(x.dtype)), states.contiguous(), phases.contiguous()
    ahead = None if ahead is None else ahead.contiguous()

    def sums(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    gradients = {name: torch.empty(each.shape, dtype=each.dtype, device=x.device) for name, each in _inputs(scan).items()}
    grad_first, grad_first_phase = sums(batch, num_heads, width, state_width), sums(batch, num_heads, num_angles)
    turned, steps = sums(batch, num_heads, num_positions, num_angles), sums(3, batch, num_heads, num_positions)
    ends = sums(batch, sizes.segments * sizes.tiles, num_heads, num_angles)
    shares = sums(batch, sizes.segments, sizes.pieces, num_heads, facts_of(scan).shares).zero_()
    if not (x.numel() and B.numel()):
        zeros = {name: each.zero_() for name, each in gradients.items()}
        last = (grad_first.zero_() if grad_state is None else grad_state, grad_first_phase.zero_() if grad_phase is None else grad_phase)
        return tuple(zeros.get(name) for name in scan._fields[:15]), *last, sums(batch, num_heads).zero_()
    with on_device_of(x):
        tile_gradients(grad_state, grad_y, given, ahead, states, phases, sizes, (grad_first, gradients, turned, ends, steps, shares))
        if angles is not None:
            phase_gradients(given, grad_phase, sizes, turned, ends, grad_first_phase)
        step_shares = step_gradients(given, gradients, turned, steps)
    _parameters(gradients, shares, step_shares)
    return tuple(gradients.get(name) for name in scan._fields[:15]), grad_first, grad_first_phase, steps[1, :, :, -1]


def _parameters(gradients: dict[str, Tensor], shares: Tensor, step_shares: Tensor) -> None:
    """Gradients of the parameters, from parts in the order in which the backward kernel writes them."""
    totals, begin = shares.sum((0, 1, 2)), 0
    for name in ("B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o", "D"):
        if name in gradients:
            size = gradients[name][0].numel()
            gradients[name].copy_(totals[:, begin : begin + size].view(gradients[name].shape))
            begin += size
    gradients["dt_bias"].copy_(step_shares.sum((0, 1)))


def _inputs(scan: Mamba3Inputs) -> dict[str, Tensor]:
    """Inputs that have a gradient, by name."""
    return {name: value for name, value in zip(scan._fields[:15], scan[:15], strict=True) if isinstance(value, Tensor)}
