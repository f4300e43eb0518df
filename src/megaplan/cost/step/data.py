"""What data ranks exchange: gradients reduced and parameters gathered once a step, or for every microbatch where they are sharded."""

from __future__ import annotations

from typing import Any, NamedTuple

from megaplan.cost.step.launch import HOST_JOIN
from megaplan.cost.step.parameters import held, trained
from megaplan.cost.step.transfers import near
from megaplan.cost.step.workload import TimedStep


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two numbers, or of two arrays element by element."""
    return (a + b - abs(a - b)) / 2


def excess(a: Any) -> Any:
    """What is above zero."""
    return (a + abs(a)) / 2


class Group(NamedTuple):
    """A group of data ranks.

    Attributes:
        ranks: Of it.
        inside: Of them in one domain.
        reduced: Bytes of gradients that are reduced and scattered.
        gathered: Bytes of parameters that are gathered.
    """

    ranks: float
    inside: float
    reduced: float
    gathered: float


class DataWork(NamedTuple):
    """What data parallelism adds.

    Attributes:
        dense: Once a step, parameters that every data rank has.
        experts: Once a step, experts.
        sharded: What every data rank has, for every microbatch, or once where `once`; no bytes without sharded parameters.
        sharded_experts: The same of experts.
        once: Gathered once a step.
        gathers: Gathers a microbatch, 2 with one in backward.
        optimizer_bytes: Read and written by Adam: 30 an element, gradient, master, two moments and parameter.
    """

    dense: Group
    experts: Group
    sharded: Group
    sharded_experts: Group
    once: bool
    gathers: int
    optimizer_bytes: float


OPTIMIZER_BYTES = 30.0


def data_work(work: TimedStep, grad_bytes: float) -> DataWork:
    """Bytes of every data group of a rank."""
    mesh, software, elements, updated = work.mesh, work.software, held(work), trained(work)
    ranks, domain = float(mesh.dp * mesh.cp), work.machine.domain
    expert_ranks = max(1.0, mesh.dp * mesh.cp * mesh.tp / (mesh.ep * mesh.etp))
    inside, expert_inside = near(domain, ranks, mesh.tp), near(domain, expert_ranks, mesh.ep * mesh.etp)
    sharded = software.sharded
    none, no_experts = Group(ranks, inside, 0.0, 0.0), Group(expert_ranks, expert_inside, 0.0, 0.0)
    divided = bool(software.zero or sharded)
    optimizer = updated.dense / (ranks if divided else 1) + updated.experts / (expert_ranks if divided else 1)
    if sharded is None:
        dense = Group(ranks, inside, updated.dense * grad_bytes, updated.dense * 2)
        experts = Group(expert_ranks, expert_inside, updated.experts * grad_bytes, updated.experts * 2)
        return DataWork(dense, experts, none, no_experts, False, 1, OPTIMIZER_BYTES * optimizer)
    of_dense = (updated.dense * sharded.reduce_bytes, elements.dense * sharded.gather_bytes)
    of_experts = (updated.experts * sharded.reduce_bytes, elements.experts * 2)
    once, gathers = sharded.kind == "fsdp2" and mesh.pp > 1, 2 if sharded.regather else 1
    dense, experts = Group(ranks, inside, *of_dense), Group(expert_ranks, expert_inside, *of_experts)
    if not sharded.inside:
        return DataWork(none, no_experts, dense, experts, once, gathers, OPTIMIZER_BYTES * optimizer)
    # each domain shards its copy; over domains gradients are reduced and parameters gathered once a step, of a rank's own shard
    copies, expert_copies = ranks / inside, expert_ranks / expert_inside
    over = Group(copies, 1.0, *(size / inside for size in of_dense))
    experts_over = Group(expert_copies, 1.0, *(size / expert_inside for size in of_experts))
    dense, experts = Group(inside, inside, *of_dense), Group(expert_inside, expert_inside, *of_experts)
    return DataWork(over, experts_over, dense, experts, once, gathers, OPTIMIZER_BYTES * optimizer)


def ring_seconds(moved: Any, ranks: Any, bandwidth: Any, latency: Any) -> Any:
    """Seconds to gather or to reduce and scatter: (n − 1)/n · S / W + (n − 1) · l.

    Args:
        moved: S, bytes of the whole.
        ranks: n.
        bandwidth: W, of the fabric, or of all adapters of the group's ranks in a domain where that is less.
        latency: l, seconds of a rank's step beside its bytes.

    Source: NCCL's ring algorithm.
    """
    return moved * (ranks - 1) / ranks / bandwidth + (ranks - 1) * latency


def exposed_seconds(reduced: Any, gathered: Any, share: Any, forward: Any, backward: Any) -> Any:
    """Seconds that a step waits: x (R + G) + max(0, (1 − x) R − B) + max(0, (1 − x) G − F).

    Args:
        reduced: R, seconds of the reduction.
        gathered: G, seconds of the gather.
        share: x, that nothing hides; 1 without overlap.
        forward: F, seconds of one microbatch's forward, which hides the gather.
        backward: B, of its backward, which hides the reduction.
    """
    return share * (reduced + gathered) + excess(reduced * (1 - share) - backward) + excess(gathered * (1 - share) - forward)


def beside_seconds(computed: Any, moved: Any, exposed: Any) -> Any:
    """Seconds of a pass beside its gathers and reductions: (C^6 + M^6)^(1/6) + x · M."""
    return (computed**HOST_JOIN + moved**HOST_JOIN) ** (1 / HOST_JOIN) + exposed * moved
