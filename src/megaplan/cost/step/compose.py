"""Terms of a pass to a step. Every function takes numbers, or arrays of one number a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megaplan.cost.step import data, launch, memory, pipeline
from megaplan.cost.step.data import Group


class PassTerms(NamedTuple):
    """Seconds of a pass of a microbatch on a stage: work of kernels, kernels, waits, and kernels that the host launches one by one."""

    work: Any
    kernels: Any
    waits: Any
    launched: Any


class StageTerms(NamedTuple):
    """Both passes of the stages that are alike; `present` is 0 where an array's row has no such stage."""

    count: Any
    forward: PassTerms
    backward: PassTerms
    present: Any = 1.0


class Once(NamedTuple):
    """What a step has beside its passes; groups hold numbers or arrays.

    Attributes:
        node: Bytes per second of the fabric.
        network: Bytes per second of an adapter.
        memory: Bytes per second of memory.
        per_microbatch: 1 where sharded parameters are gathered for every microbatch.
        once: 1 where they are gathered once a step.
    """

    dense: Group
    experts: Group
    sharded: Group
    sharded_experts: Group
    gathers: Any
    optimizer_bytes: Any
    node: Any
    network: Any
    memory: Any
    per_microbatch: Any
    once: Any
    microbatches: Any
    chunks: Any
    log2_nodes: Any


class Step(NamedTuple):
    """Seconds of a step by part."""

    total: Any
    stages: Any
    exposed: Any
    optimizer: Any
    fixed: Any


OPTIMIZER_SHARE = 0.9
"""Of the rate of memory-bound kernels that the optimizer's many small tensors leave."""


def pass_seconds(terms: PassTerms, rates: Mapping[str, Any], waits: Any = 0.0) -> Any:
    """Seconds of a pass: the device's work, gaps and waits, joined with the host's launches, of which `waits` are not beside the device."""
    device = (terms.work + launch.gap_seconds(terms.kernels, rates["gap"])) * rates["moe"] + terms.waits
    host = terms.launched * rates["host"]
    return launch.joined_seconds(device, host) + waits * host


class Exchanged(NamedTuple):
    """Seconds that data ranks exchange: what is sharded, for every microbatch or once, and what is reduced and gathered once a step."""

    gather: Any
    reduce: Any
    reduced: Any
    gathered: Any


def exchanged_seconds(once: Once, rates: Mapping[str, Any]) -> Exchanged:
    """Seconds of a step's exchanges, whether or not anything hides them."""
    gather, reduce = _sharded_seconds(once, rates)
    reduced, gathered = (
        sum(_ring(group, moved, once, rates) for group, moved in pairs)
        for pairs in (
            ((once.dense, once.dense.reduced), (once.experts, once.experts.reduced)),
            ((once.dense, once.dense.gathered), (once.experts, once.experts.gathered)),
        )
    )
    return Exchanged(gather, reduce, reduced * rates["data.slow"], gathered * rates["data.slow"])


def beside_passes(forward: Any, backward: Any, exchanged: Exchanged, once: Once, rates: Mapping[str, Any]) -> tuple[Any, Any]:
    """Seconds of both passes beside the gathers and reductions of every microbatch."""
    gather = once.per_microbatch * exchanged.gather
    reduce = once.per_microbatch * (exchanged.gather * (once.gathers - 1) + exchanged.reduce)
    share = rates["sharded.exposed"]
    return data.beside_seconds(forward, gather, share), data.beside_seconds(backward, reduce, share)


def exposed_seconds(exchanged: Exchanged, once: Once, rates: Mapping[str, Any], forward: Any, backward: Any) -> Any:
    """Seconds that a step waits for its exchanges, beside one microbatch's longest forward and backward."""
    exposed = data.exposed_seconds(exchanged.reduced, exchanged.gathered, rates["data.exposed"], forward, backward)
    return exposed + once.once * (exchanged.gather + exchanged.reduce)


def optimizer_seconds(once: Once, rates: Mapping[str, Any]) -> Any:
    """Seconds of the optimizer."""
    return memory.moved_seconds(once.optimizer_bytes, once.memory * rates["memory"], 1 / OPTIMIZER_SHARE)


def step_seconds(stages: Sequence[StageTerms], once: Once, rates: Mapping[str, Any]) -> Step:
    """Seconds of a step of stages with these terms."""
    exchanged = exchanged_seconds(once, rates)
    both, forward_most, backward_most = [], 0.0, 0.0
    for stage in stages:
        passes = pass_seconds(stage.forward, rates, rates["sync"]), pass_seconds(stage.backward, rates)
        forward, backward = (each * stage.present for each in beside_passes(*passes, exchanged, once, rates))
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
    """The fabric inside a domain; over domains the slower of it and the adapters of the group's ranks in one."""
    leaves = (group.ranks > group.inside) * 1.0
    return leaves * data.smaller(node, adapters) + (1 - leaves) * node
