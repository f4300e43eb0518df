"""Bytes that layers certainly need on a rank under Megatron-Core, as sums: limits that every fitting split must keep.

They contain storage of each layer, and the tensors of the microbatches at one point that every split of the schedule reaches. Phases and
fixed buffers are left out, so a split beyond these sums is known not to fit, and one within them has yet to be measured by the budget.
"""

from __future__ import annotations

from functools import cache, lru_cache

from megaplan.hosts.megatron.from_spec import jobs_from_spec, operator_letter
from megaplan.hosts.megatron.job import EMBEDDING, LOSS, MTP, MegatronJob
from megaplan.hosts.megatron.peak import in_flight_counts
from megaplan.hosts.megatron.saved import chunk
from megaplan.hosts.megatron.storage import parameters, storage_bytes
from megaplan.inventory.tensors import Inventory
from megaplan.layout.values import Layout
from megaplan.partition.limits import SpanSum, Weight, layer_weight
from megaplan.spec.models import Spec


def megatron_limits(
    spec: Spec, inventory: Inventory, layout: Layout, usable_bytes: int, _measured: object = None
) -> tuple[tuple[SpanSum, ...], ...]:
    """The sum of each pp rank that stays within usable memory in every split that fits; `layout` is that of any split."""
    letters = "".join(block.family for block in inventory.layers)
    jobs = jobs_from_spec(spec, letters, layout)
    ends = EMBEDDING, jobs[-1].chunks[-1][-1 - jobs[-1].chunks[-1].count(MTP) :]
    assert ends[1].endswith(LOSS)

    @cache
    def needs(own: str, count: int) -> int:
        return static_bytes(jobs[0], own) + (0 if jobs[0].recompute_num_layers else count * chunk(jobs[0], own))

    operators = [operator_letter(spec, letters, layer) for layer in range(len(letters))]

    @cache
    def weight(count: int) -> Weight:
        each = {own: needs(own, count) for own in set(operators)}
        return layer_weight([each[own] for own in operators], needs(ends[0], count), needs(ends[1], count))

    most = usable_bytes * 100 // (100 + spec.host.fragmentation_percent) + 1
    found = []
    for job in jobs:
        found.append((SpanSum(tuple(weight(count) for count in in_flight_counts(job)), most),))
    return tuple(found)


def static_bytes(job: MegatronJob, own: str) -> int:
    """Parameters, gradients and state of some operators; the whole stage decides which ranks get Muon's whole matrices."""
    return _static_bytes(job.of_operators, own)


@lru_cache(maxsize=4096)
def _static_bytes(job: MegatronJob, own: str) -> int:
    alone = job.of_rank((own,), None)
    parts = storage_bytes(alone, parameters(alone))
    return sum(parts.values()) - (parts["optimizer"] if job.optimizer == "muon" else 0)
