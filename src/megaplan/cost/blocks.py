"""The work of every part of a model, as one rank runs it: costs and times take the structure of a block only from this module."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from megakernels.facts import Work
from megakernels.libraries import FLASH4
from megakernels.ops.activation.facts import activation
from megakernels.ops.cross_entropy.facts import RECOMPUTED_LOGITS, Loss, cross_entropy
from megakernels.ops.library import gather, linear
from megakernels.ops.rms_norm.facts import FINAL_NORM
from megaplan.blocks.costs import LATE, gathered_work, linear_work, norm_work, residual_work
from megaplan.blocks.work import OpWork, Workload, Works
from megaplan.dtypes import DType
from megaplan.families.attention_residuals import depth_works
from megaplan.families.layer_embeddings import side_works
from megaplan.families.registry import FAMILIES
from megaplan.families.residual import norm_works, path_in, work_of
from megaplan.families.streams import stream_works
from megaplan.inventory.adapters import A_SUFFIX, B_SUFFIX, packable
from megaplan.inventory.tensors import Block, Group, Owner, ParamTensor
from megaplan.spec.models import Features, Model, Spec
from megaplan.spec.pattern import DepthBlock, depth_blocks


def adapted_works(load: Workload, ops: Works, block: Block) -> Works:
    """Work of a layer with its adapters and frozen tensors; that of the family if all tensors are trained."""
    if not any(tensor.group is Group.FROZEN for tensor in block.tensors):
        return ops
    tensors = {tensor.name: tensor for tensor in block.tensors}
    adapted = frozenset(name.removesuffix(f".{A_SUFFIX}") for name in tensors if name.endswith(f".{A_SUFFIX}"))
    found = [_unpacked(load, block, tensors, frozen_work(op, runs_again=op.name in adapted)) for op in ops]
    late = {op.name for op in ops if op.is_linear and op.counts == LATE}
    for name in sorted(adapted):
        own = _adapter(load, name, block.family, tensors[f"{name}.weight"], tensors[f"{name}.{A_SUFFIX}"])
        found.append(own._replace(work=gathered_work(own.work, load.cp), counts=LATE) if name in late else own)
    return tuple(found)


def _unpacked(load: Workload, block: Block, tensors: Mapping[str, ParamTensor], op: OpWork) -> OpWork:
    """Dequantisation of a linear's packed rows on this rank's widths, or of some of its rows."""
    weight = tensors.get(f"{op.name}.weight")
    if load.packing is None or weight is None or not packable(block, weight):
        return op
    columns = weight.local_shape(load.tp, load.ep, load.etp)[-1]
    return op._replace(unpacked=(op.weights // columns, columns))


def adapter_name(linear: str) -> str:
    """The name of the operation that a linear's adapter is."""
    return f"{linear}.{A_SUFFIX}, {B_SUFFIX}"


def frozen_work(op: OpWork, *, runs_again: bool = False) -> OpWork:
    """Work without parameter gradients.

    `runs_again` is true if an adapter saves a tensor after the operation, so that the operation is recomputed, too.
    """
    return op._replace(work=replace(op.work, weight_grad=0, moved_weight=0), closes=op.closes and not runs_again)


def unreached_work(op: OpWork) -> OpWork:
    """Work of an operation without a backward."""
    return op._replace(work=replace(op.work, input_grad=0, weight_grad=0, moved_input=0, moved_weight=0))


def trained_elements(block: Block) -> int:
    """Elements that have gradients."""
    return sum(size for tensor, size in zip(block.tensors, block.sizes, strict=True) if tensor.group is not Group.FROZEN)


def _adapter(load: Workload, name: str, part: str, weight: ParamTensor, a: ParamTensor) -> OpWork:
    """X Aᵀ and its product with Bᵀ, added to the linear's output, on this rank's widths."""
    rows, columns = weight.shape
    rank, cut = a.shape[0], weight.tp_dim if weight.owner is Owner.TENSOR_PARALLEL else None
    rows, columns = (rows // load.tp if cut == 0 else rows), (columns // load.tp if cut == 1 else columns)
    work = linear(columns, rank, load.itemsize) + linear(rank, rows, load.itemsize)
    own_tokens = weight.owner is Owner.REPLICATED
    return OpWork(adapter_name(name), part, work, weights=rank * (rows + columns), own_tokens=own_tokens)


PART, HEAD, LOGITS_AGAIN = "head", "head", "logits again"
"""Names: the part outside the layers; the head's product; and the head's product that the fused head and loss repeat in backward."""


def embedding(load: Workload, hidden_size: int, grad_bytes: int, *, vocab_parallel: bool = False) -> Works:
    """The token embedding: a lookup; with `vocab_parallel` every rank looks up all tokens, and reduces.

    Source: counting operands.
    """
    return (OpWork("embedding", PART, gather(hidden_size, load.itemsize, grad_bytes), own_tokens=not vocab_parallel),)


def side_embeddings(load: Workload, features: Features, hidden_size: int, grad_bytes: int) -> Works:
    """Rows of the n-gram, structure, platform and layer embedding tables, and their projections, for the rank's own tokens.

    Source: counting: one linear of the concatenated rows each.
    """
    widths = {}
    if features.ngram is not None:
        widths["ngram"] = features.ngram.num_tables * features.ngram.dim
    for name, category in (("structure", features.structure), ("platform", features.platform)):
        if category is not None:
            widths[name] = category.bottleneck
    ops: Works = ()
    for name, width in widths.items():
        ops += (OpWork(f"{name} rows", PART, gather(width, load.itemsize, grad_bytes), own_tokens=True),)
        ops += (linear_work(load, f"{name}.proj", PART, width, hidden_size, own_tokens=True),)
    if features.layer_embeddings is not None:
        ops += side_works(load, features.layer_embeddings, hidden_size, grad_bytes)
    return ops


def head(load: Workload, hidden_size: int, vocab_size: int, *, vocab_parallel: bool = False) -> Works:
    """Final norm, logits and cross-entropy: 2·h·V FLOPs forward, 6·h·V in all.

    They are sharded over the vocabulary with `vocab_parallel`, else over tokens.

    If head and loss are one operation, its backward computes the logits again: 2·h·V more, which utilisation does not count.

    Source: counting multiply-adds.
    """
    vocab, own_tokens = vocab_size // load.tp if vocab_parallel else vocab_size, not vocab_parallel
    logits = linear_work(load, HEAD, PART, hidden_size, vocab, own_tokens=own_tokens)
    again = Work(input_grad=logits.work.forward, recomputed=logits.work.forward, moved_input=logits.work.moved_forward)
    loss = Loss(vocab_size, hidden_size, load.num_tokens // load.tp, load.joins_loss)
    return (
        residual_work(load, PART, hidden_size)._replace(name="final_norm", facts=FINAL_NORM),
        logits,
        OpWork("cross_entropy", PART, cross_entropy(vocab, load.itemsize), loss, own_tokens=own_tokens),
        *((OpWork(LOGITS_AGAIN, PART, again, RECOMPUTED_LOGITS, own_tokens=own_tokens),) if load.joins_loss else ()),
    )


def mtp_depth(
    load: Workload,
    blocks: Iterable[DepthBlock],
    *,
    hidden_size: int,
    vocab_size: int,
    grad_bytes: int,
    vocab_parallel: bool = False,
    sides: Works = (),
) -> Works:
    """One MTP depth: embedding lookup, two norms, projection of [hidden; embedding], its blocks, and one more head.

    `sides` are side embeddings that it adds to the token embedding.

    Source: DeepSeek-V3, arXiv:2412.19437, equations 21 to 23.
    """
    return (
        *embedding(load, hidden_size, grad_bytes, vocab_parallel=vocab_parallel),
        *sides,
        norm_work(load, "hidden_norm, embedding_norm", PART, hidden_size, times=2, own_tokens=True),
        linear_work(load, "proj", PART, 2 * hidden_size, hidden_size, own_tokens=True),
        *(op for block in blocks for op in block.family.work(load, block.section, hidden_size, block.variant)),
        *head(load, hidden_size, vocab_size, vocab_parallel=vocab_parallel),
    )


class EndWorks(NamedTuple):
    """Work of the operations outside the stack.

    Attributes:
        embedding: The token embedding.
        side_embeddings: N-gram, structure and platform; empty without them.
        head: Final norm, logits and loss.
        mtp: One MTP depth, its own head included; empty without MTP.
        mtp_depth: Number of prediction depths.
    """

    embedding: Works
    side_embeddings: Works
    head: Works
    mtp: Works
    mtp_depth: int


def whole_workload(spec: Spec, dtype: DType) -> Workload:
    """A data rank's microbatch on an unsharded model."""
    batch, kernels = spec.batch, spec.host.uses_triton
    return Workload(
        batch.seq_length,
        batch.micro_batch_size * batch.seq_length,
        dtype.of_products.bytes,
        gathers=kernels,
        joins_loss=spec.model.joins_loss(kernels=kernels),
        packed=spec.data.packing == "documents",
        relations=spec.model.features.relation_bias is not None,
        flash4=spec.host.uses(FLASH4),
        packing=spec.packing,
    )


def rank_workload(spec: Spec, dtype: DType) -> Workload:
    """One rank's part of it: the tokens inside a tensor-parallel region, and the degrees that divide widths."""
    mesh, whole = spec.mesh, whole_workload(spec, dtype)
    return whole._replace(
        num_tokens=whole.num_tokens // mesh.cp,
        tp=mesh.tp,
        ep=mesh.ep,
        etp=mesh.etp,
        cp=mesh.cp,
        joins_loss=spec.host.uses_triton,
        gathers_latents=mesh.gathers_latents,
        gathers_tokens=spec.host.gathers_tokens,
    )


def layer_works(load: Workload, model: Model, block: Block) -> Works:
    """Work of the operations of one layer of the stack.

    Raises:
        ValueError: The block's family has no section in the model.
    """
    family = FAMILIES[block.family]
    ops = family.work(load, family.section_of(model), model.hidden_size, block.variant)
    return adapted_works(load, work_of(path_in(model.residual_path, block), load, ops, model.hidden_size), block)


def end_works(load: Workload, spec: Spec) -> EndWorks:
    """Work of the operations at both ends of the model."""
    model, features = spec.model, spec.model.features
    hidden, grad_bytes, vocab_parallel = model.hidden_size, spec.precision.grads.bytes, spec.mesh.vocab_parallel
    sides = side_embeddings(load, features, hidden, grad_bytes)
    mtp: Works = ()
    if features.mtp is not None:
        mtp = mtp_depth(
            load,
            depth_blocks(model),
            hidden_size=hidden,
            vocab_size=model.vocab_size,
            grad_bytes=grad_bytes,
            vocab_parallel=vocab_parallel,
            sides=sides if features.mtp.side_embeddings else (),
        )
    first = embedding(load, hidden, grad_bytes, vocab_parallel=vocab_parallel)
    first += norm_works(model.norm, load, hidden, "embedding norm") if model.embedding_norm else ()
    last = head(load, hidden, model.vocab_size, vocab_parallel=vocab_parallel)
    if model.head_layer is not None:
        active = OpWork("head layer activation", "head", activation(hidden, load.itemsize, gated=False), own_tokens=True)
        product = linear_work(load, "head layer", "head", hidden, hidden, own_tokens=True)
        last = (product, active, *norm_works(model.norm, load, hidden, "head layer norm"), *last)
    if model.streams is not None:
        last = (*stream_works(model.streams, hidden, load.itemsize, last=True), *last)
    if model.attention_residuals is not None:
        last = (*depth_works(model.attention_residuals.reads(model.num_layers), hidden, load.itemsize), *last)
    if spec.lora is not None:
        first, sides, last = tuple(map(unreached_work, first)), tuple(map(unreached_work, sides)), tuple(map(frozen_work, last))
    return EndWorks(
        embedding=first,
        side_embeddings=sides,
        head=last,
        mtp=mtp,
        mtp_depth=features.mtp.depth if features.mtp is not None and mtp else 0,
    )
