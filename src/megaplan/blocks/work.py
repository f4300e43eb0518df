"""The values of the cost model: the work of an operation, a layer's cost, and the setting both are counted in.

What is counted. FLOPs are the multiplications and additions of contractions (matrix products, convolutions, recurrences); norms,
activations, softmax and rotations count in bytes only. Bytes are ideal: each operand of an operation is read once and each result written
once. Backward is split into the gradient of the inputs (I) and of the weights (W), because pipeline schedules place them separately. Costs
(FLOPs and bytes) are for the unsharded model; times divide by the mesh's degrees, which a `Workload` then carries.

An operation's work, and the memory of its implementations, are in its facts next to its kernel (`megakernels.ops.<operation>.facts`).
"""

from collections.abc import Iterable
from typing import NamedTuple

from megakernels.facts import Facts, Work
from megakernels.ops.packed_weight.facts import Packing


class Workload(NamedTuple):
    """Work for which costs are counted.

    Attributes:
        seq_length: Tokens of a sequence, before context parallelism.
        num_tokens: Tokens of one data rank's microbatch; they share one reading of the weights.
        itemsize: Bytes of one activation element.
        tp: Divides heads, groups and widths that tensor parallelism shards.
        ep: Ranks over which the experts are spread.
        etp: Divides the width of each expert; that number of ranks then computes on each row.
        gathers: True if experts read rows where they are (`host.kernels: triton`), instead of sorted copies.
        joins_loss: True if head and loss are one operation (`Model.joins_loss`), which makes logits again in backward.
        cp: Ranks that share a sequence.
        packed: True if rows hold several documents.
        relations: True if attention adds a relation bias to scores.
        sorts: True if rows are sorted by expert a second time even if all of them come from this rank.
        flash4: True if FlashAttention-4 runs the attention that it takes.
        gathers_latents: True if a context group gathers the latents of latent attention.
        packing: Form of the weights of frozen linears in fewer bits; None if there are none.
        gathers_tokens: True if ranks that share experts gather all their tokens, instead of the rows of each one's experts.
        low: True if linears multiply in eight bits.
    """

    seq_length: int
    num_tokens: int
    itemsize: int
    tp: int = 1
    ep: int = 1
    etp: int = 1
    gathers: bool = False
    joins_loss: bool = False
    cp: int = 1
    packed: bool = False
    relations: bool = False
    sorts: bool = False
    flash4: bool = False
    gathers_latents: bool = False
    packing: Packing | None = None
    gathers_tokens: bool = False
    low: bool = False

    @property
    def positions(self) -> int:
        """Positions of a sequence on this rank."""
        return self.seq_length // self.cp

    @property
    def sequences(self) -> int:
        """Sequences of the microbatch."""
        return max(1, self.num_tokens // self.positions)


class OpWork(NamedTuple):
    """The work of an operation of a block, as a rank runs it.

    `blocks.ops.Op` is the operation, without sizes. Its storages are in the program's `Shapes`, its work is here; decision 19 says why
    these are tables next to the program.

    Attributes:
        name: Name of the operation (`blocks.ops.Op.name`) if the program has a separate operation for this work.
        part: Key of its contractions' efficiency: a letter's linears, `head`, or a kernel.
        work: Per token that passes through it.
        facts: Costs of its implementations; None for a library's product, or one kernel that is ideal.
        weights: Elements of the matrices it multiplies by, on this rank.
        is_linear: A matrix product with a parameter, whose weight gradient a split backward leaves to W.
        own_tokens: Under sequence parallelism it runs on the rank's local tokens, else on the gathered ones.
        closes: The product that ends the block: recompute stops before it.
        skew: Rows of the busiest rank over the even share, of an operation on routed rows; None for others.
        num_steps: Sequential steps of its forward; its backward has twice as many.
        counts: Names of the operations that it counts together; empty for the one of its name.
        in_width: Width of a linear's input on this rank.
        unpacked: Rows and columns of its matrix, if that is made of packed rows, once in forward and once for the input's gradient.
    """

    name: str
    part: str
    work: Work
    facts: Facts | None = None
    weights: int = 0
    is_linear: bool = False
    own_tokens: bool = False
    closes: bool = False
    skew: float | None = None
    num_steps: int = 0
    counts: tuple[str, ...] = ()
    in_width: int = 0
    unpacked: tuple[int, int] = (0, 0)

    def runs_in(self, operations: frozenset[str]) -> bool:
        """True if it is among these operations of the block's program."""
        return operations.issuperset(self.counts or (self.name,))


Works = tuple[OpWork, ...]


def total(ops: Iterable[OpWork]) -> Work:
    """Work of several operations together."""
    return sum((op.work for op in ops), start=Work())


class LayerCost(NamedTuple):
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
