"""The operations of a block with the tensors that each reads, makes and saves; a host replays them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from megaplan.dtypes import DType


class UpProjection(NamedTuple):
    """The product by which latent attention expands gathered latents.

    Attributes:
        scaling: Scaling of its operands (`megakernels.fp8_linears`); empty for products in 16 bits.
        fused: True if Triton kernels make the copies.
        gathered_packed: True if its weight is gathered packed.
        rank: Rank of its adapter; 0 without one.
        unpacks: True if rows of its frozen weight are made from packed ones (`lora.base`).
    """

    scaling: str = ""
    fused: bool = False
    gathered_packed: bool = False
    rank: int = 0
    unpacks: bool = False


PLAIN_UP = UpProjection()


class Dims(NamedTuple):
    """Local sizes, per microbatch.

    Attributes:
        batch: Sequences B.
        tokens: Positions of a sequence inside a tensor-parallel region: seq_length / cp.
        residual_tokens: Positions of the residual stream and its norms: with SP (tp > 1) seq_length / (cp · tp).
        hidden: Residual width h.
        tp: Tensor-parallel degree; widths of heads and MLPs are divided by it.
        cp: Context-parallel degree.
        dtype: Dtype of activations: `precision.params`, bf16 if that is fp8.
        stat_dtype: Dtype of statistics and states: fp32.
        packed: True if rows hold several documents, each position with the int32 place at which its own begins.
        is_last_cp_rank: True for the last rank of a CP group, at which the relay over the pieces reverses.
        ep: Ranks over which experts are spread.
        etp: Ranks over which each expert is sharded.
        kernels: True if Triton's kernels run the operations.
        gathers: True if experts read rows where they are, instead of sorted copies.
        frozen: True if the parameters of blocks have no gradients (`lora`).
        relations: Rows of the relation bias that attention adds to scores; 0 without one.
        flash4: True if FlashAttention-4 runs the attention that it takes.
        gathers_latents: True if a context group gathers the latents of latent attention.
        streams: Streams of the residual path, side by side where a block or a stage ends.
        gathers_tokens: True if ranks that share experts gather all their tokens, instead of the rows of each one's experts.
        up: The product that expands gathered latents.
    """

    batch: int
    tokens: int
    residual_tokens: int
    hidden: int
    tp: int
    cp: int
    dtype: DType
    stat_dtype: DType = DType.FP32
    packed: bool = False
    is_last_cp_rank: bool = True
    ep: int = 1
    etp: int = 1
    kernels: bool = False
    gathers: bool = False
    frozen: bool = False
    relations: int = 0
    flash4: bool = False
    gathers_latents: bool = False
    streams: int = 1
    gathers_tokens: bool = False
    up: UpProjection = PLAIN_UP

    @property
    def residual(self) -> tuple[int, int, int]:
        """Shape of the residual stream."""
        return (self.batch, self.residual_tokens, self.hidden)

    @property
    def boundary(self) -> tuple[int, int, int]:
        """Shape of the value that a block passes to the next: all streams."""
        return (self.batch, self.residual_tokens, self.hidden * self.streams)

    @property
    def gathered(self) -> tuple[int, int, int]:
        """Shape of a normed input gathered over TP."""
        return (self.batch, self.tokens, self.hidden)

    def wide(self, *widths: int) -> tuple[int, ...]:
        """[B, T, *widths] inside the tensor-parallel region."""
        return (self.batch, self.tokens, *widths)


INPUT, OUTPUT = "x", "out"
BANK = "experts"
"""The operation of a bank of experts, and the module of its parameters."""
SHARED = "shared_normed"
"""The normed stream that another block has made: the second input of a block that shares its norm."""
GIVEN = "given "


def given(name: str) -> str:
    """A value of an earlier block, by its name there, that a block reads but does not own."""
    return GIVEN + name


EARLIER = given("earlier values")
"""Values of earlier blocks that a block reads in addition to its input (attention residuals)."""
CHOICE = "choice"
"""The keys that a block's queries chose, which it passes on to later blocks."""
TAKE = "take values"
"""The first operation of a block: it takes over a value that the stage has held since an earlier block made it."""


class Flow(Enum):
    """Way in which gradients pass an operation.

    It computes new tensors; or cuts one storage into views and joins their gradients; or adds and passes the same gradient on; or passes
    the gradient on as a reshaped view.
    """

    COMPUTE = "compute"
    VIEW = "view"
    ADD = "add"
    RESHAPE = "reshape"


class Op(NamedTuple):
    """One operation of a block.

    Attributes:
        name: Name in `--explain` and in recompute regions.
        reads: Storages or views it reads.
        makes: Storages it makes (or views it cuts, for `Flow.VIEW`).
        keeps: Storages that it keeps for backward, besides parameters.
        params: Parameters whose gradients its backward computes, by their names in the block.
        grads: Storages that receive a gradient; None for all of `reads`.
        fetches: Storages its backward makes for itself: gathered inputs that were not kept, partial sums before a reduction.
        sums: Storages in which it sums its parameters' gradients; the gradients are made from them at its end, when `fetches` are freed.
        flow: Way in which gradients pass.
        holds: Storages that a Python frame still names while it runs, though nothing reads them any more.
        keeps_first: True if it saves before it runs, as torch's products do: `keeps` and its weight; only the weight if that is frozen.
        late: Parameters of linears, whose gradients a split backward leaves to W, each with the output whose gradient W needs.
        late_fetches: Further fetches that only those gradients need; in a split backward W makes them.
        late_inside: Scratch of the one product that makes all of those gradients; empty if each has its own product.
        hands_views: True if the gradients that it makes, its parameter's too, are views, to which autograd adds nothing in place.
        call: The first of the linears that the runtime multiplies in one call, if they are separate operations.
        before: Points of its backward before its parameters' gradients, each with its temporary storages, in place of `fetches`, and
            whether its input gradients exist.
        waits: True if another block's W needs what it keeps.
        for_params: True if only its parameters' gradients need `keeps` and `fetches`, as in a product with a scale.
    """

    name: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    keeps: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    grads: tuple[str, ...] | None = None
    fetches: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    flow: Flow = Flow.COMPUTE
    holds: tuple[str, ...] = ()
    keeps_first: bool = False
    late: tuple[tuple[str, str], ...] = ()
    late_fetches: tuple[str, ...] = ()
    late_inside: tuple[str, ...] = ()
    hands_views: bool = False
    call: str = ""
    before: tuple[tuple[tuple[str, ...], bool], ...] = ()
    waits: bool = False
    for_params: bool = False

    def renamed(self, names: Mapping[str, str]) -> "Op":
        """The operation with other names of storages; names that `names` lacks do not change."""

        def of(old: tuple[str, ...]) -> tuple[str, ...]:
            return tuple([names.get(name, name) for name in old])

        return self._replace(
            reads=of(self.reads),
            makes=of(self.makes),
            keeps=of(self.keeps),
            grads=None if self.grads is None else of(self.grads),
            fetches=of(self.fetches),
            sums=of(self.sums),
            holds=of(self.holds),
            late=tuple([(param, names.get(output, output)) for param, output in self.late]),
            late_fetches=of(self.late_fetches),
            late_inside=of(self.late_inside),
            before=tuple([(of(made), are_there) for made, are_there in self.before]),
        )

    @property
    def saves(self) -> bool:
        """True if its backward unpacks a saved tensor, even a frozen weight.

        A checkpoint that contains the operation is then recomputed.
        """
        return bool(self.keeps) or self.keeps_first

    @property
    def is_linear(self) -> bool:
        """True if each of its parameters' gradients is a product separate from its input's."""
        return bool(self.late) and not self.late_inside

    @property
    def late_keeps(self) -> tuple[str, ...]:
        """Storages that it keeps for the gradients of `late`: its input, or that input's copy and scales."""
        if not self.late:
            return ()
        return self.keeps if self.late_inside else self.keeps[:1]

    @property
    def is_view(self) -> bool:
        """True if its results are views, without storage."""
        return self.flow in (Flow.VIEW, Flow.RESHAPE)


def runs_bank(op: str) -> bool:
    """True if an operation is a bank's, in a layer or in a block of a prediction depth."""
    return op.rpartition(".")[2] == BANK


def in_bank(param: str) -> bool:
    """True if a parameter is a bank's: `experts.up_proj`, or `mlp.experts.up_proj` of a prediction depth."""
    return BANK in param.split(".")[:-1]


def linear(
    name: str,
    reads: str,
    makes: str,
    param: str,
    *,
    bias: str | None = None,
    holds: tuple[str, ...] = (),
) -> Op:
    """A matrix product with a parameter; it keeps its input, whose gradient autograd reshapes from a product of two dims."""
    params, late = (param,) if bias is None else (param, bias), ((param, makes),)
    return Op(name, (reads,), (makes,), keeps=(reads,), params=params, holds=holds, keeps_first=True, late=late, hands_views=True)


class Projection(NamedTuple):
    """One of several linears that read one input: name, output, weight, bias."""

    name: str
    makes: str
    param: str
    bias: str | None = None


def project(reads: str, gathered: str, *projections: Projection, sharded: bool, holds: tuple[str, ...] = ()) -> tuple[Op, ...]:
    """Column-parallel linears of one input, as `TensorParallel.project` runs them.

    Under TP they are one operation: it gathers the local tokens, multiplies and saves the local ones; backward gathers them again and
    reduce-scatters the partial gradient of the gathered tokens.

    Args:
        reads: The rank's own tokens.
        gathered: All tokens; its gradient is `partial_gradient(gathered)`.
        projections: In order.
        sharded: True if TP is more than one rank.
        holds: See `Op`.
    """
    if not sharded:
        call = projections[0].name
        ops = (linear(each.name, reads, each.makes, each.param, bias=each.bias, holds=holds) for each in projections)
        return tuple(op._replace(call=call) for op in ops)
    weights, biases = (each.param for each in projections), (each.bias for each in projections if each.bias is not None)
    return (
        Op(
            projections[0].name,
            (reads,),
            (gathered, *(each.makes for each in projections)),
            keeps=(reads,),
            params=(*weights, *biases),
            fetches=(partial_gradient(gathered),),
            late_fetches=(gathered,),
            holds=holds,
            late=tuple((each.param, each.makes) for each in projections),
        ),
    )


def partial_gradient(gathered: str) -> str:
    """The gradient of gathered tokens before its reduction, as a separate storage."""
    return f"{gathered}_partial"


AGAIN_SUFFIX = "_again"


def again(name: str) -> str:
    """The storage that a product at the end of a recomputed region makes once more, and drops, if its linear can be split."""
    return name + AGAIN_SUFFIX


def norm(name: str, reads: str, makes: str, rstd: str, param: str) -> Op:
    """`rms_norm`: keeps its input and rstd."""
    return Op(name, (reads,), (makes, rstd), keeps=(reads, rstd), params=(param,))


def plain_norm(name: str, reads: str, makes: str, prefix: str) -> Op:
    """RMSNorm without a scale: it makes, reads and saves a tensor of ones."""
    kept = f"{prefix}rstd", f"{prefix}ones"
    return Op(name, (reads,), (makes, *kept), keeps=(reads, *kept))


def cut(name: str, reads: str, makes: tuple[str, ...]) -> Op:
    """Views of one storage, side by side."""
    return Op(name, (reads,), makes, flow=Flow.VIEW)


def reshape(name: str, reads: str, makes: str) -> Op:
    """A view of a whole storage."""
    return Op(name, (reads,), (makes,), flow=Flow.RESHAPE)


def add(name: str, reads: tuple[str, ...], makes: str) -> Op:
    """A sum of storages of one shape."""
    return Op(name, reads, (makes,), flow=Flow.ADD)


def input_ops(*projections: Projection, sharded: bool) -> tuple[Op, ...]:
    """The norm before a mixer, and its projections."""
    return norm("norm", "x", "normed", "rstd", "norm.weight"), *project("normed", "gathered", *projections, sharded=sharded)


def output_ops(reads: str, *, sharded: bool, bias: str | None = None) -> tuple[Op, ...]:
    """The output projection and the residual addition."""
    return (
        linear("out_proj", reads, "partial" if sharded else "o", "out_proj.weight", bias=bias),
        *((Op("reduce_scatter", ("partial",), ("o",)),) if sharded else ()),
        add("residual", ("x", "o"), "out"),
    )


@dataclass(frozen=True, slots=True, eq=False)
class BlockProgram:
    """A block's operations, independent of sizes: all blocks of a kind share one value and its derived results.

    Attributes:
        ops: In execution order; the first reads `x`, the last makes `out`.
        held: Storages that a local of the block's forward names until it returns.
        reruns: Names of the operations that selective recompute runs again.
        caches: Storages that it keeps until then in any case, so that their operations do not run again.
        after: Names of operations after the region of selective recompute: the tensors that they save are kept, even if an operation of the
            region makes them.
    """

    ops: tuple[Op, ...]
    held: frozenset[str] = frozenset()
    reruns: frozenset[str] = frozenset()
    caches: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()
