"""The GPU kernels of an operation's pass: bytes, products and launches of each kind, by the names that a device's measured constants have.

A kind is one kernel, or several that reach alike: `norm.forward`, `add`, `experts.outer`. The kinds of a pass add up to what
`megaplan.cost.kernels` counts of it. What a kind reaches of the counted floor, the larger of its products at the peak rate and its bytes
at the memory's, is measured (`megaplan.measured`); an operation without kinds has the modelled rates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megaplan.blocks.costs import FP32_BYTES
from megaplan.blocks.ops import BANK
from megaplan.blocks.work import Op, Workload
from megaplan.cost.kernels import WIDEST_KEYS, Pass, index_passes, joined_bytes
from megaplan.families.attention.scratch import head_widths
from megaplan.scalars import GATED
from megaplan.spec.models import LatentAttention, Model

PRODUCT, SCALED_PRODUCT, ROUND, MEMORY, ADD, SUM, JOIN = "product", "fp8.product", "fp8.round", "memory", "add", "add.fp32", "join"
CHUNK_COLUMNS = 8192
"""Columns of the vocabulary whose logits the loss has at once; each chunk adds to the gradient of the hidden states in fp32."""


class Part(NamedTuple):
    """Work of one kind of kernel in a pass.

    Attributes:
        kind: Its name.
        num_bytes: Read and written.
        flops: Of products.
        launches: Of it.
        steps: Dependent steps of a recurrence.
    """

    kind: str
    num_bytes: int
    flops: int
    launches: int
    steps: int = 0


Parts = tuple[Part, ...]


class Share(NamedTuple):
    """A kind's percentages of the bytes and products of a pass."""

    kind: str
    num_bytes: int = 100
    flops: int = 100
    launches: int = 1


Split = tuple[Share, ...]
NORM, NORM_BACK = "norm.forward", "norm.backward"
SPLITS: dict[str, tuple[Split, Split]] = {
    "norm": ((Share(NORM, 40), Share(ADD, 60)), (Share(NORM_BACK, 54, launches=3), Share(ADD, 46))),
    **dict.fromkeys(
        ("final_norm", "q_latent_norm", "kv_latent_norm", "qk_norm", "k_norm", "hidden_norm, embedding_norm", "B_norm, C_norm"),
        ((Share(NORM),), (Share(NORM_BACK, launches=3),)),
    ),
    "gated_norm": ((Share(NORM),), (Share("gated_norm.backward", launches=3),)),
    **dict.fromkeys(("conv1d", "conv_qk", "conv_v"), ((Share("convolution.forward"),), (Share("convolution.backward", launches=4),))),
    "scan": ((Share("mamba3"),), (Share("mamba3"),)),
    "m2rnn": ((Share("m2rnn.forward"),), (Share("m2rnn.backward", launches=16),)),
    "rope": ((Share("rope", launches=2),), (Share("rope", launches=2),)),
    "mla_kv": ((Share("mla_kv"),), (Share("mla_kv", launches=2),)),
    "activation": ((Share("activation"),), (Share("activation"),)),
    "route": ((Share(MEMORY, launches=2),), (Share(MEMORY, launches=5),)),
    "logits again": ((Share(MEMORY),), (Share(PRODUCT),)),
}
"""By the last part of an operation's name."""


def parts_of(model: Model, load: Workload, op: Op, done: Pass, *, backward: bool) -> Parts | None:
    """The kinds of kernels of a pass of an operation that is no linear; None for one whose kernels have no measured constants.

    Args:
        model: Of the spec.
        load: What a rank has to do.
        op: The operation.
        done: Its pass, as `megaplan.cost.kernels` counts it.
        backward: Whether it is the backward, else the forward.
    """
    name = op.name.rpartition(".")[2]
    special = _SPECIAL.get(name)
    if special is not None:
        return special(model, load, op, done, backward)
    split = SPLITS.get(name)
    if split is not None:
        return _divided(done, split[backward])
    if done.flops:
        return None
    return (Part(MEMORY, done.num_bytes, 0, done.launches),)


def _divided(done: Pass, shares: Split) -> Parts:
    """A pass by percentages; the first kind has the launches that are left."""
    rest = sum(share.launches for share in shares[1:])
    return tuple(
        Part(
            share.kind,
            done.num_bytes * share.num_bytes // 100,
            done.flops * share.flops // 100,
            share.launches if index else done.launches - rest,
        )
        for index, share in enumerate(shares)
    )


def _ssd(_model: Model, load: Workload, _op: Op, done: Pass, backward: bool) -> Parts:
    """Backward also joins the parts of the projection's gradient."""
    if not backward:
        return (Part("ssd", done.num_bytes, done.flops, done.launches),)
    joined = joined_bytes(_model, load)
    return Part("ssd", done.num_bytes - joined, done.flops, done.launches - 2), Part(JOIN, joined, 0, 2)


def _attention(model: Model, _load: Workload, _op: Op, done: Pass, backward: bool) -> Parts:
    assert model.attention is not None
    return _core(model, done, backward=backward)


def _core(model: Model, done: Pass, *, backward: bool) -> Parts:
    """Backward is a kernel for queries, which makes three products of a pair, and one for keys and values, which makes four."""
    assert model.attention is not None
    width, value_width = head_widths(model.attention)
    prefix = "latent_attention" if isinstance(model.attention, LatentAttention) else "attention"
    if max(width, value_width) > WIDEST_KEYS:
        prefix = "wide_attention"
    if not backward:
        return (Part(f"{prefix}.forward", done.num_bytes, done.flops, done.launches),)
    query = done.flops * (2 * width + value_width) // (4 * width + 3 * value_width)
    half = done.num_bytes // 2
    return Part(f"{prefix}.query", half, query, 1), Part(f"{prefix}.key", done.num_bytes - half, done.flops - query, done.launches - 1)


def _indexer(model: Model, load: Workload, op: Op, done: Pass, backward: bool) -> Parts:
    """The index's own kernels, and what attention to all keys takes beside the chosen."""
    own = index_passes(model, load, op)[backward]
    rest = Pass(0, done.flops - own.flops, 1 + backward)
    return Part("index", done.num_bytes, own.flops, done.launches), *_core(model, rest, backward=backward)


def _experts(model: Model, _load: Workload, _op: Op, done: Pass, backward: bool) -> Parts:
    """Forward up and down; backward the gradients through both, and of their weights: two products for each forward one."""
    assert model.moe is not None
    gated = model.moe.activation in GATED
    first, prefix = (2, "gated_experts") if gated else (1, "experts")
    count = (first + 1) * (1 + backward)

    def part(kind: str, products: int, launches: int) -> Part:
        return Part(f"{prefix}.{kind}", done.num_bytes * products // count, done.flops * products // count, launches)

    if not backward:
        return part("up", first, done.launches - 1), part("down", 1, 1)
    return part("pull", first, done.launches - first - 2), part("down", 1, 1), part("outer", first + 1, first + 1)


def _combine(model: Model, load: Workload, op: Op, done: Pass, backward: bool) -> Parts:
    """The shared expert's output is added forward; the gradients of router, routed rows and shared expert are summed backward."""
    assert model.moe is not None
    sums = op.name.endswith("combine") != backward
    own = Part("experts.sum" if sums else MEMORY, done.num_bytes, 0, done.launches)
    joined = sums * (1 + backward)
    if not model.moe.shared_ffn_hidden_size:
        joined -= 1
    size = 3 * (load.num_tokens // load.tp) * model.hidden_size * load.itemsize
    return (own, Part(ADD, joined * size, 0, joined)) if joined > 0 else (own,)


def _loss(model: Model, load: Workload, _op: Op, done: Pass, backward: bool) -> Parts:
    """Rows of the logits; backward, where head and loss are one operation, also the sum of the gradient over chunks of the vocabulary."""
    if not backward:
        return (Part("loss.forward", done.num_bytes, 0, done.launches),)
    rows = Part("loss.backward", done.num_bytes, 0, done.launches)
    if not load.joins_loss:
        return (rows,)
    chunks = -(-model.vocab_size // CHUNK_COLUMNS)
    return rows, Part(SUM, chunks * 3 * FP32_BYTES * (load.num_tokens // load.tp) * model.hidden_size, 0, chunks)


Special = Callable[[Model, Workload, Op, Pass, bool], Parts]
_SPECIAL: dict[str, Special] = {
    **{"ssd": _ssd, "attention": _attention, "masked": _attention, "indexer": _indexer, BANK: _experts},
    **{"combine": _combine, "dispatch": _combine, "cross_entropy": _loss},
}
"""By the same, of operations whose kinds depend on the model."""
