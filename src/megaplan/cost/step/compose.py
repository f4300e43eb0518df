"""The time of a step from the terms of its passes. Every function takes numbers, or arrays with one number per row."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megaplan.cost.step import data, launch, memory, pipeline
from megaplan.cost.step.data import Group, Once


class PassTerms(NamedTuple):
    """A pass of one microbatch on a stage: seconds of kernels, number of kernels, seconds of waits, and number of launches by the host."""

    work: Any
    kernels: Any
    waits: Any
    launched: Any


class StageTerms(NamedTuple):
    """Both passes of a group of equal stages; in arrays, `present` is 0 in rows without such a stage."""

    count: Any
    forward: PassTerms
    backward: PassTerms
    present: Any = 1.0


class Step(NamedTuple):
    """Seconds of a step, by part."""

    total: Any
    stages: Any
    exposed: Any
    optimizer: Any
    fixed: Any


OPTIMIZER_SHARE = 0.9
"""Share of the rate of memory-bound kernels that the optimizer reaches on its many small tensors."""


def device_seconds(terms: PassTerms, rates: Mapping[str, Any]) -> Any:
    """Seconds of a pass on the device: kernels, the gaps between them, and waits."""
    return (terms.work + terms.kernels * rates["gap"]) * rates["moe"] + terms.waits


def pass_seconds(terms: PassTerms, rates: Mapping[str, Any], waits: Any = 0.0) -> Any:
    """Seconds of a pass: the device's kernels, gaps and waits, overlapped with the host's launches.

    `waits` is the share of the shorter of the two that does not overlap, because the host waits for the device in every layer.
    """
    device = device_seconds(terms, rates)
    host = terms.launched * rates["host"]
    return launch.joined_seconds(device, host) + waits * data.smaller(device, host)


def stage_passes(stage: StageTerms, rates: Mapping[str, Any]) -> tuple[Any, Any]:
    """Seconds of both passes of a stage, in which the host may wait for the device."""
    return pass_seconds(stage.forward, rates, rates["sync"]), pass_seconds(stage.backward, rates, rates["sync.backward"])


class Exchanged(NamedTuple):
    """Seconds of the transfers of data ranks.

    Attributes:
        gather: All-gather of sharded parameters, per microbatch or once per step.
        reduce: Reduce-scatter of the gradients of sharded parameters.
        reduced: Reduce-scatter of other gradients, once per step.
        gathered: All-gather of other parameters, once per step.
    """

    gather: Any
    reduce: Any
    reduced: Any
    gathered: Any


def exchanged_seconds(once: Once, rates: Mapping[str, Any]) -> Exchanged:
    """Seconds of the transfers of data ranks, including the part that computation hides."""
    gather, reduce = _sharded_seconds(once, rates)
    reduced, gathered = (
        sum(_ring(group, moved, once, rates) for group, moved in pairs)
        for pairs in (
            ((once.dense, once.dense.reduced), (once.experts, once.experts.reduced)),
            ((once.dense, once.dense.gathered), (once.experts, once.experts.gathered)),
        )
    )
    return Exchanged(gather, reduce, reduced * rates["data.slow"], gathered * rates["data.slow"])


def overlapped_passes(forward: Any, backward: Any, exchanged: Exchanged, once: Once, rates: Mapping[str, Any]) -> tuple[Any, Any]:
    """Seconds of both passes overlapped with the gathers and reductions of a microbatch."""
    gather = once.per_microbatch * exchanged.gather
    reduce = once.per_microbatch * (exchanged.gather * (once.gathers - 1) + exchanged.reduce)
    share = rates["sharded.exposed"]
    return data.overlapped_seconds(forward, gather, share), data.overlapped_seconds(backward, reduce, share)


def exposed_seconds(exchanged: Exchanged, once: Once, rates: Mapping[str, Any], forward: Any, backward: Any) -> Any:
    """Seconds that a step waits for the transfers of data ranks; the longest forward and backward of one microbatch overlap with them."""
    exposed = data.exposed_seconds(exchanged.reduced, exchanged.gathered, rates["data.exposed"], forward, backward)
    return exposed + once.once * (exchanged.gather + exchanged.reduce)


def optimizer_seconds(once: Once, rates: Mapping[str, Any]) -> Any:
    """Seconds of the optimizer: its memory-bound kernels, and Muon's products at the rate of large bf16 products."""
    moved = memory.moved_seconds(once.optimizer_bytes, once.memory * rates["memory"], 1 / OPTIMIZER_SHARE)
    return moved + once.orthogonalised / rates["product.bf16"]


def step_seconds(stages: Sequence[StageTerms], once: Once, rates: Mapping[str, Any]) -> Step:
    """Seconds of a step whose stages have these terms."""
    exchanged = exchanged_seconds(once, rates)
    both, forward_most, backward_most = [], 0.0, 0.0
    for stage in stages:
        overlapped = overlapped_passes(*stage_passes(stage, rates), exchanged, once, rates)
        forward, backward = (each * stage.present for each in overlapped)
        both.append((stage.count, forward + backward))
        forward_most, backward_most = pipeline.larger(forward_most, forward), pipeline.larger(backward_most, backward)
    busy = pipeline.pipeline_seconds(once.microbatches, once.chunks, both)
    exposed = exposed_seconds(exchanged, once, rates, forward_most, backward_most)
    optimizer, fixed = optimizer_seconds(once, rates), rates["fixed"]
    return Step(pipeline.grown(busy + exposed, rates["growth"], once.log2_nodes) + optimizer + fixed, busy, exposed, optimizer, fixed)


def _ring(group: Group, moved: Any, once: Once, rates: Mapping[str, Any]) -> Any:
    node = once.node * rates["node"]
    adapters = once.network * rates["network"] * group.inside
    bandwidth = _slowest(node, adapters, group)
    return data.ring_seconds(moved, group.ranks, bandwidth, rates["data.latency"])


def _sharded_seconds(once: Once, rates: Mapping[str, Any]) -> tuple[Any, Any]:
    gathered, reduced = 0.0, 0.0
    for group in (once.sharded, once.sharded_experts):
        bandwidth = _slowest(once.node * rates["node"], once.network * rates["sharded.network"] * group.inside, group)
        share = (group.ranks - 1) / group.ranks / bandwidth
        gathered, reduced = gathered + group.gathered * share, reduced + group.reduced * share
    return gathered, reduced


def _slowest(node: Any, adapters: Any, group: Group) -> Any:
    """Bytes per second of the fabric; across domains of the fabric or of the group's adapters in a domain, whichever is slower."""
    leaves = (group.ranks > group.inside) * 1.0
    return leaves * data.smaller(node, adapters) + (1 - leaves) * node
