"""Launches of the scan's backward kernels."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megakernels.ops.mamba3.chunk import Mamba3Inputs
from megakernels.ops.mamba3.facts import TILES_PER_SHARE, Mamba3Extents, phase_rows, step_sides
from megakernels.ops.mamba3.kernel_groups import mamba3_group_kernel
from megakernels.ops.mamba3.kernel_outputs import mamba3_output_kernel
from megakernels.ops.mamba3.kernel_pairs import mamba3_pair_kernel
from megakernels.ops.mamba3.kernel_states import mamba3_state_kernel
from megakernels.ops.mamba3.kernel_steps import mamba3_last_phase_kernel, mamba3_phase_gradient_kernel, mamba3_step_gradient_kernel
from megakernels.ops.mamba3.kernel_values import mamba3_value_kernel
from megakernels.ops.mamba3.kernel_walk import mamba3_state_gradient_kernel
from megakernels.ops.mamba3.launch import counts_of, flags_of, launched, make_tables, sizes_of, strides_of


class _Run(NamedTuple):
    """Operands that the backward's kernels over tiles share: inputs (x for absent ones), tables, and results."""

    grad_y: Tensor
    scan: Mamba3Inputs
    sizes: Mamba3Extents
    tables: list[Tensor]
    states: Tensor
    between: Tensor
    grad_between: Tensor
    grad_queries: Tensor
    grad_keys: Tensor
    grad_outputs: Tensor
    passed_on: Tensor
    grad_first: Tensor
    gradients: dict[str, Tensor]
    turned: Tensor
    ends: Tensor
    steps: Tensor
    shares: Tensor

    def inputs(self) -> dict[str, Tensor]:
        names = ("x", "z", "B", "C", "B_bias", "C_bias", "D", "mimo_x", "mimo_z", "mimo_o")
        values = {name: getattr(self.scan, name) for name in names}
        return {name: self.scan.x if value is None else value for name, value in values.items()}

    def settings(self) -> dict[str, Any]:
        return {**self.sizes.sides, **flags_of(self.scan)}


def tile_gradients(
    grad_state: Tensor | None, grad_y: Tensor,
    scan: Mamba3Inputs,
    ahead: Tensor | None, states: Tensor, phases: Tensor,
    sizes: Mamba3Extents, made: tuple[Any, ...],
) -> None:  # fmt: skip
    """The kernels over tiles: states, their gradients, and all gradients except sums over positions."""
    tables = make_tables(scan, ahead, phases, sizes, None)
    between, grad_between, grad_queries, grad_keys, grad_outputs = (
        torch.empty(sizes.at_once * each, dtype=scan.x.dtype, device=scan.x.device) for each in sizes.stored
    )
    passed_on = torch.empty(sizes.at_once * sizes.passed_on, dtype=torch.float32, device=scan.x.device)
    run = _Run(grad_y, scan, sizes, tables, states, between, grad_between, grad_queries, grad_keys, grad_outputs, passed_on, *made)
    later = None if grad_state is None else grad_state.contiguous()
    for stop in range(sizes.segments, 0, -sizes.at_once):
        first = max(0, stop - sizes.at_once)
        _states(run, first, stop - first, later)
        later = run.grad_first
        _pairs(run, first, stop - first)


def _states(run: _Run, first: int, count: int, later: Tensor | None) -> None:
    """States before the tiles of some segments, gradients of outputs before the gate, and from them those of the states."""
    batch, num_heads, _, _, _ = sizes_of(run.scan)
    inputs, sizes, counts, strides = run.inputs(), run.sizes, counts_of(run.scan), strides_of(run.scan)[:7]
    x, part = run.scan.x, (first, count, sizes.tiles)
    mamba3_state_kernel[(2 * batch, num_heads, count)](
        x, inputs["B"], inputs["B_bias"], inputs["mimo_x"], *run.tables, run.states, x, run.between, x, *counts, sizes.segments, *part,
        *strides,
        **launched("state", x, **run.settings(), HAS_INITIAL=True, WALKS=False),
    )  # fmt: skip
    mamba3_output_kernel[(count * sizes.pieces, num_heads, batch)](
        run.grad_y, *inputs.values(), *run.tables, run.between, x, run.gradients["z"], run.grad_outputs, run.steps, run.shares, *counts,
        run.shares.shape[4], sizes.segments, *part, sizes.pieces,
        *run.grad_y.stride()[:3], *strides,
        **launched("output", x, **run.settings(), SPAN=TILES_PER_SHARE, GRADIENTS=True),
    )  # fmt: skip
    mamba3_state_gradient_kernel[(2 * batch, num_heads)](
        run.grad_outputs, x if later is None else later, inputs["C"], inputs["C_bias"], *run.tables, run.between, run.grad_between,
        run.ends, run.passed_on, run.grad_first, *counts, sizes.segments, *part,
        *strides[3:],
        **launched("state_gradient", x, **run.settings(), HAS_FINAL=later is not None),
    )  # fmt: skip


def _pairs(run: _Run, first: int, count: int) -> None:
    """Gradients of queries, values and keys of some segments."""
    batch, num_heads, _, state_width, _ = sizes_of(run.scan)
    inputs, sizes, counts, strides = run.inputs(), run.sizes, counts_of(run.scan), strides_of(run.scan)[:7]
    rank, num_groups = run.scan.B.shape[2:4]
    keys = tuple(inputs[name] for name in ("x", "B", "C", "B_bias", "C_bias"))
    part = first, count, sizes.tiles
    of_groups = {"SPAN": TILES_PER_SHARE, "NEIGHBOURS": run.scan.mimo_x is None, "TURNS": flags_of(run.scan)["TURNS"]}

    mamba3_pair_kernel[(count * sizes.tiles, num_heads, batch)](
        run.grad_outputs, *keys, inputs["mimo_x"], *run.tables, run.between, run.grad_between, run.grad_queries, run.grad_keys, run.turned,
        run.steps, run.passed_on, *counts, *part,
        *strides,
        **launched("pair", run.scan.x, **run.settings()),
    )  # fmt: skip
    mamba3_value_kernel[(count * sizes.pieces, num_heads, batch)](
        run.grad_outputs, *keys, inputs["D"], inputs["mimo_x"], *run.tables, run.grad_between, run.gradients["x"], run.steps, run.shares,
        *counts, run.shares.shape[4], sizes.segments, *part, sizes.pieces,
        *strides,
        **launched("value", run.scan.x, **run.settings(), SPAN=TILES_PER_SHARE),
    )  # fmt: skip
    for name, rows, offset in (("B", run.grad_keys, 0), ("C", run.grad_queries, rank * state_width)):
        mamba3_group_kernel[(count * sizes.pieces, num_groups, batch)](
            rows, *run.tables[2:], run.gradients[name], run.shares, *counts, run.shares.shape[4], offset, sizes.segments, *part,
            sizes.pieces,
            **launched("group", run.scan.x, **{key: sizes.sides[key] for key in "MQRS"}, **of_groups),
        )  # fmt: skip


def step_gradients(scan: Mamba3Inputs, gradients: dict[str, Tensor], turned: Tensor, steps: Tensor) -> Tensor:
    """Gradients of dt, A, trapezoid and the angles; returns the sums of those of dt over tiles of positions."""
    batch, num_heads, _, _, num_angles = sizes_of(scan)
    x, num_positions, sides = scan.x, scan.x.shape[1], step_sides(num_angles)
    num_tiles = triton.cdiv(num_positions, sides["T"])
    shares = torch.empty(batch, num_tiles, num_heads, dtype=torch.float32, device=x.device)
    of_scan = {"HAS_STARTS": scan.starts is not None, "HEAVY_TAIL": scan.heavy_tail, "ROTATES": scan.angles is not None}
    mamba3_step_gradient_kernel[(num_tiles, batch)](
        turned, steps, scan.dt, scan.A, scan.trapezoid, x if scan.angles is None else scan.angles, scan.dt_bias,
        x if scan.starts is None else scan.starts, gradients["dt"], gradients["A"], gradients["trapezoid"], gradients.get("angles", x),
        shares, num_positions, num_heads, num_angles,
        *strides_of(scan)[7:],
        **launched("step_gradient", x, **sides, **of_scan),
    )  # fmt: skip
    return shares


def phase_gradients(
    scan: Mamba3Inputs, grad_phase: Tensor | None, sizes: Mamba3Extents, turned: Tensor, ends: Tensor, grad_first_phase: Tensor
) -> None:
    """Sums of the angles' gradients over later positions, in place, and the gradient of the angle before the first."""
    batch, num_heads, _, _, num_angles = sizes_of(scan)
    num_positions, tile = scan.x.shape[1], sizes.sides["Q"]
    starts, last = scan.x if scan.starts is None else scan.starts, (sizes.segments - 1) * scan.save_every
    last_tile, num_tiles = (num_positions - 1 - last) // tile, triton.cdiv(num_positions - last, tile) + (sizes.segments - 1) * sizes.tiles
    rows = {"T": phase_rows(tile), "N": step_sides(num_angles)["N"], "HAS_STARTS": scan.starts is not None}
    grad_final, of_last = scan.x, scan.x
    if grad_phase is not None:
        grad_final, of_last = grad_phase.contiguous(), torch.empty_like(grad_first_phase)
        mamba3_last_phase_kernel[(batch, num_heads)](
            turned, grad_final, starts, ends, of_last, last + last_tile * tile, num_positions, num_heads, num_angles, ends.shape[1],
            num_tiles - 1,
            **launched("last_phase", scan.x, **rows),
        )  # fmt: skip
    mamba3_phase_gradient_kernel[(num_tiles, num_heads, batch)](
        turned, grad_final, starts, ends, of_last, grad_first_phase, num_positions, num_heads, num_angles, scan.save_every, sizes.tiles,
        ends.shape[1],
        **launched("phase_gradient", scan.x, Q=tile, **rows, HAS_FINAL=grad_phase is not None),
    )  # fmt: skip
