"""Work of the ops that several families share: linears, norms, activations, convolution, cross-entropy."""

from __future__ import annotations

from megaplan.cost.work import Work, Workload
from megaplan.spec.models import Activation

FP32_BYTES = 4


def linear(load: Workload, in_width: int, out_width: int) -> Work:
    """A linear y = x Wᵀ: 2·in·out FLOPs each for y, dx = dy W and dW = dyᵀ x.

    Bytes: each of the three reads or writes one activation of either width.

    Source: counting multiply-adds; the 6·N rule of arXiv:2001.08361, section 2.1.
    """
    flops = 2 * in_width * out_width
    return Work(flops, flops, flops, moved=3 * (in_width + out_width) * load.itemsize)


def norm(load: Workload, width: int) -> Work:
    """RMSNorm: forward reads x and writes y; backward reads x and dy and writes dx; one fp32 statistic is written and read.

    Source: counting operands, arXiv:1910.07467, equation 4.
    """
    return Work(moved=5 * width * load.itemsize + 2 * FP32_BYTES)


def residual_norm(load: Workload, width: int) -> Work:
    """Residual addition fused with the next RMSNorm: four activations forward, four backward, one fp32 statistic.

    Source: counting operands: x, f(x), sum, normed; then their gradients and the sum.
    """
    return Work(moved=8 * width * load.itemsize + 2 * FP32_BYTES)


def gated_norm(load: Workload, width: int, num_groups: int) -> Work:
    """RMSNorm of x · silu(gate): three activations forward, five backward, one fp32 statistic a group.

    Source: counting operands, arXiv:2405.21060, section 7.1.
    """
    return Work(moved=8 * width * load.itemsize + 2 * FP32_BYTES * num_groups)


def activation(load: Workload, width: int, kind: Activation) -> Work:
    """Elementwise: swiglu moves 3 activations forward and 5 backward; relu2 and gelu 2 and 3.

    Source: counting operands: (gate, up → y; gate, up, dy → dgate, dup), (x → y; x, dy → dx).
    """
    return Work(moved=(8 if kind == "swiglu" else 5) * width * load.itemsize)


def rope(load: Workload, width: int) -> Work:
    """Rotation of `width` elements: read and written once forward, once backward.

    Source: counting operands, arXiv:2104.09864, equation 34.
    """
    return Work(moved=4 * width * load.itemsize)


def causal_conv1d(load: Workload, channels: int, kernel: int) -> Work:
    """Depthwise convolution with activation: 2·C·K FLOPs each for y, dx and dW; two activations forward, three backward.

    Source: counting multiply-adds.
    """
    flops = 2 * channels * kernel
    return Work(flops, flops, flops, moved=5 * channels * load.itemsize)


def mlp(load: Workload, hidden_size: int, ffn_hidden_size: int, kind: Activation) -> Work:
    """One MLP: up (and gate for swiglu), activation, down.

    Source: arXiv:2002.05202, equations 5 and 6.
    """
    up = linear(load, hidden_size, ffn_hidden_size) * (2 if kind == "swiglu" else 1)
    return up + activation(load, ffn_hidden_size, kind) + linear(load, ffn_hidden_size, hidden_size)


def cross_entropy(load: Workload, vocab_size: int) -> Work:
    """Logits are read forward, read again and overwritten by their gradient's write backward.

    Source: counting operands.
    """
    return Work(moved=3 * vocab_size * load.itemsize + 2 * FP32_BYTES)


def gather(load: Workload, width: int, grad_bytes: int) -> Work:
    """Rows of a table: one row read and written forward; backward reads its gradient and adds it into the table's gradient.

    Source: counting operands; a lookup has no FLOPs.
    """
    return Work(moved=width * (3 * load.itemsize + 2 * grad_bytes))
