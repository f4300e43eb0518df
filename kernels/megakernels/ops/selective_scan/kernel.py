"""Triton kernels of the selective scan: one forward, one backward, both position by position with the states in registers.

A program has some channels of one sequence, a thread all states of a channel, or half of them backward. The gradients of B and C are sums
over channels: each program writes its part of them, and the parts are summed in a fixed order, as are the sequences' parts of the gradients
of parameters. No atomics, bitwise reproducible. The formulas are the reference's.
"""

import torch
import triton
from torch import Tensor

from megakernels._common.tiles import on_device_of, unit_stride
from megakernels.ops.selective_scan.facts import SELECTIVE_BACKWARD_CHANNELS, SELECTIVE_FORWARD_CHANNELS, tile_of
from megakernels.ops.selective_scan.inputs import GRADIENTS, SelectiveScanInputs
from megakernels.ops.selective_scan.kernel_backward import selective_backward_kernel
from megakernels.ops.selective_scan.kernel_forward import selective_forward_kernel
from megakernels.ops.selective_scan.sizes import sizes_of


def forward_options(given: SelectiveScanInputs) -> dict[str, int]:
    """Tile and warps of the forward: a thread for each channel."""
    channels, state = given.A_log.shape
    tile = tile_of(channels, state, SELECTIVE_FORWARD_CHANNELS)
    return {**tile, "num_warps": tile["CHANNELS"] // 32}


def backward_options(given: SelectiveScanInputs) -> dict[str, int]:
    """Tile and warps of the backward: two threads for each channel, since one has too few registers."""
    channels, state = given.A_log.shape
    tile = tile_of(channels, state, SELECTIVE_BACKWARD_CHANNELS)
    return {**tile, "num_warps": tile["CHANNELS"] // 16}


def forward(state: Tensor | None, given: SelectiveScanInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Follows the contract of `reference.forward`, for fp32, bf16 and fp16."""
    x, dt, B, C = (unit_stride(each) for each in (given.x, given.dt, given.B, given.C))
    batch, num_positions, num_channels = x.shape
    segments, options = triton.cdiv(num_positions, given.save_every), forward_options(given)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    states = torch.empty(batch, segments, *given.A_log.shape, dtype=torch.float32, device=x.device)
    last = torch.empty(batch, *given.A_log.shape, dtype=torch.float32, device=x.device)
    if not x.numel():
        return y, states, last.zero_() if state is None else last.copy_(state)
    with on_device_of(x):
        selective_forward_kernel[(batch, triton.cdiv(num_channels, options["CHANNELS"]))](
            x, dt, given.A_log.contiguous(), B, C, given.D.contiguous(), given.dt_bias.contiguous(),
            x if given.starts is None else given.starts.contiguous(), x if state is None else state.contiguous(), y, states, last,
            num_positions, segments, given.save_every, *given.A_log.shape,
            *x.stride()[:2], *dt.stride()[:2], *B.stride()[:2], *C.stride()[:2],
            1,
            PACKED=given.starts is not None, HAS_FIRST=state is not None, **options,
        )  # fmt: skip
    return y, states, last


def backward(grad_last: Tensor | None, grad_y: Tensor, given: SelectiveScanInputs, states: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Follows the contract of `reference.backward`."""
    x, dt, B, C, grad_y = (unit_stride(each) for each in (given.x, given.dt, given.B, given.C, grad_y))
    batch, num_positions, num_channels = x.shape
    width, options = given.A_log.shape[1], backward_options(given)
    sizes, device = sizes_of(given), x.device
    blocks, groups = sizes.blocks, sizes.groups
    found = {name: torch.empty(like.shape, dtype=like.dtype, device=device) for name in GRADIENTS for like in (getattr(given, name),)}
    grad_first = torch.empty(batch, num_channels, width, dtype=torch.float32, device=device)
    parts = torch.empty(2, blocks, batch, num_positions, width, dtype=torch.float32, device=device)
    recomputed = torch.empty(batch, blocks, groups, options["STATES"], options["CHANNELS"], dtype=torch.float32, device=device)
    sums = torch.empty(batch, num_channels, width + 2, dtype=torch.float32, device=device)
    if x.numel():
        with on_device_of(x):
            selective_backward_kernel[(batch, blocks)](
                grad_y, x, dt, given.A_log.contiguous(), B, C, given.D.contiguous(), given.dt_bias.contiguous(),
                x if given.starts is None else given.starts.contiguous(), states.contiguous(), recomputed,
                x if grad_last is None else grad_last.contiguous(), found["x"], found["dt"], parts, sums, grad_first, num_positions,
                states.shape[1], given.save_every, groups, num_channels, width,
                *grad_y.stride()[:2], *x.stride()[:2], *dt.stride()[:2], *B.stride()[:2], *C.stride()[:2],
                1,
                PACKED=given.starts is not None, HAS_LAST=grad_last is not None, **options,
            )  # fmt: skip
    else:
        sums.zero_()
        grad_first = grad_first.zero_() if grad_last is None else grad_first.copy_(grad_last)
    found["B"].copy_(parts[0].sum(0))
    found["C"].copy_(parts[1].sum(0))
    total = sums.sum(0)
    found["A_log"].copy_(total[:, :width])
    found["D"].copy_(total[:, width])
    found["dt_bias"].copy_(total[:, width + 1])
    return tuple(found[name] for name in GRADIENTS), grad_first
