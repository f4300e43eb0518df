"""Bytes that an operator keeps for backward, per microbatch, and bytes that it needs temporarily."""

from typing import NamedTuple

from megaplan.blocks.ops import OUTPUT
from megaplan.columns import Column
from megaplan.hosts.megarun.parts import BlockBytes, BlockReplay, weigh
from megaplan.hosts.megatron.away import offloaded, recomputed
from megaplan.hosts.megatron.experts import experts_replay, experts_shapes
from megaplan.hosts.megatron.programs import (
    attention_replay,
    attention_shapes,
    delta_replay,
    delta_shapes,
    dense_replay,
    dense_shapes,
    mamba_replay,
    mamba_shapes,
)
from megaplan.hosts.megatron.setting import Setting
from megaplan.hosts.megatron.sparse import indexer_of, sparse_replay, sparse_shapes

PROGRAMS = {
    "*": (attention_shapes, attention_replay),
    "-": (dense_shapes, dense_replay),
    "M": (mamba_shapes, mamba_replay),
    "G": (delta_shapes, delta_replay),
    "E": (experts_shapes, experts_replay),
}


class Operator(NamedTuple):
    """Bytes of an operator.

    Attributes:
        tensors: Bytes of each tensor that it keeps.
        kept: Sum of the tensors.
        routing: The part of the sum that is routing.
        forward: Peak of its forward minus `kept`; tensors that recompute drops are counted.
        backward: Peak of its backward minus `kept`, without the residual stream's gradient.
        stream_gradient: Gradient of the stream; before a dropout the operator's output has a separate one.
        offloaded: Bytes of the tensors that are on the host.
    """

    tensors: dict[str, int]
    kept: int
    routing: int
    forward: int
    backward: int
    stream_gradient: int
    offloaded: int


def evaluate(at: Setting, letter: str) -> Operator:
    """The bytes of an operator with these sizes."""
    shapes_of, replay_of = (sparse_shapes, sparse_replay) if letter == "*" and indexer_of(at.spec) is not None else PROGRAMS[letter]
    own, held = shapes_of(at)
    tensors = {**at.common(letter), **own}
    again, on_host = recomputed(at.spec, letter, tensors), offloaded(at.spec, letter, tensors)
    part = BlockReplay(replay_of(frozenset(tensors), again | on_host), {**tensors, **held, **at.around()})
    sums = weigh(part, {}, in_place=False)
    kept, gradient = {name: tensors[name][0] for name, _ in part.replay.saved}, part.tensors[OUTPUT][0]
    backward = _delayed_bytes(sums) if at.spec.host.delayed_wgrad else sums.backward_bytes - gradient
    return Operator(
        tensors=kept,
        kept=sums.saved_bytes,
        routing=sums.saved.get(Column.ROUTING, 0),
        forward=sums.forward_bytes - sums.saved_bytes,
        backward=backward - sums.saved_bytes,
        stream_gradient=gradient,
        offloaded=sum(tensors[name][0] for name in on_host - again),
    )


def _delayed_bytes(sums: BlockBytes) -> int:
    """Peak of a backward whose weight gradients are computed after all input gradients.

    Their operands stay until then: the tensors that the operator saved, and the gradients of its products' outputs, which are assumed to be
    half of each step's tensors.
    """
    run, tensors = sums.part.replay, sums.part.tensors
    away = run.program.graph.away
    most = waiting = 0
    there = {name for name, _ in run.saved}
    for point in run.backward:
        there |= away.intersection(point.storages)
        made = sum(tensors[name][0] for name in point.storages if name not in there)
        made += sum(tensors[name][0] for name in point.gradients if name != OUTPUT)
        most = max(most, sum(tensors[name][0] for name in there) + made + waiting)
        waiting += made // 2
    return most
