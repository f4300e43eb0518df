"""The work of every part of a model, as one rank runs it: the one place where costs and times learn what a block is."""

from __future__ import annotations

from typing import NamedTuple

from megaplan.blocks.work import Workload, Works
from megaplan.cost.adapters import adapted_works, frozen_work, unreached_work
from megaplan.cost.ends import embedding, head, mtp_depth, side_embeddings
from megaplan.dtypes import DType
from megaplan.families.registry import FAMILIES
from megaplan.families.residual import path_in, work_of
from megaplan.inventory.tensors import Block
from megaplan.spec.depths import depth_blocks
from megaplan.spec.models import Model, Spec


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
    )


def rank_workload(spec: Spec, dtype: DType) -> Workload:
    """One rank's part of it: the tokens inside a tensor-parallel region, and the degrees that divide widths."""
    mesh, whole = spec.mesh, whole_workload(spec, dtype)
    return whole._replace(
        num_tokens=whole.num_tokens // mesh.cp, tp=mesh.tp, ep=mesh.ep, etp=mesh.etp, cp=mesh.cp, joins_loss=spec.host.uses_triton
    )


def layer_works(load: Workload, model: Model, block: Block) -> Works:
    """Work of the operations of one layer of the stack.

    Raises:
        ValueError: The block's family has no section in the model.
    """
    family = FAMILIES[block.family]
    ops = family.work(load, family.section_of(model), model.hidden_size, block.variant)
    return adapted_works(load, work_of(path_in(model.residual_path, block.tensors), load, ops, model.hidden_size), block)


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
    last = head(load, hidden, model.vocab_size, vocab_parallel=vocab_parallel)
    if spec.lora is not None:
        first, sides, last = tuple(map(unreached_work, first)), tuple(map(unreached_work, sides)), tuple(map(frozen_work, last))
    return EndWorks(
        embedding=first,
        side_embeddings=sides,
        head=last,
        mtp=mtp,
        mtp_depth=features.mtp.depth if features.mtp is not None and mtp else 0,
    )
