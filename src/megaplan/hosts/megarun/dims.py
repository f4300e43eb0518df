"""The local sizes of a spec's ranks, of its blocks' parameters, and the dtype of their gradients."""

from __future__ import annotations

from megaplan.blocks.dims import Dims
from megaplan.dtypes import DType
from megaplan.inventory.tensors import Block, Owner, ParamTensor
from megaplan.spec.models import Spec


def local_dims(spec: Spec, *, is_last_cp_rank: bool = True) -> Dims:
    """The local sizes of a checked spec (cp and tp divide the sequence), for the last rank of a CP group or another."""
    mesh, batch = spec.mesh, spec.batch
    tokens, relation = batch.seq_length // mesh.cp, spec.model.features.relation_bias
    return Dims(
        batch=batch.micro_batch_size,
        tokens=tokens,
        residual_tokens=tokens // mesh.tp,
        hidden=spec.model.hidden_size,
        tp=mesh.tp,
        cp=mesh.cp,
        dtype=spec.precision.activations,
        packed=spec.data.packing == "documents",
        is_last_cp_rank=is_last_cp_rank,
        ep=mesh.ep,
        etp=mesh.etp,
        kernels=spec.host.uses_triton,
        gathers=spec.host.uses_triton,
        frozen=spec.lora is not None,
        relations=0 if relation is None else relation.num_relations,
    )


def gradient_dtype(spec: Spec, block: Block) -> DType:
    """Dtype in which autograd makes a block's parameter gradients: the parameters', or bf16 for fp8."""
    return spec.precision.of(block.family).of_products


def local_shape(tensor: ParamTensor, tp: int, ep: int, etp: int) -> tuple[int, ...]:
    """Shape of a rank's part after TP, EP and ETP, before state sharding."""
    if tp == ep == etp == 1:
        return tensor.shape
    shape = list(tensor.shape)
    if tensor.owner is Owner.TENSOR_PARALLEL and tensor.tp_dim is not None:
        shape[tensor.tp_dim] //= tp
    elif tensor.owner is Owner.EXPERT_PARALLEL:
        shape[0] //= ep
        if tensor.tp_dim is not None:
            shape[tensor.tp_dim] //= etp
    return tuple(shape)
