"""Parameters of a rank, for what happens once a step: gradients reduced, parameters gathered, optimizer state read and written."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import NamedTuple

from megaplan.cost.step.frameworks import framework
from megaplan.cost.step.workload import Software, TimedStep
from megaplan.inventory.tensors import Group, Inventory, Owner, has_groups

ACCUMULATE_BYTES = 12
"""Bytes of a parameter: a product's gradient written and read in 16 bits, added to a sum of 32."""


def accumulate_bytes(software: Software) -> int:
    """Bytes of a parameter and microbatch that an addition of gradients to their sums moves; 0 where the products add them."""
    own = framework(software.name).accumulate_bytes
    return own if own or software.fused_accumulation else ACCUMULATE_BYTES


class Held(NamedTuple):
    """Elements of a rank before data sharding: those that every data rank has, and those of its experts."""

    dense: float
    experts: float


def held(work: TimedStep) -> Held:
    """Parameters of a mean stage's rank; embedding and head count once if they are on two stages."""
    model, mesh = work.spec.model, work.mesh
    tables = 1 if model.tie_embeddings or mesh.pp > 1 else 2
    blocks = _of_rank(work, trained=False)
    return blocks._replace(dense=blocks.dense + tables * model.vocab_size * model.hidden_size / mesh.tp)


def trained(work: TimedStep) -> Held:
    """The part of them that has gradients: all of them, or the adapters."""
    return held(work) if work.spec.lora is None else _of_rank(work, trained=True)


def _of_rank(work: TimedStep, *, trained: bool) -> Held:
    mesh, found = work.mesh, _elements(work.inventory, trained)
    dense = found[Owner.REPLICATED] + found[Owner.TENSOR_PARALLEL] / mesh.tp
    return Held(dense / mesh.pp, found[Owner.EXPERT_PARALLEL] / mesh.ep / mesh.etp / mesh.pp)


@cache
def _elements(inventory: Inventory, trained: bool) -> Counter[Owner]:
    """Elements of all layers and prediction depths by what shards them; of those with gradients alone if `trained`."""
    found: Counter[Owner] = Counter()
    for name, block in inventory.blocks():
        if has_groups(name):
            for tensor, size in zip(block.tensors, block.sizes, strict=True):
                if not trained or tensor.group is not Group.FROZEN:
                    found[tensor.owner] += size
    return found
