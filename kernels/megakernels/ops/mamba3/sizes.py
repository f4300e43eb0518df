"""Bytes and cost of the scan's kernels for given tensors: the facts of their sizes, and copies of operands; needs no triton."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megakernels._common.cost import Cost
from megakernels._common.scratch import copies_bytes
from megakernels.facts import SUMS_BYTES, KernelBytes
from megakernels.ops.mamba3.chunk import GRADIENTS, Mamba3Inputs
from megakernels.ops.mamba3.facts import TrapezoidalScan, phase_rows, step_sides

SHARING = (("x", "z"), ("B", "C"), ("dt", "A", "trapezoid"))
"""Inputs that the kernels read with the same strides."""
CONTIGUOUS = ("B_bias", "C_bias", "D", "dt_bias", "mimo_x", "mimo_z", "mimo_o", "starts")


def facts_of(scan: Mamba3Inputs) -> TrapezoidalScan:
    """The sizes of these arguments."""
    rank, groups, state = scan.B.shape[2:]
    angles = 0 if scan.angles is None else scan.angles.shape[2]
    settings = scan.chunk_size, scan.save_every, scan.x.element_size()
    batch, positions, heads, width = scan.x.shape
    return TrapezoidalScan(batch, positions, heads, groups, rank, width, state, angles, *settings)


def accepts(scan: Mamba3Inputs) -> bool:
    """True if the kernels support these sizes and dtypes."""
    return facts_of(scan).accepted and scan.z.dtype == scan.x.dtype


def same_strides(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors if their last dim is dense and their strides are equal, else contiguous copies."""
    return tuple(each.contiguous() for each in tensors) if _unlike(*tensors) else tensors


def _unlike(*tensors: Tensor) -> Sequence[Tensor]:
    """The tensors if they do not have dense last dims and equal strides."""
    first = tensors[0]
    fits = all(each.stride() == first.stride() and (each.stride(-1) == 1 or each.shape[-1] == 1) for each in tensors)
    return () if fits else tensors


def dense(scan: Mamba3Inputs) -> Mamba3Inputs:
    """The inputs as the kernels take them: tensors that share strides, angles with dense rows, and contiguous parameters."""
    found: dict[str, Any] = {}
    for names in SHARING:
        found |= zip(names, same_strides(*(getattr(scan, name) for name in names)), strict=True)
    found |= {name: getattr(scan, name).contiguous() for name in CONTIGUOUS if getattr(scan, name) is not None}
    if scan.angles is not None:
        found |= {"angles": same_strides(scan.angles)[0]}
    return scan._replace(**found)


def trigonometric_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of cosines and sines; fp16 has more bits for them than bf16."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def forward_bytes(scan: Mamba3Inputs, *initial: Tensor | None) -> KernelBytes:
    """Bytes of `kernel.forward_from` with the same operands."""
    own = facts_of(scan).forward_bytes()
    return own._replace(scratch=own.scratch + _dense_bytes(scan) + copies_bytes(each for each in initial if each is not None))


def backward_bytes(
    grad_state: Tensor | None, grad_phase: Tensor | None, grad_y: Tensor,
    scan: Mamba3Inputs,
    ahead: Tensor | None, states: Tensor, phases: Tensor,
) -> KernelBytes:  # fmt: skip
    """Bytes of `kernel.backward_from` with the same operands."""
    phase = 0 if grad_phase is None or scan.angles is None else copies_bytes((grad_phase,)) + SUMS_BYTES * grad_phase.numel()
    found = facts_of(scan).backward_bytes(0, copies_bytes(() if grad_state is None else (grad_state,)), phase)
    own = grad_y.numel() * scan.x.element_size() if grad_y.dtype != scan.x.dtype else copies_bytes(rows=(grad_y,))
    copies = _dense_bytes(scan) + own + copies_bytes(each for each in (states, phases, ahead) if each is not None)
    results = sum(getattr(scan, name).nbytes for name in GRADIENTS if getattr(scan, name) is not None)
    return found._replace(results=results, scratch=found.scratch + copies)


def forward_cost(scan: Mamba3Inputs) -> Cost:
    """Cost of `kernel.forward`; launches over a part of the segments receive the full inputs."""
    sizes, whole = facts_of(scan), _whole_bytes(scan)
    given = 4 * whole["x"] + 3 * whole["B"] + 2 * whole["tables"] + whole["states"]
    return _cost(scan, sizes.tile_flops()[0], 0, given)


def backward_cost(scan: Mamba3Inputs) -> Cost:
    """Cost of `kernel.backward`."""
    sizes, whole = facts_of(scan), _whole_bytes(scan)
    rows = phase_rows(sizes.extents().sides["Q"])
    given = 8 * whole["x"] + 10 * whole["B"] + 5 * whole["tables"] + 2 * whole["angles"] + whole["states"]
    given += 4 * whole["steps"] + whole["turned"] + whole["ends"] + 4 * whole["shares"]
    return _cost(scan, sizes.tile_flops()[1], rows * rows, given)


def _whole_bytes(scan: Mamba3Inputs) -> dict[str, int]:
    """Bytes of the full inputs that every launch over a part of the segments receives; the cost counts these launches."""
    sizes = facts_of(scan)
    extents, rows = sizes.extents(), sizes.batch * sizes.positions * sizes.heads
    return {
        "x": scan.x.nbytes,
        "B": scan.B.nbytes,
        "tables": sizes.tables(),
        "angles": rows * 2 * sizes.angles * sizes.itemsize,
        "states": sizes.batch * extents.segments * sizes.heads * sizes.width * sizes.state * sizes.itemsize,
        "steps": 3 * rows * SUMS_BYTES,
        "turned": rows * sizes.angles * SUMS_BYTES,
        "ends": sizes.ends() * SUMS_BYTES,
        "shares": sizes.batch * extents.segments * extents.pieces * sizes.heads * sizes.shares * SUMS_BYTES,
    }


def _cost(scan: Mamba3Inputs, per_tile: int, pairs: int, given: int) -> Cost:
    """Products in x's dtype, and, where rows hold several documents, fp32 sums of angles' gradients over `pairs` of positions of a tile.

    Launches over a part of the segments receive `given` bytes each.
    """
    sizes = facts_of(scan)
    found = {scan.x.dtype: sizes.num_tiles() * per_tile}
    if pairs and scan.angles is not None and scan.starts is not None:
        found[torch.float32] = found.get(torch.float32, 0) + 2 * sizes.num_tiles() * pairs * step_sides(sizes.angles)["N"]
    launches = -(-sizes.extents().segments // max(1, sizes.extents().at_once))
    return Cost(found, untouched_bytes=max(0, launches - 1) * given)


def _dense_bytes(scan: Mamba3Inputs) -> int:
    """Bytes of the copies that `dense` makes."""
    copied = [each for names in SHARING for each in _unlike(*(getattr(scan, name) for name in names))]
    copied += [] if scan.angles is None else _unlike(scan.angles)
    return copies_bytes([*copied, *(getattr(scan, name) for name in CONTIGUOUS if getattr(scan, name) is not None)])
