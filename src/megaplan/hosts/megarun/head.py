"""Saved tensors of head and loss, and of the depths of multi-token prediction, which have them too.

Without `vocab_parallel` the head is replicated: under SP each TP rank computes the logits of its local tokens. With it, every rank computes
its slice of the vocabulary for all tokens.

With `host.kernels: triton` head and loss are one operation, whose logits never exist in full: it saves the rows that the head multiplies
and their log-sum-exp, and its scratch is a slice of logits, in backward plus a sum in fp32.

With `precision.recipe.head` its products are in the recipe's format; it saves its rows unquantised and quantises them again in backward.

A depth has norms of hidden and of the next token's embedding, concatenated and projected, its blocks, an output norm, the shared head and
its own loss. The next depth reads the hidden state before the output norm, with `normed_input` after it. With `side_embeddings` the
embedding has the model's side embeddings added, as on the first stage. A block is its family's program under the block's name, without
recompute; tensors referenced by its forward are freed when it returns, before the tensors of the depth's forward.

Source: DeepSeek-V3, arXiv:2412.19437, equations 21 to 25.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from megakernels.ops.linear_cross_entropy.facts import ScaledHead, slice_columns
from megaplan.blocks.ops import INPUT, OUTPUT, BlockProgram, Dims, Flow, Op, Projection, add, linear, norm, partial_gradient, project
from megaplan.blocks.storages import Shapes, Stored, residual, storages
from megaplan.columns import Basis, Column
from megaplan.dtypes import DType
from megaplan.hosts.megarun.embedding import side_ops, side_storages, stream_out
from megaplan.hosts.megarun.parts import BlockReplay
from megaplan.hosts.megarun.program import Replay, replay
from megaplan.hosts.megarun.scaled import head_products, head_scratch
from megaplan.inventory.features import side_block
from megaplan.low_precision import SCALINGS, RecipeName
from megaplan.spec.models import SIDES, Model, Spec
from megaplan.spec.pattern import depth_blocks

JOINED = {"own": 1, "chosen": 1, "sums": 2, "terms": 2}
"""fp32 numbers per row that join slices of a sharded vocabulary: a slice's log-sum-exp, its label's logit, sums over slices, the loss."""

JOINED_OP = "linear_cross_entropy"
IN_LOSS, BEFORE_LOSS = "inside_forward", "inside_backward"
"""Scratch of head and loss in a recipe's format."""


class LowHead(NamedTuple):
    """A head whose products are in a recipe's format.

    Attributes:
        name: The recipe.
        fused: True if Triton kernels make the copies.
    """

    name: RecipeName
    fused: bool


def low_head(spec: Spec) -> LowHead | None:
    """The recipe of a spec's head; None if it multiplies in 16 bits or more."""
    recipe = spec.precision.recipe
    return LowHead(recipe.name, spec.host.uses_triton) if recipe is not None and recipe.head else None


def head_part(
    dims: Dims,
    vocab_size: int,
    *,
    vocab_parallel: bool,
    pipelined: bool,
    joined: bool,
    bias: bool = False,
    capped: bool = False,
    low: LowHead | None = None,
) -> BlockReplay:
    """Head and loss: `x` is the normed residual stream, which the head saves; `out` is the summed loss.

    A pipeline stage holds its output until the microbatch's backward has ended: the logits or, for head and loss joined, the loss.
    """
    sharded = vocab_parallel and dims.tp > 1
    tensors = head_storages(dims, vocab_size, vocab_parallel=vocab_parallel, joined=joined, low=low)
    tensors |= storages(dims.dtype, Column.ACTIVATIONS, {"x": dims.residual})
    return BlockReplay(_head_replay(sharded, pipelined, joined, bias, capped, low is not None), tensors)


def head_ops(
    sharded: bool,
    joined: bool,
    reads: str = "x",
    param: str = "weight",
    made: str = OUTPUT,
    bias: str | None = None,
    *,
    capped: bool = False,
    low: bool = False,
) -> tuple[Op, ...]:
    """Logits, their cap and their cross entropy, or everything except a cap in one operation; `made` is the summed loss."""
    params = (param,) if bias is None else (param, bias)
    names = tuple(f"loss_{name}" for name in JOINED) if sharded else ()
    if not joined:
        made_logits = "uncapped" if capped else "logits"
        head = project(reads, "gathered", Projection("head", made_logits, param, bias), sharded=sharded)
        head = (head_products(head[0], "gathered" if sharded else None),) if low else head
        cap = (Op("cap", ("uncapped",), ("logits",), keeps=("logits",)),) if capped else ()
        return *head, *cap, Op("cross_entropy", ("logits",), (made, "loss_lse", *names), keeps=("logits", "loss_lse"), grads=("logits",))
    rows, kept = ("gathered" if sharded else reads), (reads, "loss_lse")
    in_forward, inside = (IN_LOSS, [BEFORE_LOSS]) if low else ("slice", ["slice", "sum", "product"])
    if not sharded:
        return (Op(JOINED_OP, (rows,), (made, "loss_lse", in_forward), keeps=kept, params=params, fetches=tuple(inside)),)
    own, total = names[:2], names[2:]
    return (
        Op("gather", (reads,), (rows,), keeps=kept),
        Op(JOINED_OP, (rows,), (*own, in_forward), keeps=kept, params=params, fetches=(rows, *inside)),
        Op("join", own, (made, "loss_lse", *total), grads=()),
    )


def head_storages(
    dims: Dims, vocab_size: int, *, vocab_parallel: bool, joined: bool, made: str = OUTPUT, low: LowHead | None = None
) -> Shapes:
    """Storages of `head_ops`."""
    sharded = vocab_parallel and dims.tp > 1
    positions = dims.tokens if sharded else dims.residual_tokens
    rows, vocab = dims.batch * positions, vocab_size // dims.tp if sharded else vocab_size
    return {
        **({} if low is None else _inside_low(dims, rows, vocab, low)),
        **(
            _inside(dims, rows, vocab)
            if joined
            else storages(dims.dtype, Column.ACTIVATIONS, dict.fromkeys(("logits", "uncapped"), (rows, vocab)))
        ),
        **storages(dims.stat_dtype, Column.ACTIVATIONS, {"loss_lse": (rows,), made: ()}),
        **storages(dims.stat_dtype, Column.ACTIVATIONS, {f"loss_{name}": (count, rows) for name, count in JOINED.items()}),
        **storages(dims.dtype, Column.COMMUNICATION, dict.fromkeys(("gathered", partial_gradient("gathered")), dims.gathered)),
    }


def _inside(dims: Dims, rows: int, vocab: int) -> Shapes:
    """Scratch of head and loss: a slice of logits; in backward the sum for the rows' gradient, and one slice's contribution.

    The contribution is a product of the same size as the sum, and it is made before the gradient in the rows' dtype exists: its excess over
    the gradient is scratch. If the sum has the gradient's dtype, the sum is the gradient, and products are added to it directly.
    """
    words, wide = slice_columns(rows, vocab), dims.stat_dtype
    product = wide.bytes - dims.dtype.bytes
    width = dims.hidden if product else 0
    return {
        **storages(dims.dtype, Column.WORKSPACE, {"slice": (rows, words)}),
        **storages(wide, Column.WORKSPACE, {"sum": (rows, width)}),
        **storages(dims.dtype, Column.WORKSPACE, {"product": (rows, width * product // dims.dtype.bytes)}),
    }


def _inside_low(dims: Dims, rows: int, vocab: int, low: LowHead) -> Shapes:
    """Scratch of a head in a recipe's format: of the head alone, and of head and loss in one operation."""
    of_product = head_scratch("head", (rows, dims.hidden, vocab, dims.dtype.bytes), low.name, fused=low.fused)
    sizes = ScaledHead(rows, dims.hidden, vocab, dims.dtype.bytes, SCALINGS[low.name], low.fused)
    inside = {IN_LOSS: sizes.forward_bytes, BEFORE_LOSS: sizes.backward_bytes}
    return of_product | {name: (size, Column.WORKSPACE, (size,), DType.FP8, Basis.EXACT) for name, size in inside.items()}


@cache
def _head_replay(sharded: bool, pipelined: bool, joined: bool, bias: bool, capped: bool, low: bool) -> Replay:
    return replay(
        head_ops(sharded, joined, bias="bias" if bias else None, capped=capped, low=low),
        starts=True,
        pinned="logits" if pipelined and not joined else None,
    )


SUM, PART = " sum", " part"
"""Parts of a gradient that several depths make: the waiting sum, and the part that one depth adds."""
SHARED = frozenset({"embedding", *SIDES, "head"})
"""Blocks whose gradients a depth passes on in addition to its own; their keys begin with the block's name."""
Programs = tuple[tuple[str, BlockProgram], ...]
"""A depth's blocks by name, in order."""


def mtp_part(
    dims: Dims, model: Model, depth: int, shared: DType, *, vocab_parallel: bool, joined: bool, low: LowHead | None = None
) -> BlockReplay:
    """An MTP depth; `out` is the input of the next depth.

    The head and the token embedding are the model's. Autograd sums their gradients before it passes them on: the sum over the head and
    later depths waits while a depth runs backward, and becomes the parameter's gradient at the first depth, whose backward is the last.

    Args:
        dims: Local sizes.
        model: The spec's.
        depth: Index of the depth, from 0.
        shared: Dtype of the gradients of the embedding and the head.
        vocab_parallel: True if both are sharded over the vocabulary.
        joined: True if head and loss are one operation.
        low: The head's products in a recipe's format; None if in 16 or more.
    """
    mtp = model.features.mtp
    if mtp is None:
        raise ValueError("MTP needs a section features.mtp; check_rules reports this")
    sharded = vocab_parallel and dims.tp > 1
    shapes = {"embedding": dims.residual, "joined": (*dims.residual[:2], 2 * dims.hidden)}
    shapes |= dict.fromkeys(("hidden_normed", "embedding_normed", "projected", "hidden", "normed"), dims.residual)
    statistics = dict.fromkeys(("hidden_rstd", "embedding_rstd", "output_rstd"), dims.residual[:2])
    looked_up = (dims.batch, dims.tokens if sharded else dims.residual_tokens)
    weight = (model.vocab_size // dims.tp if sharded else model.vocab_size, dims.hidden)
    tensors = {
        **storages(dims.dtype, Column.ACTIVATIONS, shapes),
        **storages(dims.stat_dtype, Column.ACTIVATIONS, statistics),
        **storages(DType.INT64, Column.ACTIVATIONS, {"ids": looked_up, "embedding_rows": looked_up}),
        **storages(dims.dtype, Column.COMMUNICATION, {"embedding_partial": dims.gathered}),
        **storages(
            shared, Column.GRADIENTS, dict.fromkeys(("head_sum", "head_part", "head_new", "embedding_sum", "embedding_part"), weight)
        ),
        **head_storages(dims, model.vocab_size, vocab_parallel=vocab_parallel, joined=joined, made="loss", low=low),
    }
    programs: list[tuple[str, BlockProgram]] = []
    own = dims._replace(relations=0)  # the bias belongs to the model's layers
    for name, family, section, variant, operations in depth_blocks(model):
        program, of_block = family.program(own, section, variant, operations, shared)
        tensors |= _prefixed(of_block, f"{name}.")
        programs.append((name, program))
    sides = model.features.sides_ahead
    for name in sides:
        tensors |= _prefixed(side_storages(dims, model.features, name) | stream_out(dims), f"{name}.")
        gradients = side_shapes(model, name)
        tensors |= storages(shared, Column.GRADIENTS, {f"{each}{end}": gradients[each] for each in gradients for end in (SUM, PART)})
    head = HeadForm(sharded, joined, low is not None)
    run = _mtp_replay(tuple(programs), head, model.tie_embeddings, depth == 0, depth + 1 == mtp.depth, sides, mtp.normed_input)
    return BlockReplay(run, residual(tensors | stream_out(dims)))


class HeadForm(NamedTuple):
    """The form of the head.

    Attributes:
        sharded: True if it is sharded over the vocabulary.
        joined: True if head and loss are one operation.
        low: True if it multiplies in a recipe's format.
    """

    sharded: bool
    joined: bool
    low: bool


def depth_shapes(model: Model, name: str, weight: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Gradients of shared parameters that a depth passes on, by name; only the first depth, whose backward is the last, does."""
    if name != "mtp.0":
        return {}
    shapes = dict.fromkeys(("embedding.weight",) if model.tie_embeddings else ("embedding.weight", "head.weight"), weight)
    for side in model.features.sides_ahead:
        shapes |= side_shapes(model, side)
    return shapes


def shared_names(gradients: Iterable[str]) -> tuple[str, ...]:
    """Names of a depth's gradients for parameters of other blocks."""
    return tuple([name for name in gradients if name.partition(".")[0] in SHARED])


def depth_sums(part: BlockReplay) -> int:
    """Bytes of the sums of shared parameters' gradients that wait before a depth's backward."""
    return sum([part.tensors[name][0] for name in part.replay.program.arriving.values() if name not in ("loss", OUTPUT)])


def side_shapes(model: Model, name: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a side embedding's parameters by full name; they are not sharded by rank."""
    return {f"{name}.{tensor.name}": tensor.shape for tensor in side_block(model.features, name, model.hidden_size).tensors}


@cache
def _mtp_replay(
    programs: Programs, head: HeadForm, tied: bool, first: bool, last: bool, sides: tuple[str, ...], reads_normed: bool
) -> Replay:
    (params, parts, ends), waiting = _embedding_gradients(first, last, tied)
    added, embedded, sums = _sides_of_depth(sides, first)
    hidden, normed = ("hidden", OUTPUT) if reads_normed else (OUTPUT, "normed")
    if not last:
        waiting, ends = (*waiting, *sums), (*ends, *sums) if first else ends
    ops = (
        Op("ids", (), ("ids",), grads=()),
        norm("hidden_norm", "x", "hidden_normed", "hidden_rstd", "hidden_norm.weight"),
        *_embedding_ops(head.sharded, params, parts, ends),
        *added,
        norm("embedding_norm", embedded, "embedding_normed", "embedding_rstd", "embedding_norm.weight"),
        add("join", ("hidden_normed", "embedding_normed"), "joined"),  # gradients are views of the full gradient
        linear("proj", "joined", "projected", "proj.weight"),
        *_blocks_ops(programs, hidden),
        norm("output_norm", hidden, normed, "output_rstd", "output_norm.weight"),
        *_head_ops(head, normed, ends=first and not tied, begins=last and not any(head)),
    )
    arrives = waiting if last else (*waiting, OUTPUT)
    return replay(ops, arrives="loss", starts=True, waiting=arrives)


def _blocks_ops(programs: Programs, hidden: str) -> tuple[Op, ...]:
    """The blocks' operations in order, from the projection's output to the depth's hidden state, `hidden`."""
    stream, ops = "projected", list[Op]()
    for name, program in programs:
        made = {each for op in program.ops for each in op.makes}
        returns = program.ops[-1]._replace(holds=(*program.ops[-1].holds, *[each for each in sorted(program.held) if each in made]))
        out = hidden if name == programs[-1][0] else f"{name}.{OUTPUT}"
        ops += [_renamed(op, f"{name}.", {INPUT: stream, OUTPUT: out}) for op in (*program.ops[:-1], returns)]
        stream = out
    return tuple(ops)


SharedGradient = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""Part of a shared parameter's gradient in a backward: parameters, storages in addition to a sum, sums that end here."""


def _embedding_gradients(first: bool, last: bool, tied: bool) -> tuple[SharedGradient, tuple[str, ...]]:
    """A depth's gradients of the embedding, and the unfinished sums of shared gradients when its backward begins.

    A tied head is one parameter with the embedding: the head's backward has begun the sum, the first depth's embedding ends it.
    """
    sums = ("head_sum",) if tied or last else ("head_sum", "embedding_sum")
    if not first:
        return ((), ("embedding_part",), ()), sums
    return (("embedding.weight",), (), ("head_sum",) if tied else sums[1:]), sums


def _sides_of_depth(names: tuple[str, ...], first: bool) -> tuple[tuple[Op, ...], str, tuple[str, ...]]:
    """Side embeddings added to a depth's token embedding: operations, results, and sums of their parameters' gradients.

    The first depth, whose backward is the last, passes the gradients on; other depths add parts to them.
    """
    made: list[Op] = []
    sums: list[str] = []
    stream = "embedding"
    for name in names:
        prefix = f"{name}."
        for op in side_ops(name):
            each = _renamed(op, prefix, {INPUT: stream, OUTPUT: f"{prefix}{OUTPUT}"})
            sums += [f"{param}{SUM}" for param in each.params]
            if not first:
                each = each._replace(params=(), fetches=(*each.fetches, *(f"{param}{PART}" for param in each.params)))
            made.append(each)
        stream = f"{prefix}{OUTPUT}"
    return tuple(made), stream, tuple(sums)


def _embedding_ops(vocab_parallel: bool, params: tuple[str, ...], parts: tuple[str, ...], ends: tuple[str, ...]) -> tuple[Op, ...]:
    # added before the operation, so its backward comes after: it passes on the sum, to which the operation's gradient was added last
    ended = (Op("embedding gradient", (INPUT,), ends, grads=(), flow=Flow.VIEW),) if ends else ()
    if not vocab_parallel:
        return *ended, Op("embedding", ("ids",), ("embedding",), keeps=("ids",), params=params, grads=(), fetches=parts)
    rows = ("embedding_rows", "embedding_partial")
    lookup = Op("embedding", ("ids",), rows, keeps=("ids",), params=params, grads=(), fetches=("embedding_rows", *parts))
    return *ended, lookup, Op("reduce_scatter", ("embedding_partial",), ("embedding",))


def _head_ops(head: HeadForm, normed: str, *, ends: bool, begins: bool) -> tuple[Op, ...]:
    """The head and its loss; in backward its part of the head's gradient is added to the waiting sum.

    Args:
        head: Form of the head.
        normed: Input of the head.
        ends: True if the sum becomes the parameter's gradient then.
        begins: True if the waiting sum is the head's own part, a transposed view of a product, which autograd adds to in a new storage.
    """
    ops = head_ops(head.sharded, head.joined, normed, "head.weight", made="loss", low=head.low)
    # the part is kept after it; with a sharded vocabulary also the output of the gather, in the same autograd function
    of_head = [index for index, op in enumerate(ops) if op.params or op.name == "gather"]
    ops = tuple(
        op._replace(params=(), fetches=(*op.fetches, "head_part"), late=()) if index in of_head else op for index, op in enumerate(ops)
    )
    if not (ends or begins):
        return ops
    params, new = (("head.weight",), ()) if ends else ((), ("head_new",))
    summed = Op("head gradient", (INPUT,), ("head_sum",) if ends else (), params=params, grads=(), fetches=new, flow=Flow.VIEW)
    return summed._replace(fetches=(*new, "head_part")) if begins else summed, *ops


def _renamed(op: Op, prefix: str, rename: dict[str, str]) -> Op:
    def names(old: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(rename.get(name, f"{prefix}{name}") for name in old)

    return op._replace(
        name=f"{prefix}{op.name}",
        reads=names(op.reads),
        makes=names(op.makes),
        keeps=names(op.keeps),
        params=tuple(f"{prefix}{name}" for name in op.params),
        grads=None if op.grads is None else names(op.grads),
        fetches=names(op.fetches),
        sums=names(op.sums),
        holds=names(op.holds),
        late=(),  # a depth's backward is not split under any schedule
        late_fetches=names(op.late_fetches),
        late_inside=names(op.late_inside),
        call="",
        before=tuple((names(made), are_there) for made, are_there in op.before),
    )


def _prefixed(tensors: Mapping[str, Stored], prefix: str) -> Shapes:
    return {f"{prefix}{name}": stored for name, stored in tensors.items() if name != INPUT}
