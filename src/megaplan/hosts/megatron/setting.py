"""`Setting`, which decides the bytes of an operator, and the storages and operations that all operators have."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from megaplan.blocks.ops import INPUT, OUTPUT, Dims, Op, reshape
from megaplan.blocks.storages import Shapes, storages
from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.families.attention.composition import head_widths
from megaplan.hosts.megarun.program import Replay, replay
from megaplan.hosts.megatron.state import is_single
from megaplan.low_precision import Recipe
from megaplan.spec.host import device_of
from megaplan.spec.models import LatentAttention, Spec

Names = frozenset[str]
GATHERED, PARTIAL, SHARE = "gathered", "partial", "share"
"""Names of storages: a gathered gradient; a row-parallel linear's product; and under sequence parallelism this rank's share of the sum."""
INPUT_GRADIENT = (GATHERED, PARTIAL, SHARE)
"""Storages of a column-parallel linear's backward: its input gathered again, and that input's gradient before and after its reduction."""
COMMON = ("norm.input", "norm.output", "norm.stats", "dropout.mask")
"""Saved tensors that operators of all kinds may have."""


class Setting(NamedTuple):
    """The sizes that decide the bytes of an operator.

    Attributes:
        spec: The spec.
        dims: A rank's local sizes.
        recipe: Recipe of the operator's linears; None for 16 bits.
        skew: A skew of experts that is a layer's own.
        shares: True for attention to the keys that an earlier layer's indexer chose, and for an MLP that reads the previous layer's norm.
    """

    spec: Spec
    dims: Dims
    recipe: Recipe | None
    skew: float | None = None
    shares: bool = False

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of weights and activations that are in no low precision."""
        return self.dims.dtype.bytes

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on a context rank: T."""
        return self.dims.batch * self.dims.tokens

    @property
    def stream_tokens(self) -> int:
        """Tokens of the residual stream on one rank, after sequence parallelism: S."""
        return self.dims.batch * self.dims.residual_tokens

    @property
    def copies_inputs(self) -> bool:
        """True if a linear saves a copy of an input that another operation keeps in 16 bits: only under delayed scaling."""
        return self.recipe is not None and self.recipe.name == "fp8_delayed"

    def narrow(self, shapes: Mapping[str, tuple[int, ...]], column: Column = Column.ACTIVATIONS) -> Shapes:
        """Storages in the dtype of parameters."""
        return storages(self.dims.dtype, column, shapes)

    def wide(self, shapes: Mapping[str, tuple[int, ...]], column: Column = Column.ACTIVATIONS) -> Shapes:
        """Storages in fp32."""
        return storages(self.dims.stat_dtype, column, shapes)

    def input_bytes(self, rows: int, columns: int) -> int:
        """Bytes that a linear saves of an input that no other operation keeps.

        In low precision they are those of the copy for its weight gradient.
        """
        return self.element_bytes * rows * columns if self.recipe is None else self.recipe.columnwise_bytes(rows, columns)

    def gradient_copies_bytes(self, rows: int, columns: int) -> int:
        """Bytes of the low-precision copies of an output's gradient, which both products of a linear's backward multiply."""
        return 0 if self.recipe is None else self.recipe.both_bytes(rows, columns)

    def common(self, letter: str) -> Shapes:
        """Tensors that every operator keeps: the input of its norm, the norm's results, and the mask of its dropout."""
        dims, latent, hidden = self.dims, letter == "*" and is_latent(self.spec), self.dims.hidden
        if letter == "E" or (latent and "layernorm" in recomputed_modules(self.spec)):
            output = self.element_bytes * self.stream_tokens * hidden  # the router saves it unchanged; projections do if it is recomputed
        else:  # two projections of latent attention each save a copy in low precision
            output = (2 if latent and self.recipe is not None else 1) * self.input_bytes(self.stream_tokens, hidden)
        own = 0 if letter == "-" and self.shares else 1  # an MLP parallel to attention reads the output of attention's norm
        return {
            **self.narrow({"norm.input": (own, *dims.residual)}),
            **of_bytes({"norm.output": own * output}),
            **self.wide({"norm.stats": (own, self.stream_tokens, num_statistics(self.spec))}),
            **(of_bytes({"dropout.mask": self.stream_tokens * hidden}) if self.spec.host.hidden_dropout else {}),
        }

    def around(self) -> Shapes:
        """Storages that row- and column-parallel linears need temporarily, and the gradients of the stream: one more before a dropout."""
        dims, sharded = self.dims, self.spec.host.sequence_parallel and self.dims.tp > 1
        copies = 2 if self.spec.host.hidden_dropout else 1
        none: tuple[int, ...] = (0,)
        return self.narrow({
            GATHERED: dims.gathered if sharded else none,
            PARTIAL: dims.gathered,
            SHARE: dims.residual if sharded else none,
            OUTPUT: (copies, *dims.residual),
        })  # fmt: skip


def of_bytes(sizes: Mapping[str, int], column: Column = Column.ACTIVATIONS) -> Shapes:
    """Storages whose bytes are known: masks, maps, and low-precision copies with their scales."""
    return storages(DType.FP8, column, {name: (size,) for name, size in sizes.items()})


def is_latent(spec: Spec) -> bool:
    """True if attention is multi-head latent attention."""
    return isinstance(spec.model.attention, LatentAttention)


def attention_kernel(spec: Spec) -> Literal["flash", "fused", "unfused"]:
    """The kernel of attention; `auto` is FlashAttention 2 before Hopper, from Hopper on cuDNN if it supports the case, unfused in fp32.

    Source: `get_attention_backend` of `dot_product_attention/utils.py` and `nvte_get_fused_attn_backend`: in training cuDNN has heads of up
    to 128, of 192 with values of 128, and on Hopper of up to 256; on Blackwell it drops no probabilities in deterministic mode.
    """
    host, attention = spec.host, spec.model.attention
    if host.attention_backend != "auto":
        return host.attention_backend
    if host.transformer_impl == "local" or is_single(spec):
        return "unfused"
    generation = device_of(spec.device).generation
    if generation == "hopper":
        limit, drops = 256, True
    elif generation == "blackwell":
        limit, drops = 128, not host.deterministic_mode
    else:
        return "flash"
    width, values = head_widths(attention) if attention is not None else (0, 0)
    fits = max(width, values) <= limit or (width, values) == (192, 128)
    return "fused" if fits and (drops or not host.attention_dropout) else "flash"


def num_statistics(spec: Spec) -> int:
    """Statistics of a norm that a row keeps, in fp32."""
    return 1 if spec.model.norm == "rmsnorm" else 2


def recomputed_modules(spec: Spec) -> frozenset[str]:
    """Modules of selective recompute."""
    modules = frozenset[str](spec.host.recompute_modules)
    return modules | {"core_attn"} if spec.recompute.of("A") == "selective" else modules


def operator_replay(names: Names, away: Names, ops: tuple[Op, ...], *, held: Names = frozenset(), again: tuple[Op, ...] = ()) -> Replay:
    """The replay of an operator: its norm, its own operations, and an addition to the residual stream in place.

    Args:
        names: Tensors that it keeps without recompute and offloading.
        away: Storages that recompute makes again, or that are in the host's memory, between forward and backward.
        ops: Operations of the operator. Temporary tensors that no operation saves are counted to the operator's end.
        held: Storages of `away` that stay on the device until the forward has ended.
        again: The operator's forward, which backward repeats first.
    """
    kept = {name for op in ops for name in op.keeps}
    made = tuple(name for name in COMMON[1:] if name in names)
    rest = tuple(sorted(name for name in names - kept if again or name != "norm.input" or name not in away))
    start = Op("input", (INPUT,), ("norm.input",), grads=()), Op("norm", ("norm.input",), made, keeps=rest, grads=())
    return replay((*start, *ops, *again, reshape("add", INPUT, OUTPUT)), held=held & away, away=away)
