"""Parameters of a rank, for the reduction of gradients, the gather of parameters and the optimizer."""

from collections import Counter
from functools import cache
from typing import NamedTuple

from megaplan.cost.step.frameworks import framework
from megaplan.cost.step.workload import Software, TimedStep
from megaplan.inventory.tensors import Group, Inventory, Owner, has_groups

GRADIENT_BYTES = 4
"""Bytes per parameter of a separate accumulation of gradients, written and read in 16 bits; in addition the sum is read and written."""


def accumulate_bytes(software: Software) -> int:
    """Bytes per parameter and microbatch that a separate accumulation of gradients moves; 0 if the products accumulate."""
    own = framework(software.name).accumulate_bytes
    return own if own or software.fused_accumulation else GRADIENT_BYTES + 2 * software.sum_bytes


class Held(NamedTuple):
    """Elements of a rank before sharding over data ranks: those outside experts, and those of its experts."""

    dense: float
    experts: float


def held(work: TimedStep) -> Held:
    """Parameters of a rank on an average stage; embedding and head count as one table if they are on different stages."""
    model, mesh = work.spec.model, work.mesh
    tables = 1 if model.tie_embeddings or mesh.pp > 1 else 2
    blocks = _of_rank(work, trained=False)
    return blocks._replace(dense=blocks.dense + tables * model.vocab_size * model.hidden_size / mesh.tp)


def trained(work: TimedStep) -> Held:
    """Parameters with gradients: all of them, or only the adapters."""
    return held(work) if work.spec.lora is None else _of_rank(work, trained=True)


def _of_rank(work: TimedStep, *, trained: bool) -> Held:
    mesh, found = work.mesh, _elements(work.inventory, trained)
    dense = found[Owner.REPLICATED] + found[Owner.TENSOR_PARALLEL] / mesh.tp
    return Held(dense / mesh.pp, found[Owner.EXPERT_PARALLEL] / mesh.ep / mesh.etp / mesh.pp)


@cache
def _elements(inventory: Inventory, trained: bool) -> Counter[Owner]:
    """Elements of all layers and prediction depths by owner; only of tensors with gradients if `trained`."""
    found: Counter[Owner] = Counter()
    for name, block in inventory.blocks():
        if has_groups(name):
            for tensor, size in zip(block.tensors, block.sizes, strict=True):
                if not trained or tensor.group is not Group.FROZEN:
                    found[tensor.owner] += size
    return found
