"""The values of the cost model: an op's work per token, a layer's cost, and the setting both are counted in.

What is counted. FLOPs are the multiplications and additions of contractions (matrix products, convolutions, recurrences); norms,
activations, softmax and rotations count in bytes only. Bytes are ideal: each operand of an op is read once and each result written once.
Backward is split into the gradient of the inputs (I) and of the weights (W), because pipeline schedules place them apart. All figures are
for the unsharded model; degrees divide them elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """What costs are counted for.

    Attributes:
        seq_length: Tokens of a sequence, before context parallelism.
        num_tokens: Tokens of one data rank's microbatch; they share one reading of the weights.
        itemsize: Bytes of one activation element.
    """

    seq_length: int
    num_tokens: int
    itemsize: int

    def per_token(self, total: int) -> int:
        """A sequence's total as a whole number per token, rounded up: at most one FLOP or byte per token too many."""
        return -(-total // self.seq_length)


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs and activation bytes of an op, per token; sums with `+`, repeats with `*`.

    Attributes:
        forward: FLOPs of the forward pass.
        input_grad: FLOPs of the gradient with respect to activations, repeated forward work included.
        weight_grad: FLOPs of the gradient with respect to parameters.
        recomputed: The part of `input_grad` that repeats forward work which the op does not keep.
        moved: Activation bytes read and written, forward and backward.
    """

    forward: int = 0
    input_grad: int = 0
    weight_grad: int = 0
    recomputed: int = 0
    moved: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.forward + other.forward,
            self.input_grad + other.input_grad,
            self.weight_grad + other.weight_grad,
            self.recomputed + other.recomputed,
            self.moved + other.moved,
        )

    def __mul__(self, times: int) -> Work:
        return Work(self.forward * times, self.input_grad * times, self.weight_grad * times, self.recomputed * times, self.moved * times)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Cost of one block, unsharded.

    Attributes:
        forward_flops: Per token.
        input_grad_flops: Per token, repeated forward work included.
        weight_grad_flops: Per token.
        recomputed_flops: Per token; the part of `input_grad_flops` that repeats forward work. Utilisation (MFU) does not count it.
        activation_bytes: Moved per token, forward and backward.
        weight_bytes: Moved per microbatch: weights read by F and by I, gradients read and written by W.
        num_tokens: Tokens of a microbatch, which share `weight_bytes`.
    """

    forward_flops: int
    input_grad_flops: int
    weight_grad_flops: int
    recomputed_flops: int
    activation_bytes: int
    weight_bytes: int
    num_tokens: int

    @property
    def total_flops(self) -> int:
        """FLOPs per token that the device executes: F + I + W."""
        return self.forward_flops + self.input_grad_flops + self.weight_grad_flops

    @property
    def model_flops(self) -> int:
        """FLOPs per token that the model needs: `total_flops` without repeated work (PaLM's MFU, arXiv:2204.02311, appendix B)."""
        return self.total_flops - self.recomputed_flops

    @property
    def moved_bytes(self) -> int:
        """Bytes per token, forward and backward, with the token's share of the weight traffic rounded up."""
        return self.activation_bytes + -(-self.weight_bytes // self.num_tokens)
