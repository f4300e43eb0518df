"""The vocabulary of the operations' facts: plain integers, without torch.

`ops/<operation>/facts.py` has a record of the sizes of a call. Its methods say which sizes the Triton kernels take, with which tiles and
scratch, and how many bytes, FLOPs and launches a pass of each implementation has. The kernels' launch code, the registration of scratch
and cost, the roofline and `megaplan` read the same record.

FLOPs of a pass are counted in bf16 products: TF32 runs at half that rate, and an fp32 product is three TF32 ones.
"""

from dataclasses import astuple, dataclass
from typing import NamedTuple, Protocol

SMALLEST_DOT = 16
"""Smallest side of a matrix product's tile, in elements."""
DESCRIPTOR_BYTES = 16
"""Bytes at whose multiples the rows of a tensor descriptor's tensor begin."""
LARGEST_TILE = {2: 64, 4: 16}
"""Largest number of positions of a scan's tile, by bytes of an element: a warp group's rows of a product, and fewer in fp32."""
TILE_ELEMENTS = 2048
"""Elements of a tile of narrow rows, which share it."""
LARGEST_TILE_WIDTH = 1024
"""Columns of a tile of rows that several programs share."""
SUMS_BYTES = 4
"""Bytes of an accumulated value: fp32."""
TF32 = 2
"""bf16 products that take the time of one TF32 product."""
EXACT = 3 * TF32
"""bf16 products that take the time of one fp32 product."""
ISSUED = 32
"""bf16 products in the time of one issued instruction of a thread: a multiprocessor of Hopper does 4,096 and 128 per clock."""


PRODUCT, MEMORY, ADD, SUM, JOIN = "product", "memory", "add", "add.fp32", "join"
"""Kinds of the kernels of torch and its libraries: products, one pass over memory, sums of activations and of fp32, concatenation."""


def block_of(size: int, smallest: int = 1) -> int:
    """The tile size for `size` elements: a power of two, at least `smallest`."""
    return max(smallest, 1 << max(0, size - 1).bit_length())


def ceil_div(value: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-value // divisor)


@dataclass(frozen=True, slots=True)
class Work:
    """Ideal FLOPs and activation bytes of an operation, per token; sums with `+`, repeats with `*`.

    FLOPs are the multiplications and additions of contractions (matrix products, convolutions, recurrences). Bytes: each operand is read
    once and each result written once.

    Attributes:
        forward: FLOPs of the forward pass.
        input_grad: FLOPs of the gradient with respect to activations, repeated forward work included.
        weight_grad: FLOPs of the gradient with respect to parameters.
        recomputed: Part of `input_grad` that repeats forward work, because its result is not kept.
        moved_forward: Activation bytes that the forward pass reads and writes.
        moved_input: Activation bytes of the gradient with respect to activations.
        moved_weight: Activation bytes of a weight gradient that is a separate product.
    """

    forward: int = 0
    input_grad: int = 0
    weight_grad: int = 0
    recomputed: int = 0
    moved_forward: int = 0
    moved_input: int = 0
    moved_weight: int = 0

    @property
    def moved(self) -> int:
        """Activation bytes read and written, forward and backward."""
        return self.moved_forward + self.moved_input + self.moved_weight

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.forward + other.forward,
            self.input_grad + other.input_grad,
            self.weight_grad + other.weight_grad,
            self.recomputed + other.recomputed,
            self.moved_forward + other.moved_forward,
            self.moved_input + other.moved_input,
            self.moved_weight + other.moved_weight,
        )

    def share(self, parts: int) -> "Work":
        """The work of one of several equal parts, rounded down."""
        return self if parts == 1 else Work(*(each // parts for each in astuple(self)))

    def __mul__(self, times: int) -> "Work":
        return Work(
            self.forward * times,
            self.input_grad * times,
            self.weight_grad * times,
            self.recomputed * times,
            self.moved_forward * times,
            self.moved_input * times,
            self.moved_weight * times,
        )


class KindWork(NamedTuple):
    """The kernels of one kind in a pass: kernels that reach the same share of their counted lower bound.

    Attributes:
        kind: Name of the kind, as in a device's measured constants.
        num_bytes: Bytes read and written.
        flops: FLOPs of products.
        launches: Number of kernels.
        steps: Dependent steps of a recurrence.
    """

    kind: str
    num_bytes: int
    flops: int
    launches: int
    steps: int = 0


class KindShare(NamedTuple):
    """The kernels of one kind in a pass, as fractions of its bytes and products.

    Attributes:
        kind: Name of the kind, as in a device's measured constants.
        num_bytes: Numerator of the fraction of the bytes.
        flops: Numerator of the fraction of the products.
        launches: Number of kernels.
        of: Denominator of both.
    """

    kind: str
    num_bytes: int = 100
    flops: int = 100
    launches: int = 1
    of: int = 100


class Pass(NamedTuple):
    """One pass of an operation on a rank's microbatch.

    Attributes:
        num_bytes: Bytes read and written, without weights.
        flops: FLOPs of products, in units of bf16 products.
        launches: Number of kernels.
        kinds: Kinds of kernels that the pass consists of; if they are fractions, the first has the launches that are left after the
            others. Empty if no constants are measured.
        is_fp32: True if products run in fp32, outside tensor cores; plain torch only.
    """

    num_bytes: int
    flops: int
    launches: int
    kinds: tuple[KindWork | KindShare, ...] = ()
    is_fp32: bool = False

    def parts(self) -> tuple[KindWork, ...]:
        """The kinds with their bytes and products."""
        rest = self.launches - sum(kind.launches for kind in self.kinds[1:])
        return tuple(
            kind
            if isinstance(kind, KindWork)
            else KindWork(
                kind.kind,
                self.num_bytes * kind.num_bytes // kind.of,
                self.flops * kind.flops // kind.of,
                kind.launches if index else rest,
            )
            for index, kind in enumerate(self.kinds)
        )


Passes = tuple[Pass, Pass]
"""Forward, and backward with the gradients of weights."""


class KernelScratch(NamedTuple):
    """Peak bytes that an operation holds inside itself, in addition to operands and results, forward and backward."""

    forward: int
    backward: int


class KernelBytes(NamedTuple):
    """Bytes of one run of a scan's kernels.

    Attributes:
        results: Bytes of its first results: y and the saved states, or the gradients of its inputs.
        last: Bytes of its last result: the final state, or the gradient of the initial state.
        scratch: Peak scratch bytes, in addition to all results.
    """

    results: int
    last: int
    scratch: int


class Facts(Protocol):
    """The passes of an operation's implementations, which the cost model prices."""

    def kernels(self, work: Work, tokens: int) -> Passes | None:
        """Both passes by Triton kernels; None if the kernels do not support the sizes.

        Args:
            work: Ideal work of the operation, per token.
            tokens: Tokens of the call.
        """
        ...

    def plain(self, work: Work, tokens: int) -> Passes | None:
        """Both passes by plain torch, where every intermediate goes through memory; None for one kernel that is ideal."""
        ...


class KernelPass(NamedTuple):
    """A pass by Triton kernels whose bytes and products are percentages of the ideal ones.

    Attributes:
        percent: Percentage of the ideal bytes.
        launches: Number of kernels.
        products: Percentage of the ideal products.
        kinds: Kinds of its kernels.
    """

    percent: int = 100
    launches: int = 1
    products: int = 100
    kinds: tuple[KindShare, ...] = ()


class PlainPass(NamedTuple):
    """A pass by plain torch.

    Attributes:
        percent: Percentage of the ideal bytes.
        element_bytes: Bytes moved for each element of an intermediate that the ideal pass does not have.
        launches: Number of kernels, in each iteration of its loop.
    """

    percent: int
    element_bytes: int = 0
    launches: int = 1


class PlainPasses(NamedTuple):
    """An operation by plain torch.

    Attributes:
        forward: Forward.
        backward: Backward, with the gradients of weights.
        is_fp32: True if its products run in fp32; else they run in the dtype of the weights.
    """

    forward: PlainPass
    backward: PlainPass
    is_fp32: bool = False

    def passes(self, work: Work, tokens: int, elements: int = 0, turns: int = 1) -> Passes:
        """Both passes.

        Args:
            work: Ideal work, per token.
            tokens: Tokens of the call.
            elements: Elements of the intermediate, per token.
            turns: Turns of the loop.
        """
        directions = (
            (self.forward, work.moved_forward, work.forward),
            (self.backward, work.moved_input + work.moved_weight, work.input_grad + work.weight_grad),
        )
        forward, backward = (
            Pass(
                (each.percent * moved // 100 + each.element_bytes * elements) * tokens,
                flops * tokens,
                each.launches * turns,
                is_fp32=self.is_fp32,
            )
            for each, moved, flops in directions
        )
        return forward, backward


def ideal(work: Work, tokens: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Ideal bytes and FLOPs of the forward, and of the backward with the gradients of weights."""
    return (
        (work.moved_forward * tokens, work.forward * tokens),
        ((work.moved_input + work.moved_weight) * tokens, (work.input_grad + work.weight_grad) * tokens),
    )


class FixedRatios(NamedTuple):
    """Facts of an operation whose implementations move multiples of its ideal bytes, whatever its sizes.

    Attributes:
        forward: Forward by Triton kernels; None for one kernel that is ideal in both directions.
        backward: Backward by Triton kernels.
        torch: The operation by plain torch; None for one kernel that is ideal.
    """

    forward: KernelPass | None = None
    backward: KernelPass | None = None
    torch: PlainPasses | None = None

    def kernels(self, work: Work, tokens: int) -> Passes | None:
        """See `Facts`."""
        if self.forward is None or self.backward is None:
            return ideal_passes(work, tokens)
        forward, backward = (
            Pass(each.percent * moved // 100, each.products * flops // 100, each.launches, each.kinds)
            for each, (moved, flops) in zip((self.forward, self.backward), ideal(work, tokens), strict=True)
        )
        return forward, backward

    def plain(self, work: Work, tokens: int) -> Passes | None:
        """See `Facts`."""
        return None if self.torch is None else self.torch.passes(work, tokens)


def ideal_passes(work: Work, tokens: int) -> Passes:
    """Both passes, each as one ideal kernel."""
    (moved, flops), (moved_back, flops_back) = ideal(work, tokens)
    return Pass(moved, flops, 1), Pass(moved_back, flops_back, 1)


def chunked_work(seq_length: int, chunk: int, forward: int, scores: int, inputs: int, outputs: int, state: int, itemsize: int) -> Work:
    """Ideal work of a scan in chunks, per token: backward has twice the forward's products, and the scores once more.

    Bytes of the states at chunk starts: written and read forward; read backward, their gradients written and read.

    Args:
        seq_length: Tokens of a sequence.
        chunk: Positions between two states.
        forward: FLOPs of the forward.
        scores: FLOPs of the scores, which are not kept.
        inputs: Elements of all inputs.
        outputs: Elements of the output.
        state: Elements of a state of all heads.
        itemsize: Bytes of an element.
    """
    states = ceil_div(seq_length, chunk) * state * itemsize
    moved, both = ceil_div(2 * states, seq_length), ceil_div(5 * states, seq_length)
    return Work(
        forward,
        2 * forward + scores,
        0,
        scores,
        moved_forward=(inputs + outputs) * itemsize + moved,
        moved_input=(2 * inputs + outputs) * itemsize + both - moved,
    )
