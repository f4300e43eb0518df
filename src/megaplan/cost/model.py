"""`model_costs`: what every layer, embedding, head and MTP depth of a model costs."""

from typing import NamedTuple

from megaplan.blocks.work import LayerCost, Works, total
from megaplan.cost.blocks import end_works, layer_works, trained_elements, whole_workload
from megaplan.cost.towers import tower_works
from megaplan.dtypes import DType
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Inventory
from megaplan.spec.models import SIDES, Spec


class ModelCosts(NamedTuple):
    """Costs of a whole model, unsharded.

    Attributes:
        layers: One per layer, in model order; layers of the same make share one object.
        embedding: The token embedding: no FLOPs.
        side_embeddings: N-gram, structure and platform embeddings with their projections; all zero without them.
        head: Final norm, logits and loss.
        mtp: One per MTP depth, its own head included.
        towers: A stated encoder and its projection, per token of text; all zero without them.
    """

    layers: tuple[LayerCost, ...]
    embedding: LayerCost
    side_embeddings: LayerCost
    head: LayerCost
    mtp: tuple[LayerCost, ...]
    towers: LayerCost

    @property
    def model_flops(self) -> int:
        """FLOPs per token of forward and backward, repeated work left out: the numerator of MFU."""
        outside = (self.embedding, self.side_embeddings, self.towers, self.head, *self.mtp)
        return sum(cost.model_flops for cost in (*self.layers, *outside))


def model_costs(spec: Spec, inventory: Inventory) -> ModelCosts:
    """FLOPs and bytes of every part of the model, per token.

    Args:
        spec: A checked spec.
        inventory: Inventory of the spec, for the weight traffic and for the layers that are equal.

    Returns:
        Integer costs; sequence-dependent ones are averages over the positions of a sequence, rounded up.
    """
    made: dict[int, LayerCost] = {}
    for block in inventory.layers:
        if id(block) not in made:
            dtype = spec.precision.of(block.family)
            ops, trained = layer_works(whole_workload(spec, dtype), spec.model, block), trained_elements(block)
            made[id(block)] = _cost(spec, ops, block.elements, dtype, trained)
    dtype, outside = spec.precision.params, dict(inventory.outside)
    ends = end_works(whole_workload(spec, dtype), spec)
    head_elements = outside["embedding" if inventory.tied else "head"].sizes[0]
    projections = sum(
        tensor.elements for name, block in inventory.outside for tensor in block.tensors if name in SIDES and tensor.name == "proj.weight"
    )
    mtp: tuple[LayerCost, ...] = ()
    if ends.mtp_depth:
        weights = outside["mtp.0"].elements + head_elements + (projections if inventory.ahead else 0)
        mtp = (_cost(spec, ends.mtp, weights, dtype),) * ends.mtp_depth
    return ModelCosts(
        layers=tuple(made[id(block)] for block in inventory.layers),
        embedding=_cost(spec, ends.embedding, 0, dtype),
        side_embeddings=_cost(spec, ends.side_embeddings, projections, dtype),
        head=_cost(spec, ends.head, head_elements + spec.model.hidden_size, dtype),
        mtp=mtp,
        towers=_towers(spec, dtype),
    )


def flops_per_token(spec: Spec) -> int:
    """Model FLOPs of one token's forward and backward, for utilisation: MFU = flops_per_token · tokens per second / peak FLOPs.

    Source: PaLM, arXiv:2204.02311, appendix B: rematerialised work is not counted.
    """
    return model_costs(spec, build_inventory(spec)).model_flops


def _towers(spec: Spec, dtype: DType) -> LayerCost:
    """Costs of all images of a microbatch, divided by its tokens of text and rounded up."""
    tokens = spec.batch.micro_batch_size * spec.batch.seq_length
    sums, weights = [0] * 5, 0
    for part in () if spec.model.towers is None else tower_works(spec, spec.model.towers, dtype):
        work, rows = total(part.ops), part.load.num_tokens * part.times
        each = work.forward, work.input_grad, work.weight_grad, work.recomputed, work.moved
        sums = [before + rows * more for before, more in zip(sums, each, strict=True)]
        weights += 2 * part.times * (part.elements * dtype.bytes + part.trained * spec.precision.grads.bytes)
    forward, inputs, weight, again, moved = (-(-each // tokens) for each in sums)
    return LayerCost(forward, inputs, weight, again, moved, weights, tokens)


def _cost(spec: Spec, ops: Works, weight_elements: int, dtype: DType, trained: int | None = None) -> LayerCost:
    """Weights are read by F and by I in the gathered dtype; W reads and writes the accumulating gradient of those that are trained."""
    graded = trained if trained is not None else weight_elements if spec.lora is None else 0
    work = total(ops)
    passes = [spec.packing.unpacking(*op.unpacked, dtype.bytes, fused=True) for op in ops if spec.packing is not None and any(op.unpacked)]
    unpacked = sum(each.num_bytes for each in passes)
    return LayerCost(
        work.forward,
        work.input_grad,
        work.weight_grad,
        work.recomputed,
        work.moved,
        2 * (weight_elements * dtype.bytes + graded * spec.precision.grads.bytes + unpacked),
        spec.batch.micro_batch_size * spec.batch.seq_length,
    )
