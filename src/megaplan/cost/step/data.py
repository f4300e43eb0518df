"""Transfers of data ranks: gradients reduced and parameters gathered once per step, or per microbatch if parameters are sharded."""

from collections.abc import Iterator
from math import log2
from typing import Any, NamedTuple

from megaplan.cost.step.frameworks import framework
from megaplan.cost.step.launch import HOST_JOIN
from megaplan.cost.step.muon import MUON_BYTES, STEP_BYTES, TF32_SHARE, muon_work
from megaplan.cost.step.parameters import held, trained
from megaplan.cost.step.transfers import near
from megaplan.cost.step.workload import TimedStep


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two numbers, or of two arrays element by element."""
    return (a + b - abs(a - b)) / 2


def excess(a: Any) -> Any:
    """The number if it is positive, else 0."""
    return (a + abs(a)) / 2


class Group(NamedTuple):
    """A group of data ranks.

    Attributes:
        ranks: Size of the group.
        inside: Ranks of the group in one domain.
        reduced: Bytes of the gradients in the reduce-scatter.
        gathered: Bytes of the parameters in the all-gather.
    """

    ranks: float
    inside: float
    reduced: float
    gathered: float


class Once(NamedTuple):
    """The parts of a step outside its passes; numbers, or arrays with one number per row.

    Attributes:
        dense: Group of the parameters that every data rank has, for transfers once per step.
        experts: The same for experts.
        sharded: Group of the parameters outside experts that are sharded over data ranks; it has no bytes if none are.
        sharded_experts: The same for experts.
        gathers: Gathers of sharded parameters per microbatch; 2 if backward gathers them again.
        optimizer_bytes: Bytes that the optimizers read and write.
        orthogonalised: Seconds of Muon's products at the nominal rate.
        node: Bytes per second of the fabric.
        network: Bytes per second of an adapter.
        memory: Bytes per second of memory.
        per_microbatch: 1 if sharded parameters are gathered for every microbatch, else 0.
        once: 1 if they are gathered once per step, else 0.
        microbatches: Microbatches of the step.
        chunks: Chunks of a stage.
        log2_nodes: Logarithm of the number of nodes to base 2.
    """

    dense: Group
    experts: Group
    sharded: Group
    sharded_experts: Group
    gathers: Any
    optimizer_bytes: Any
    orthogonalised: Any
    node: Any
    network: Any
    memory: Any
    per_microbatch: Any
    once: Any
    microbatches: Any
    chunks: Any
    log2_nodes: Any


NODE_DEVICES = 8
"""Devices of a node, the unit of `Once.log2_nodes`."""


def once_of(work: TimedStep) -> Once:
    """The parts of a step outside its passes, for one rank."""
    mesh, machine, sharded = work.mesh, work.machine, work.software.sharded
    once, (groups, optimizer) = sharded is not None and sharded.kind == "fsdp2" and mesh.pp > 1, _groups(work)
    flops, _, elements = muon_work(work)
    steps = work.spec.optimizer.newton_schulz_steps
    moved = work.software.optimizer_bytes * max(0.0, optimizer - elements) + (MUON_BYTES + STEP_BYTES * steps) * elements
    return Once(
        *(*groups, 2 if sharded is not None and sharded.regather else 1, moved, steps * flops / (machine.peaks["bf16"] * TF32_SHARE)),
        *(machine.node, machine.network, machine.memory, float(sharded is not None and not once), float(once)),
        *(work.batch.num_microbatches, mesh.vpp, log2(max(1.0, mesh.world / NODE_DEVICES))),
    )


def _groups(work: TimedStep) -> tuple[tuple[Group, Group, Group, Group], float]:
    """The first four groups of `Once`, in its order, and the number of elements that a rank's optimizer updates."""
    mesh, software, elements, updated = work.mesh, work.software, held(work), trained(work)
    ranks, domain, grad_bytes = float(mesh.dp * mesh.cp), work.machine.domain, software.reduce_bytes or framework(software.name).grad_bytes
    expert_ranks = max(1.0, mesh.dp * mesh.cp * mesh.tp / (mesh.ep * mesh.etp))
    inside, expert_inside = near(domain, ranks, mesh.tp), near(domain, expert_ranks, mesh.ep * mesh.etp)
    sharded = software.sharded
    none, no_experts = Group(ranks, inside, 0.0, 0.0), Group(expert_ranks, expert_inside, 0.0, 0.0)
    divided = bool(software.zero or sharded)
    optimizer = updated.dense / (ranks if divided else 1) + updated.experts / (expert_ranks if divided else 1)
    if sharded is None:
        gathered = 2 + grad_bytes * software.all_reduces
        dense = Group(ranks, inside, updated.dense * grad_bytes, updated.dense * gathered)
        experts = Group(expert_ranks, expert_inside, updated.experts * grad_bytes, updated.experts * gathered)
        return (dense, experts, none, no_experts), optimizer
    of_dense = (updated.dense * sharded.reduce_bytes, elements.dense * sharded.gather_bytes)
    of_experts = (updated.experts * sharded.reduce_bytes, elements.experts * 2)
    dense, experts = Group(ranks, inside, *of_dense), Group(expert_ranks, expert_inside, *of_experts)
    if not sharded.inside:
        return (none, no_experts, dense, experts), optimizer
    # each domain shards its own copy of the parameters; once per step, ranks with the same shard exchange gradients and parameters across
    # domains
    copies, expert_copies = ranks / inside, expert_ranks / expert_inside
    over = Group(copies, 1.0, *(size / inside for size in of_dense))
    experts_over = Group(expert_copies, 1.0, *(size / expert_inside for size in of_experts))
    dense, experts = Group(inside, inside, *of_dense), Group(expert_inside, expert_inside, *of_experts)
    return (over, experts_over, dense, experts), optimizer


def data_exchanges(work: TimedStep) -> Iterator[tuple[str, Group, float, float]]:
    """Groups of data ranks with the bytes that one rank reduces and gathers in a step; the name is empty, or that of expert banks."""
    once = once_of(work)
    repeats = work.batch.num_microbatches if once.per_microbatch else 1
    again = once.gathers if once.per_microbatch else 1
    for name, group, times in (
        ("", once.dense, 1),
        (" of experts", once.experts, 1),
        ("", once.sharded, repeats),
        (" of experts", once.sharded_experts, repeats),
    ):
        if group.ranks > 1:
            yield name, group, group.reduced * times, group.gathered * times * again


def data_traffic(work: TimedStep) -> tuple[int, int]:
    """Bytes of gradients that data ranks reduce and of parameters that they gather in a step, over all tensor, expert and pipeline ranks.

    A payload counts once per collective, whatever the number of its ranks; zero without data ranks.
    """
    mesh, reduced, gathered = work.mesh, 0.0, 0.0
    for name, _, own_reduced, own_gathered in data_exchanges(work):
        ranks = (mesh.ep * mesh.etp if name else mesh.tp) * mesh.pp
        reduced, gathered = reduced + own_reduced * ranks, gathered + own_gathered * ranks
    return round(reduced), round(gathered)


def ring_seconds(moved: Any, ranks: Any, bandwidth: Any, latency: Any) -> Any:
    """Seconds of an all-gather or a reduce-scatter: (n − 1)/n · S / W + (n − 1) · l.

    Args:
        moved: S, bytes of the unsharded tensor.
        ranks: n, number of ranks.
        bandwidth: W, bytes per second of the fabric, or of all adapters of the group's ranks in a domain if that is less.
        latency: l, seconds of one step of the ring without its bytes.

    Source: NCCL's ring algorithm.
    """
    return moved * (ranks - 1) / ranks / bandwidth + (ranks - 1) * latency


def exposed_seconds(reduced: Any, gathered: Any, share: Any, forward: Any, backward: Any) -> Any:
    """Seconds that a step waits: x (R + G) + max(0, (1 − x) R − B) + max(0, (1 − x) G − F).

    Args:
        reduced: R, seconds of the reduction.
        gathered: G, seconds of the gather.
        share: x, share that no computation hides; 1 without overlap.
        forward: F, seconds of one microbatch's forward, which hides the gather.
        backward: B, seconds of its backward, which hides the reduction.
    """
    return share * (reduced + gathered) + excess(reduced * (1 - share) - backward) + excess(gathered * (1 - share) - forward)


def overlapped_seconds(computed: Any, moved: Any, exposed: Any) -> Any:
    """Seconds of a pass that overlaps with its gathers and reductions: (C^6 + M^6)^(1/6) + x · M."""
    return (computed**HOST_JOIN + moved**HOST_JOIN) ** (1 / HOST_JOIN) + exposed * moved
