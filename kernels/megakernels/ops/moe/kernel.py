"""Launches of the Triton kernels of routed experts.

Products of rows gather tokens while they read, and products that sum over rows read copies of tokens in the rows' order; buffers are freed
after their last use, in the order that `sizes` counts.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megakernels._common.tiles import given_or, has_descriptor, has_large_tiles, on_device_of, unit_stride
from megakernels.facts import block_of
from megakernels.ops.activation.kernel import KINDS
from megakernels.ops.moe.facts import (
    BIAS_COLS,
    BLOCK_ROWS,
    BLOCK_STEP,
    PULL_COLS,
    bias_options,
    down_options,
    outer_options,
    pull_options,
    tile_cols,
    up_options,
)
from megakernels.ops.moe.inputs import Experts, Made
from megakernels.ops.moe.kernel_plan import Tiles, inverse, spread, sum_rows, tiles_of
from megakernels.ops.moe.kernel_products import CLAMPED, bias_kernel, down_bias_kernel, down_kernel, outer_kernel, pull_kernel, up_kernel
from megakernels.ops.moe.sizes import sizes_of


def routed_experts_forward(given: Experts) -> Made:
    """Follows the contract of `reference.routed_experts_forward`, for fp32, bf16 and fp16."""
    x, weights, rows, counts, gate, up, down = given[:7]
    x, weights, up, down = unit_stride(x), weights.contiguous(), up.contiguous(), down.contiguous()
    (num_pairs,), (num_experts, width, num_hidden), top_k = rows.shape, up.shape, weights.shape[1]
    tiles = tiles_of(counts, num_pairs, x.element_size())
    made = (num_pairs, width)
    up_out, hidden = (torch.empty(made, dtype=x.dtype, device=x.device) for _ in range(2))
    gate_out = None if gate is None else torch.empty(made, dtype=x.dtype, device=x.device)
    out = torch.empty(num_pairs, num_hidden, dtype=x.dtype, device=x.device)
    experts = block_of(num_experts)
    if num_pairs:
        with on_device_of(x):
            blocks = reads_blocks(tiles, num_hidden, width, up)
            options = up_options(given.activation, width, x.element_size(), blocks=blocks)
            first = [up if gate is None else gate.contiguous(), up]
            up_kernel[(triton.cdiv(width, options["COLS"]), tiles.most)](
                x, *(described(each, options["COLS"], options["STEP"]) if blocks else each for each in first),
                given_or(given.gate_bias, weights), given_or(given.up_bias, weights), weights,
                rows, tiles.ends, tiles.tile_ends, up_out if gate_out is None else gate_out, up_out, hidden,
                x.stride(0),
                top_k, num_experts, num_hidden, width, given.limit or 0.0,
                KIND=kind_of(given), GATED=gate is not None, HAS_GATE_BIAS=given.gate_bias is not None,
                HAS_UP_BIAS=given.up_bias is not None, BLOCKS=blocks, TILE=tiles.rows, EXPERTS=experts, **options,
            )  # fmt: skip
        _times(tiles, given, hidden, down, None, None, out, transposed=True)
    del hidden
    return out if top_k == 1 else sum_rows(out, None, top_k), gate_out, up_out


def routed_experts_backward(
    grad_y: Tensor, given: Experts, gate_out: Tensor | None, up_out: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Follows the contract of `reference.routed_experts_backward`."""
    x, weights, rows, counts, gate, up, down = given[:7]
    grad_y, x, weights, up, down = unit_stride(grad_y), unit_stride(x), weights.contiguous(), up.contiguous(), down.contiguous()
    (num_pairs, width), num_hidden, top_k = up_out.shape, up.shape[2], weights.shape[1]
    tiles = tiles_of(counts, num_pairs, x.element_size())
    num_shares = triton.cdiv(width, tile_cols(width, x.element_size(), PULL_COLS))
    grad_up_out, hidden = torch.empty_like(up_out), torch.empty_like(up_out)
    grad_gate_out = None if gate_out is None else torch.empty_like(gate_out)
    shares = torch.empty(num_shares + sizes_of(given).bias_shares(weights=needs[1]), num_pairs, dtype=torch.float32, device=x.device)
    if num_pairs:
        _pull(tiles, given, grad_y, (gate_out, up_out), (grad_gate_out, grad_up_out), hidden, shares)
    grad_down_bias = down_bias_gradient(tiles, given, grad_y, shares[num_shares:], needs[7])
    grad_weights = shares.sum(0).view(weights.shape) if needs[1] else None
    del shares
    grad_x = grad_gate = grad_up = grad_down = grad_gate_bias = grad_up_bias = None
    if needs[0]:
        grad_x = torch.empty(num_pairs, num_hidden, dtype=x.dtype, device=x.device)
        other = None if gate is None else gate.contiguous()
        _times(tiles, given, grad_up_out, up, grad_gate_out, other, grad_x, transposed=False)
        grad_x = grad_x if top_k == 1 else sum_rows(grad_x, None, top_k)
    of_first = needs[3] or (needs[2] and grad_gate_out is not None)
    positions = inverse(rows) if of_first or needs[4] else rows
    if needs[4]:  # free each product's operand before the next result is allocated
        copied = spread(grad_y, positions, top_k)
        grad_down = outer(tiles, copied, hidden)
        del copied
    del hidden
    copied = spread(x, positions, top_k) if of_first else x
    if needs[5] and grad_gate_out is not None:
        grad_gate_bias = bias_gradient(tiles, given.gate_bias, grad_gate_out)
    if needs[2] and grad_gate_out is not None:
        grad_gate = outer(tiles, grad_gate_out, copied)
    del grad_gate_out
    if needs[6]:
        grad_up_bias = bias_gradient(tiles, given.up_bias, grad_up_out)
    if needs[3]:
        grad_up = outer(tiles, grad_up_out, copied)
    return grad_x, grad_weights, grad_gate, grad_up, grad_down, grad_gate_bias, grad_up_bias, grad_down_bias


def _pull(
    tiles: Tiles, given: Experts, grad_y: Tensor, made: tuple[Tensor | None, Tensor], gradients: tuple[Tensor | None, Tensor],
    hidden: Tensor, shares: Tensor,
) -> None:  # fmt: skip
    """The gradients of gate_out and up_out, the weighted hidden rows, and shares of the weights' gradient."""
    down, top_k, (num_experts, width, num_hidden) = given.down.contiguous(), given.weights.shape[1], given.up.shape
    (gate_out, up_out), (grad_gate_out, grad_up_out) = made, gradients
    blocks = kind_of(given) != CLAMPED and reads_blocks(tiles, num_hidden, width, down)  # large tiles of CLAMPED spill registers
    options = pull_options(width, up_out.element_size(), blocks=blocks)
    with on_device_of(up_out):
        pull_kernel[(triton.cdiv(width, options["COLS"]), tiles.most)](
            grad_y, described(down, options["STEP"], options["COLS"]) if blocks else down, given.weights.contiguous(),
            given.rows, tiles.ends, tiles.tile_ends,
            given_or(gate_out, up_out), up_out, given_or(grad_gate_out, grad_up_out), grad_up_out, hidden, shares,
            grad_y.stride(0),
            top_k, num_experts, up_out.shape[0], num_hidden, width, given.limit or 0.0,
            KIND=kind_of(given), GATED=gate_out is not None, BLOCKS=blocks, TILE=tiles.rows, EXPERTS=block_of(num_experts), **options,
        )  # fmt: skip


def _times(
    tiles: Tiles, given: Experts, a: Tensor, b: Tensor, other_a: Tensor | None, other_b: Tensor | None, out: Tensor, *, transposed: bool
) -> None:
    """Sorted rows a [M, i] times b [E, i, c] (transposed: [E, c, i]), plus the other product, into out [M, c] by token and slot.

    Transposed is the forward's product with down, to which the weighted bias is added.
    """
    bias = given.down_bias if transposed else None
    inner, num_cols = a.shape[1], out.shape[1]
    blocks = reads_blocks(tiles, inner, num_cols, a, b)
    options = down_options(num_cols, a.element_size(), blocks=blocks, pair=other_a is not None)
    operands = [a, b, a if other_a is None else other_a, b if other_b is None else other_b]
    if blocks:
        step, cols = options["STEP"], options["COLS"]
        sides = [tiles.rows, step], [cols, step] if transposed else [step, cols]
        operands = [described(each, *sides[index % 2]) for index, each in enumerate(operands)]
    if a.shape[0]:
        with on_device_of(a):
            down_kernel[(triton.cdiv(num_cols, options["COLS"]), tiles.most)](
                *operands, given_or(bias, given.weights), given.weights.contiguous(), given.rows, tiles.ends, tiles.tile_ends, out,
                b.shape[0], inner, num_cols,
                TURNED=transposed, PAIR=other_a is not None, HAS_BIAS=bias is not None, BLOCKS=blocks,
                TILE=tiles.rows, EXPERTS=block_of(b.shape[0]), **options,
            )  # fmt: skip


def outer(tiles: Tiles, a: Tensor, b: Tensor) -> Tensor:
    """Σ over each expert's rows of a ⊗ b, both sorted by expert: [E, a's width, b's width]."""
    num_experts, num_across, num_cols = tiles.ends.shape[0], a.shape[1], b.shape[1]
    out = torch.empty(num_experts, num_across, num_cols, dtype=a.dtype, device=a.device)
    blocks = has_large_tiles(a.device) and has_descriptor(a) and has_descriptor(b)
    options = outer_options(num_across, num_cols, a.element_size(), blocks=blocks)
    a_blocks, b_blocks = (described(each, options["STEP"], options[side]) if blocks else each for each, side in ((a, "TILE"), (b, "COLS")))
    with on_device_of(a):
        outer_kernel[(triton.cdiv(num_cols, options["COLS"]), triton.cdiv(num_across, options["TILE"]), num_experts)](
            a_blocks, b_blocks, a, b, tiles.ends, out, a.stride(0), b.stride(0), num_across, num_cols, BLOCKS=blocks, **options
        )
    return out


def bias_gradient(tiles: Tiles, bias: Tensor | None, grad: Tensor) -> Tensor | None:
    """The sum of each expert's rows: [E, grad's width] in the bias' dtype; None without a bias."""
    if bias is None:
        return None
    num_experts, num_cols = bias.shape
    out = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    with on_device_of(grad):
        grid = triton.cdiv(num_cols, BIAS_COLS), num_experts
        bias_kernel[grid](grad, tiles.ends, out, grad.stride(0), num_cols, **bias_options())
    return out


def down_bias_gradient(tiles: Tiles, given: Experts, grad_y: Tensor, shares: Tensor, needed: bool) -> Tensor | None:
    """The sum of each expert's weighted rows of grad_y, read at their tokens, if needed: [E, h].

    If there are shares, they get each row's products with its expert's bias, of some columns each.
    """
    bias, weights = given.down_bias, given.weights.contiguous()
    if bias is None or not (needed or shares.shape[0]):
        return None
    num_experts, num_cols = bias.shape
    out = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device) if needed else None
    with on_device_of(grad_y):
        down_bias_kernel[(triton.cdiv(num_cols, BIAS_COLS), num_experts)](
            grad_y, bias.contiguous(), weights, given.rows, tiles.ends, bias if out is None else out,
            shares if shares.shape[0] else weights,
            grad_y.stride(0),
            weights.shape[1], given.rows.shape[0], num_cols,
            NEEDS_BIAS=needed, NEEDS_WEIGHTS=shares.shape[0] > 0, **bias_options(),
        )  # fmt: skip
    return out


def reads_blocks(tiles: Tiles, inner: int, num_cols: int, *operands: Tensor) -> bool:
    """True if descriptors read these operands of a product of sorted rows, of which an expert has enough for large tiles."""
    large = tiles.rows == BLOCK_ROWS and num_cols >= BLOCK_ROWS and inner % BLOCK_STEP == 0 and has_large_tiles(operands[0].device)
    return large and all(has_descriptor(each.flatten(0, -2)) for each in operands)


def described(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Descriptor of tiles of a matrix, or of a stack of matrices under one another."""
    return TensorDescriptor.from_tensor(tensor.flatten(0, -2), [rows, columns])


def kind_of(given: Experts) -> int:
    """The compiled kind of an activation."""
    return KINDS[given.activation] if given.limit is None else CLAMPED
