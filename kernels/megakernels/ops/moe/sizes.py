"""Tiles of the routed experts' products and of the router, and the scratch bytes of their kernels; needs no triton.

The bytes are the peak in addition to operands and results. Buffers of the experts' width, and those summed over a token's slots, have a row
for each (token, slot) pair; `kernel` frees each after its last use, in the order that is counted here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megakernels._common.blocks import SMALLEST_DOT, block_of
from megakernels._common.cost import Cost
from megakernels._common.scratch import SUMS_BYTES
from megakernels.ops.moe.inputs import Experts
from megakernels.ops.moe.scores import Router

PULL_COLS = 64
"""Columns of a bf16 tile of the backward's first product, which needs the most registers."""
BIAS_COLS = 128
"""Columns of a tile of the sums that are the biases' gradients."""


def tile_cols(num_cols: int, element_bytes: int, largest: int) -> int:
    """Columns of a product's tile: a power of two, at most `largest` for two-byte elements."""
    return min(largest if element_bytes == 2 else largest // 2, block_of(num_cols, SMALLEST_DOT))


def product_options(num_cols: int, element_bytes: int, largest: int = 128) -> dict[str, int]:
    """Columns of a tile, inner step, warps and stages of the products."""
    return {
        "COLS": tile_cols(num_cols, element_bytes, largest),
        "STEP": 128 // element_bytes,
        "num_warps": 8 if element_bytes == 2 else 4,
        "num_stages": 3,
    }


def outer_options(num_cols: int, element_bytes: int) -> dict[str, int]:
    """The same of the matrices' gradients: with 128 columns a tile of two-byte elements takes longer to issue than to multiply."""
    return product_options(num_cols, element_bytes, largest=256 if element_bytes == 2 and num_cols % 256 == 0 else 128)


def bias_options() -> dict[str, int]:
    """Tile and warps of the biases' gradients."""
    return {"ROWS": 16, "COLS": BIAS_COLS, "num_warps": 4}


def bias_shares(given: Experts, needs: Sequence[bool]) -> int:
    """Shares of the weights' gradient that the products with the bias of `down` are."""
    return -(-given.up.shape[2] // BIAS_COLS) if given.down_bias is not None and needs[1] else 0


def forward_scratch_bytes(given: Experts) -> int:
    """Scratch bytes of `kernel.forward`: the activated rows; with several slots per token also their products, until they are summed."""
    x, weights, rows, up = given.x, given.weights, given.rows, given.up
    num_experts, width, num_hidden = up.shape
    size, num_pairs = x.element_size(), rows.shape[0]
    hidden, products, y = (count * size for count in (num_pairs * width, num_pairs * num_hidden, weights.shape[0] * num_hidden))
    return _tile_bytes(num_experts) + (hidden if weights.shape[1] == 1 else max(hidden + products - y, products))


def backward_scratch_bytes(given: Experts, needs: Sequence[bool]) -> int:
    """Scratch bytes of `kernel.backward`; `needs` are the required gradients of `inputs.GRADIENTS`."""
    x, weights, rows, up, gated = given.x, given.weights, given.rows, given.up, given.gate is not None
    num_experts, width, num_hidden = up.shape
    size, num_pairs, num_slots = x.element_size(), rows.shape[0], weights.shape[1]
    inner, matrix = num_pairs * width * size, up.numel() * size
    num_shares = -(-width // tile_cols(width, size, PULL_COLS)) + bias_shares(given, needs)
    buffers = 3 if gated else 2  # the gradients of the first products' outputs, and the activated rows
    made = (weights.numel() * 4 if needs[1] else 0) + _needed_bytes(given.down_bias, needs[7])
    peaks = [buffers * inner + num_shares * num_pairs * 4 + made]
    if needs[0]:
        own, products = weights.shape[0] * num_hidden * size, num_pairs * num_hidden * size
        peaks.append(buffers * inner + made + own + (0 if num_slots == 1 else products))
        made += own
    of_gate = ((needs[2], _needed_bytes(given.gate_bias, needs[5])),) if gated else ()
    for needed, of_bias in ((needs[4], 0), *of_gate, (needs[3], _needed_bytes(given.up_bias, needs[6]))):
        made += of_bias + (matrix if needed else 0)
        peaks.append(buffers * inner + made)
        buffers -= 1
    return _tile_bytes(num_experts) + max(peaks) - made


def forward_cost(given: Experts) -> Cost:
    """Cost of `kernel.routed_experts_forward`: one product per row and matrix; a token is read once per slot."""
    matrices = 3 if given.gate is not None else 2
    return Cost({given.x.dtype: matrices * _product_flops(given)}, again_bytes=_gathered_again(given))


def backward_cost(given: Experts, needs: Sequence[bool]) -> Cost:
    """Cost of `kernel.routed_experts_backward`; `needs` are the required gradients of `inputs.GRADIENTS`.

    The gradients of tokens are gathered for the product with `down`, for the gradient of `down` and for its bias; the tokens are gathered
    for the gradient of each other matrix.
    """
    first = 2 if given.gate is not None else 1
    products = 1 + first * needs[0] + needs[4] + (given.gate is not None and needs[2]) + needs[3]
    gathers = 1 + needs[4] + (given.gate is not None and needs[2]) + needs[3] + (given.down_bias is not None and (needs[1] or needs[7]))
    return Cost({given.x.dtype: products * _product_flops(given)}, again_bytes=gathers * _gathered_again(given))


def _needed_bytes(bias: Tensor | None, needed: bool) -> int:
    """Bytes of a bias' gradient."""
    return bias.nbytes if bias is not None and needed else 0


def _product_flops(given: Experts) -> int:
    """FLOPs of the product of all rows with one matrix per expert."""
    return 2 * given.rows.shape[0] * given.up.shape[1] * given.up.shape[2]


def _gathered_again(given: Experts) -> int:
    """Bytes of reading [N, h] once per row, N·k times in all, in addition to reading it once."""
    return (given.rows.shape[0] - given.weights.shape[0]) * given.up.shape[2] * given.x.element_size()


def _tile_bytes(num_experts: int) -> int:
    return 2 * num_experts * 4  # the running sums of rows and of tiles by expert


def columns_of(num_experts: int, num_groups: int) -> tuple[int, int]:
    """Groups and columns of a group in a tile of the router: the powers of two that hold them."""
    return block_of(num_groups), block_of(num_experts // num_groups)


def gradient_parts(given: Router) -> int:
    """Parts of the gradient of the logits: two bf16 ones for products with bf16 operands, else one of fp32."""
    return 2 if given.x.dtype == given.weight.dtype == torch.bfloat16 else 1


def route_backward_scratch_bytes(given: Router, needs: Sequence[bool]) -> int:
    """Scratch bytes of `kernel_route.route_backward`; `needs` are the required gradients of x, weight, bias and correction."""
    x, weight, bias, correction = given[:4]
    parts, of_rows, of_experts = gradient_parts(given), x.numel() * SUMS_BYTES, weight.numel() * SUMS_BYTES
    gradient, made = x.shape[0] * weight.shape[0] * SUMS_BYTES, 0
    is_wide = x.dtype == torch.float32, weight.dtype == torch.float32
    inside = [0]
    if needs[0]:
        made = x.numel() * x.element_size()
        copied = 0 if is_wide[1] else of_experts
        product = 0 if is_wide[0] else of_rows
        inside.append(made + 2 * weight.numel() * weight.element_size() if parts == 2 else max(product + copied, product + made))
    if needs[1]:
        own = weight.numel() * weight.element_size()
        copied = 0 if is_wide[0] else of_rows
        product = 0 if is_wide[1] else of_experts
        inside.append(made + (2 * of_experts + own if parts == 2 else max(product + own, of_experts + copied)))
        made += own
    if bias is not None and needs[2]:
        own = bias.numel() * bias.element_size()
        total = parts * bias.numel() * SUMS_BYTES
        inside.append(made + total + (own if parts == 2 or bias.dtype != torch.float32 else 0))
        made += own
    if correction is not None and needs[3]:
        made += correction.numel() * correction.element_size()
    return gradient + max(*inside, made) - made
