"""The work of a stated encoder and its projection, by the operations of the attention and the dense family."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from megaplan.blocks.costs import linear_work, norm_work
from megaplan.blocks.work import OpWork, Workload, Works
from megaplan.cost.blocks import frozen_work, unreached_work
from megaplan.dtypes import DType
from megaplan.families.residual import ResidualPath, work_of
from megaplan.inventory.towers import encoder_blocks
from megaplan.spec.models import RecomputePolicy, Spec
from megaplan.spec.towers import Encoder, Projection, Towers

PART = "head"
"""Efficiency of products outside the layers."""


class TowerWorks(NamedTuple):
    """Operations of a part of the towers that have one workload.

    Attributes:
        load: Positions of an image (or of a window of it), and of all images of a microbatch.
        ops: Operations.
        reruns: Operations that selective recompute runs again.
        policy: Recompute policy.
        times: Number of times that they run.
        elements: Elements of the parameters that they read.
        trained: Elements with gradients.
        width: Width of the rows that ranks with shared patches gather before it and scatter after it; 0 for no exchange.
        gathered: Width of the rows that they gather after it; 0 for no gather.
    """

    load: Workload
    ops: Works
    reruns: frozenset[str]
    policy: RecomputePolicy
    times: int
    elements: int
    trained: int
    width: int = 0
    gathered: int = 0

    @property
    def has_backward(self) -> bool:
        """True if a gradient reaches it."""
        return any(op.work.input_grad or op.work.weight_grad for op in self.ops)


def tower_works(spec: Spec, towers: Towers, dtype: DType, tp: int = 1) -> Iterator[TowerWorks]:
    """The parts of a stated encoder of the spec's towers on one of `tp` ranks that share it; none if its parameters are counted."""
    if towers.stated is None:
        return
    (encoder, projection), alone = towers.stated, spec.lora is None
    vision, projector = towers.trains("vision") and alone, towers.trains("projector") and alone
    images = spec.batch.micro_batch_size * spec.batch.images
    load = Workload(encoder.patches, images * encoder.patches, dtype.of_products.bytes, tp)
    path, width = ResidualPath(encoder.norm), encoder.hidden_size

    def part(load: Workload, ops: Works, count: int = 1, reruns: frozenset[str] = frozenset(), shared: int = 0) -> TowerWorks:
        elements = sum(op.weights for op in ops)
        if not vision:
            return TowerWorks(load, tuple(map(unreached_work, ops)), reruns, "none", count, elements, 0, shared)
        return TowerWorks(load, ops, reruns, spec.recompute.towers, count, elements, elements, shared)

    yield part(load, (*map(_from_input, _embedded(encoder, load)),))
    for window in sorted({encoder.window(layer) or 0 for layer in range(encoder.num_layers)}):
        count = sum((encoder.window(layer) or 0) == window for layer in range(encoder.num_layers))
        own = load._replace(seq_length=window or encoder.patches)
        for each in encoder_blocks(encoder).values():
            ops = work_of(path, own, each.family.work(own, each.section, width, each.variant), width)
            yield part(own, ops, count, each.family.selective(each.section, each.variant).reruns, width)
    rows = load._replace(num_tokens=load.num_tokens // projection.patches_per_token)
    works = _projected(projection, rows, width)
    if not projector:
        works = tuple(map(frozen_work if vision else unreached_work, works))
    elif not vision:
        works = (_from_input(works[0]), *works[1:])
    elements = sum(op.weights for op in works)
    yield TowerWorks(rows, works, frozenset(), "none", 1, elements, elements * projector, gathered=projection.widths[-1])


def _from_input(op: OpWork) -> OpWork:
    """An operation whose input gets no gradient."""
    return op._replace(work=replace(op.work, input_grad=0, moved_input=0)) if op.is_linear else op


def _embedded(encoder: Encoder, load: Workload) -> Works:
    width = encoder.hidden_size
    norms = encoder.first_norm + encoder.last_norm
    return (
        linear_work(load, "patches", PART, encoder.patch_values, width, own_tokens=True),
        *((norm_work(load, "norms", PART, width, times=norms, own_tokens=True),) if norms else ()),
    )


def _projected(projection: Projection, load: Workload, width: int) -> Works:
    norm = norm_work(load, "norm", PART, width, times=projection.joined_patches, own_tokens=True)
    return (
        *((norm,) if projection.norm is not None else ()),
        *(
            linear_work(load, f"linears.{index}", PART, inner, outer, own_tokens=True)
            for index, (inner, outer) in enumerate(zip(projection.widths, projection.widths[1:], strict=False))
        ),
    )
