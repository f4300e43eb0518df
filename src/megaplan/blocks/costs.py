"""Work of the ops that several families share: linears, norms, activations, convolution, cross-entropy."""

from __future__ import annotations

from dataclasses import replace

from megaplan.blocks.work import Op, Ops, Work, Workload
from megaplan.scalars import GATED, Activation

FP32_BYTES = 4


def linear(load: Workload, in_width: int, out_width: int) -> Work:
    """A linear y = x Wᵀ: 2·in·out FLOPs each for y, dx = dy W and dW = dyᵀ x.

    Bytes: each of the three reads or writes one activation of either width.

    Source: counting multiply-adds; the 6·N rule of arXiv:2001.08361, section 2.1.
    """
    flops, moved = 2 * in_width * out_width, (in_width + out_width) * load.itemsize
    return Work(flops, flops, flops, moved_forward=moved, moved_input=moved, moved_weight=moved)


def linear_op(
    load: Workload,
    name: str,
    part: str,
    in_width: int,
    out_width: int,
    *,
    own_tokens: bool = False,
    closes: bool = False,
) -> Op:
    """A linear with the widths that this rank has, as an op."""
    return Op(
        name,
        part,
        linear(load, in_width, out_width),
        weights=in_width * out_width,
        is_linear=True,
        own_tokens=own_tokens,
        closes=closes,
        in_width=in_width,
    )


def detached_linear_op(load: Workload, name: str, part: str, in_width: int, out_width: int, *, own_tokens: bool = False) -> Op:
    """A linear whose input gets no gradient: two products instead of three."""
    op = linear_op(load, name, part, in_width, out_width, own_tokens=own_tokens)
    return op._replace(work=replace(op.work, input_grad=0, moved_input=0))


def residual_op(load: Workload, part: str, width: int, name: str = "norm") -> Op:
    """`residual_norm` on the rank's own tokens."""
    return Op(name, part, residual_norm(load, width), own_tokens=True)


def norm(load: Workload, width: int) -> Work:
    """RMSNorm: forward reads x and writes y; backward reads x and dy and writes dx; one fp32 statistic is written and read.

    Source: counting operands, arXiv:1910.07467, equation 4.
    """
    return Work(moved_forward=2 * width * load.itemsize + FP32_BYTES, moved_input=3 * width * load.itemsize + FP32_BYTES)


def residual_norm(load: Workload, width: int) -> Work:
    """Residual addition fused with the next RMSNorm: four activations forward, four backward, one fp32 statistic.

    Source: counting operands: x, f(x), sum, normed; then their gradients and the sum.
    """
    return Work(moved_forward=4 * width * load.itemsize + FP32_BYTES, moved_input=4 * width * load.itemsize + FP32_BYTES)


def gated_norm(load: Workload, width: int, num_groups: int) -> Work:
    """RMSNorm of x · silu(gate): three activations forward, five backward, one fp32 statistic a group.

    Source: counting operands, arXiv:2405.21060, section 7.1.
    """
    return Work(
        moved_forward=3 * width * load.itemsize + FP32_BYTES * num_groups, moved_input=5 * width * load.itemsize + FP32_BYTES * num_groups
    )


def activation(load: Workload, width: int, kind: Activation) -> Work:
    """Elementwise: swiglu and geglu move 3 activations forward and 5 backward; relu2 and gelu 2 and 3.

    Source: counting operands: (gate, up → y; gate, up, dy → dgate, dup), (x → y; x, dy → dx).
    """
    forward, backward = (3, 5) if kind in GATED else (2, 3)
    return Work(moved_forward=forward * width * load.itemsize, moved_input=backward * width * load.itemsize)


def scaled(load: Workload, width: int) -> Work:
    """A product with constant factors: read and write, forward and backward."""
    return Work(moved_forward=2 * width * load.itemsize, moved_input=2 * width * load.itemsize)


def rope(load: Workload, width: int) -> Work:
    """Rotation of `width` elements: read and written once forward, once backward.

    Source: counting operands, arXiv:2104.09864, equation 34.
    """
    return Work(moved_forward=2 * width * load.itemsize, moved_input=2 * width * load.itemsize)


def causal_conv1d(load: Workload, channels: int, kernel: int) -> Work:
    """Depthwise convolution with activation: 2·C·K FLOPs each for y, dx and dW; two activations forward, three backward.

    Source: counting multiply-adds.
    """
    flops = 2 * channels * kernel
    return Work(flops, flops, flops, moved_forward=2 * channels * load.itemsize, moved_input=3 * channels * load.itemsize)


def mlp(
    load: Workload, part: str, hidden_size: int, ffn_hidden_size: int, kind: Activation, prefix: str = "", *, scales_gate: bool = False
) -> Ops:
    """One MLP: up (and gate for swiglu and geglu), activation, down; `tp` shards its width; `scales_gate`: the gate has a factor.

    Source: arXiv:2002.05202, equations 5 and 6.
    """
    width = ffn_hidden_size // load.tp
    names = ("gate_proj", "up_proj") if kind in GATED else ("up_proj",)
    return (
        *(linear_op(load, f"{prefix}{name}", part, hidden_size, width) for name in names),
        *((Op(f"{prefix}scale gate", part, scaled(load, width)),) if scales_gate else ()),
        Op(f"{prefix}activation", part, activation(load, width, kind)),
        linear_op(load, f"{prefix}down_proj", part, width, hidden_size, closes=True),
    )


def cross_entropy(load: Workload, vocab_size: int) -> Work:
    """Logits are read forward, read again and overwritten by their gradient's write backward.

    Source: counting operands.
    """
    return Work(moved_forward=vocab_size * load.itemsize + FP32_BYTES, moved_input=2 * vocab_size * load.itemsize + FP32_BYTES)


def gather(load: Workload, width: int, grad_bytes: int) -> Work:
    """Rows of a table: one row read and written forward; backward reads its gradient and adds it into the table's gradient.

    Source: counting operands; a lookup has no FLOPs.
    """
    return Work(moved_forward=2 * width * load.itemsize, moved_input=width * (load.itemsize + 2 * grad_bytes))
