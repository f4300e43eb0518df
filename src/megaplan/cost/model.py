"""`model_costs`: what every layer, embedding, head and MTP depth of a model costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from megaplan.cost.attention import attention_block
from megaplan.cost.ends import head, mtp_depth, side_embeddings
from megaplan.cost.mamba import mamba_block
from megaplan.cost.moe import moe_block
from megaplan.cost.ops import gather, mlp, residual_norm
from megaplan.cost.recurrent import recurrent_block
from megaplan.cost.work import LayerCost, Work, Workload
from megaplan.dtypes import DType
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Block, Family, Inventory
from megaplan.spec.models import LatentAttention, Letter, Model, Spec


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Costs of a whole model, unsharded.

    Attributes:
        layers: One per layer, in model order; layers of the same make share one object.
        embedding: The token embedding: no FLOPs.
        side_embeddings: N-gram, structure and platform embeddings with their projections; all zero without them.
        head: Final norm, logits and loss.
        mtp: One per MTP depth, its own head included.
    """

    layers: tuple[LayerCost, ...]
    embedding: LayerCost
    side_embeddings: LayerCost
    head: LayerCost
    mtp: tuple[LayerCost, ...]

    @property
    def model_flops(self) -> int:
        """FLOPs per token of forward and backward, repeated work left out: the numerator of MFU."""
        outside = (self.embedding, self.side_embeddings, self.head, *self.mtp)
        return sum(cost.model_flops for cost in (*self.layers, *outside))


def model_costs(spec: Spec, inventory: Inventory) -> ModelCosts:
    """FLOPs and bytes of every part of the model, per token.

    Args:
        spec: A checked spec.
        inventory: Its inventory, for the weight traffic and for which layers are alike.

    Returns:
        Integer costs; sequence-dependent ones are averages over the positions of a sequence, rounded up.
    """
    model, precision = spec.model, spec.precision
    made: dict[int, LayerCost] = {}
    for block in inventory.layers:
        if id(block) not in made:
            dtype = precision.families.get(cast(Letter, block.family.value), precision.params)
            made[id(block)] = _cost(spec, _layer_work(_workload(spec, dtype), model, block), block.elements, dtype)
    dtype, features = precision.params, model.features
    load, hidden, grad_bytes = _workload(spec, dtype), model.hidden_size, precision.grads.bytes
    outside = dict(inventory.outside)
    head_elements = outside["embedding" if inventory.tied else "head"].elements
    sides = side_embeddings(load, features, hidden, grad_bytes)
    projections = sum(
        tensor.elements for name, block in inventory.outside for tensor in block.tensors if name in _SIDES and tensor.name == "proj.weight"
    )
    mtp: tuple[LayerCost, ...] = ()
    if features.mtp is not None and model.attention is not None:
        depth = mtp_depth(
            load,
            model.attention,
            hidden_size=hidden,
            ffn_hidden_size=features.mtp.ffn_hidden_size,
            vocab_size=model.vocab_size,
            grad_bytes=grad_bytes,
        )
        mtp = (_cost(spec, depth, outside["mtp.0"].elements + head_elements, dtype),) * features.mtp.depth
    return ModelCosts(
        layers=tuple(made[id(block)] for block in inventory.layers),
        embedding=_cost(spec, gather(load, hidden, grad_bytes), 0, dtype),
        side_embeddings=_cost(spec, sides, projections, dtype),
        head=_cost(spec, head(load, hidden, model.vocab_size), head_elements + hidden, dtype),
        mtp=mtp,
    )


def flops_per_token(spec: Spec) -> int:
    """Model FLOPs of one token's forward and backward, for utilisation: MFU = flops_per_token · tokens per second / peak FLOPs.

    Source: PaLM, arXiv:2204.02311, appendix B: rematerialised work is not counted.
    """
    return model_costs(spec, build_inventory(spec)).model_flops


_SIDES = (Family.NGRAM.value, Family.STRUCTURE.value, Family.PLATFORM.value)


def _workload(spec: Spec, dtype: DType) -> Workload:
    # fp8 is a dtype of weights: activations between ops stay two bytes wide.
    return Workload(spec.batch.seq_length, spec.batch.micro_batch_size * spec.batch.seq_length, max(dtype.bytes, DType.BF16.bytes))


def _layer_work(load: Workload, model: Model, block: Block) -> Work:
    hidden = model.hidden_size
    match block.family:
        case Family.A if model.attention is not None:
            with_indexer = isinstance(model.attention, LatentAttention) and any(t.name.startswith("indexer.") for t in block.tensors)
            return attention_block(load, model.attention, hidden, with_indexer=with_indexer)
        case Family.M if model.mamba is not None:
            return mamba_block(load, model.mamba, hidden)
        case Family.E if model.moe is not None:
            return moe_block(load, model.moe, hidden)
        case Family.R if model.recurrent is not None:
            return recurrent_block(load, model.recurrent, hidden)
        case Family.D if model.mlp is not None:
            return residual_norm(load, hidden) + mlp(load, hidden, model.mlp.ffn_hidden_size, model.mlp.activation)
    raise ValueError(f"the inventory has a layer of family {block.family} and the spec no section for it: they are not of the same model")


def _cost(spec: Spec, work: Work, weight_elements: int, dtype: DType) -> LayerCost:
    """Weights are read by F and by I in the gathered dtype; W reads and writes the accumulating gradient."""
    return LayerCost(
        work.forward,
        work.input_grad,
        work.weight_grad,
        work.recomputed,
        work.moved,
        weight_elements * 2 * (dtype.bytes + spec.precision.grads.bytes),
        spec.batch.micro_batch_size * spec.batch.seq_length,
    )
