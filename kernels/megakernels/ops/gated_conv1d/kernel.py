"""Triton kernels of the convolution between two gates, of up to four taps: one forward, one backward.

Each input is read once, in full vectors, except for the few positions before a tile and after it. Backward, each program's share of the
weight gradient is summed afterwards in a fixed order: no atomics, bitwise reproducible. Rows may be pieces of a sequence, each with the
products directly before it.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from megakernels._common.tiles import given_or, on_device_of, unit_stride
from megakernels.facts import block_of
from megakernels.ops.gated_conv1d.facts import GATED_CHANNELS, GATED_FORWARD_POSITIONS, POSITIONS_PER_SHARE
from megakernels.ops.gated_conv1d.kernel_backward import gated_conv_backward_kernel
from megakernels.ops.gated_conv1d.kernel_forward import gated_conv_forward_kernel
from megakernels.ops.gated_conv1d.reference import GatedConvolution


def forward_options(num_channels: int) -> dict[str, int]:
    """Tile and warps of the forward: eight channels per thread."""
    return {"POSITIONS": GATED_FORWARD_POSITIONS, "CHANNELS": min(GATED_CHANNELS, block_of(num_channels, 32)), "num_warps": 1}


def backward_options(num_channels: int) -> dict[str, int]:
    """Tile and warps of the backward: four channels per thread."""
    channels = min(GATED_CHANNELS, block_of(num_channels, 32))
    return {"POSITIONS": POSITIONS_PER_SHARE, "CHANNELS": channels, "num_warps": max(1, channels // 128)}


def forward(given: GatedConvolution, before: Tensor | None = None) -> Tensor:
    """Follows the contract of `reference.forward`, for fp32, bf16 and fp16."""
    input_gate, output_gate, value = (unit_stride(each) for each in given[:3])
    pieces, num_positions, num_channels = _rows(value, before)
    y = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    options = forward_options(num_channels)
    if y.numel():
        with on_device_of(value):
            gated_conv_forward_kernel[_grid(value, pieces, options)](
                input_gate, output_gate, value, given_or(before, value), given.weight.contiguous(), given_or(given.bias, value),
                given_or(given.starts, value), y,
                *input_gate.stride()[:2], *output_gate.stride()[:2], *value.stride()[:2],
                pieces, num_positions, num_channels,
                **_flags(given, before), **options,
            )  # fmt: skip
    return y


def backward(
    grad_y: Tensor, given: GatedConvolution, needs: Sequence[bool], before: Tensor | None = None
) -> tuple[tuple[Tensor | None, ...], Tensor | None]:
    """Follows the contract of `reference.backward`."""
    grad_y, input_gate, output_gate, value = (unit_stride(each) for each in (grad_y, *given[:3]))
    weight, bias = given.weight, given.bias
    pieces, num_positions, num_channels = _rows(value, before)
    options = backward_options(num_channels)
    grid, num_taps = _grid(value, pieces, options), weight.shape[1]
    needs_weight = needs[3] or (needs[4] and bias is not None)
    grads = [
        torch.empty(each.shape, dtype=each.dtype, device=each.device) if need else None
        for each, need in zip(given[:3], needs, strict=False)
    ]
    grad_before = None if before is None else torch.empty(before.shape, dtype=before.dtype, device=before.device)
    partial = torch.empty(grid[0] if needs_weight else 0, num_taps + 1, num_channels, dtype=torch.float32, device=value.device)
    if value.numel():
        with on_device_of(value):
            gated_conv_backward_kernel[grid](
                grad_y, input_gate, output_gate, value, given_or(before, value), weight.contiguous(), given_or(bias, value),
                given_or(given.starts, value), *(given_or(each, value) for each in grads), given_or(grad_before, value), partial,
                *grad_y.stride()[:2], *input_gate.stride()[:2], *output_gate.stride()[:2], *value.stride()[:2],
                pieces, num_positions, num_channels,
                **_flags(given, before), NEEDS_INPUT=needs[0], NEEDS_OUTPUT=needs[1], NEEDS_VALUE=needs[2], NEEDS_WEIGHT=needs_weight,
                **options,
            )  # fmt: skip
    total = partial.sum(0)
    grad_weight = _dense(total[:num_taps].mT, weight.dtype) if needs[3] else None
    grad_bias = _dense(total[num_taps], bias.dtype) if bias is not None and needs[4] else None
    return (*grads, grad_weight, grad_bias), grad_before


def _rows(value: Tensor, before: Tensor | None) -> tuple[int, int, int]:
    """Pieces of a sequence, positions of a piece, channels."""
    pieces = 1 if before is None else before.shape[1]
    return pieces, value.shape[1] // pieces, value.shape[2]


def _grid(value: Tensor, pieces: int, options: dict[str, int]) -> tuple[int, int]:
    """Programs along positions and channels."""
    tiles = triton.cdiv(value.shape[1] // pieces, options["POSITIONS"])
    return value.shape[0] * pieces * tiles, triton.cdiv(value.shape[2], options["CHANNELS"])


def _flags(given: GatedConvolution, before: Tensor | None) -> dict[str, int | bool]:
    return {
        "TAPS": given.weight.shape[1],
        "HAS_BIAS": given.bias is not None,
        "PACKED": given.starts is not None,
        "HAS_BEFORE": before is not None,
    }


def _dense(share: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy, because a view would keep all shares alive."""
    return share.to(dtype, copy=True, memory_format=torch.contiguous_format)
