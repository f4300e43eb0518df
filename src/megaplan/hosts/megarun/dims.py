"""Local sizes of one rank: what TP, SP and CP leave of batch, sequence and width, and the dtypes of activations."""

from __future__ import annotations

from typing import NamedTuple

from megaplan.dtypes import DType
from megaplan.inventory.tensors import Block, Owner, ParamTensor
from megaplan.spec.models import Spec


class Dims(NamedTuple):
    """Local sizes, per microbatch.

    Attributes:
        batch: Sequences B.
        tokens: Positions of a sequence inside a tensor-parallel region: seq_length / cp.
        residual_tokens: Positions of the residual stream and its norms: with SP (tp > 1) seq_length / (cp · tp).
        hidden: Residual width h.
        tp: Tensor-parallel degree; widths of heads and MLPs are divided by it.
        cp: Context-parallel degree.
        dtype: Of activations: `precision.params`, bf16 where that is fp8.
        stat_dtype: Of statistics and states: fp32.
        packed: Whether rows hold several documents, each position with the int32 place where its own begins.
        turns: Of a rank of a CP group: whether it is the last one, on which the walk over the pieces turns.
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
    turns: bool = True

    @property
    def residual(self) -> tuple[int, int, int]:
        """Shape of the residual stream."""
        return (self.batch, self.residual_tokens, self.hidden)

    @property
    def gathered(self) -> tuple[int, int, int]:
        """Shape of a normed input gathered over TP."""
        return (self.batch, self.tokens, self.hidden)

    def wide(self, *widths: int) -> tuple[int, ...]:
        """[B, T, *widths] inside the tensor-parallel region."""
        return (self.batch, self.tokens, *widths)


def local_dims(spec: Spec, *, turns: bool = True) -> Dims:
    """The local sizes of a checked spec (cp and tp divide the sequence); `turns` is whether they are those of a CP group's last rank."""
    mesh, batch = spec.mesh, spec.batch
    tokens = batch.seq_length // mesh.cp
    return Dims(
        batch=batch.micro_batch_size,
        tokens=tokens,
        residual_tokens=tokens // mesh.tp,
        hidden=spec.model.hidden_size,
        tp=mesh.tp,
        cp=mesh.cp,
        dtype=spec.precision.activations,
        packed=spec.data.packing == "documents",
        turns=turns,
    )


def gradient_dtype(spec: Spec, block: Block) -> DType:
    """Dtype in which autograd makes a block's parameter gradients: the parameters', bf16 where those are fp8."""
    return spec.precision.of(block.family).of_products


def local_shape(tensor: ParamTensor, tp: int, ep: int, etp: int) -> tuple[int, ...]:
    """Shape that one rank owns after TP, EP and ETP, before state sharding."""
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
