"""`equal`: the same number of layers on every slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from megaplan.cost.model import model_costs
from megaplan.cost.values import once_a_device
from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, Severity
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import Spans
from megaplan.schedules import MAX_REPLAYED
from megaplan.schedules.placement import Placement
from megaplan.spec.models import Spec
from megaplan.spec.pattern import BOUNDARY
from megaplan.units import short_count

if TYPE_CHECKING:
    from megaplan.cost.values import MeasuredCosts, ModelTimes


SCALE = 1 << 60
"""Parts of the shares of `least_busiest`, which are rounded down."""
Mode = Literal["equal", "weighted", "manual"]
CutObjective = Literal["bottleneck", "step_time"]
Measures = Literal["slot", "rank", "step"]


class StackCosts(NamedTuple):
    """Costs of a model's layers and ends: integers of one unit.

    Attributes:
        layers: Cost of each layer, in model order.
        first: Cost added to the first slot (side embeddings; the token embedding costs 0).
        last: Cost added to the last slot (head and MTP).
        unit: Unit of all three.
        own: Costs of the model on each slot's device, of which `layers` and the ends are the first; empty if all devices are of one type.
    """

    layers: tuple[int, ...]
    first: int = 0
    last: int = 0
    unit: str = "flops_per_token"
    own: tuple[StackCosts, ...] = ()

    def of_slots(self, spans: Spans) -> tuple[int, ...]:
        """Cost of each slot."""
        on = self.own or (self,) * len(spans)
        costs = [sum(each.layers[start:stop]) for each, (start, stop) in zip(on, spans, strict=True)]
        costs[0] += on[0].first
        costs[-1] += on[-1].last
        return tuple(costs)


class Balance(NamedTuple):
    """The best cuts for the bottleneck.

    Attributes:
        cuts: Cuts, ascending, one fewer than slots.
        value: Cost of the largest slot, or rank. The search has refuted every smaller value.
    """

    cuts: tuple[int, ...]
    value: int


class Certificate(NamedTuple):
    """Quality of a split for its objective (R-29).

    Attributes:
        objective: Objective of `value`: `bottleneck`, the part that paces a step, or `step_time`, the whole step.
        value: Value of these cuts.
        lower_bound: Lower bound for all cuts under the same constraints. For `bottleneck` the search has refuted every smaller value.
        costs: Cost of each slot, in model order.
        unit: Unit of all values.
        measures: Part that `value` is the cost of: the largest slot, the largest rank (V placement), or the step.
    """

    objective: CutObjective
    value: int
    lower_bound: int
    costs: tuple[int, ...]
    unit: str
    measures: Measures = "slot"

    @property
    def gap(self) -> int:
        """Difference from the bound, in the same unit."""
        return self.value - self.lower_bound

    @property
    def optimal(self) -> bool:
        """True if no cuts under the same constraints are better."""
        return self.gap == 0


@dataclass(frozen=True)
class Cuts:
    """A decided split.

    Attributes:
        spans: One half-open layer span for each slot, in model order.
        mode: Mode that decided it.
        objective: Objective of `weighted`; None in the other modes.
        reason: Reason for a manual split.
        protects: Topics of `decided_against`, or free text, that a manual split protects.
        decided_against: Digest of each topic that a manual split may depend on (R-25); empty in the other modes, which are decided again.
        certify: Function that computes the certificate.
        diagnostics: Warnings about these cuts.
    """

    spans: Spans
    mode: Mode
    objective: CutObjective | None
    certify: Callable[[], Certificate] = field(repr=False, compare=False)
    reason: str | None = None
    protects: tuple[str, ...] = ()
    decided_against: dict[str, str] = field(default_factory=dict)
    diagnostics: tuple[Diagnostic, ...] = ()

    @cached_property
    def certificate(self) -> Certificate:
        """The certificate, in every mode against the best cuts under the same constraints. A long schedule's bound takes seconds, once."""
        return self.certify()


def amount(number: int, unit: str, *, named: bool = True) -> str:
    """A cost for display: nanoseconds as milliseconds, counts in thousands, millions, billions, with the name of the unit."""
    if unit == "ns":
        return f"{number / 1e6:,.2f} ms" if number else "0"
    return f"{short_count(number)} {unit.replace('flops_per_token', 'FLOPs per token')}" if named else short_count(number)


def bottleneck(where: Placement, costs: tuple[int, ...]) -> tuple[Measures, int]:
    """The part that limits the step, and its cost: the largest slot, or for a V the largest rank.

    A rank of a V owns two slots, equally far from the two ends.
    """
    if where in ("v", "mirror"):
        return "rank", max(costs[index] + costs[-1 - index] for index in range(len(costs) // 2))
    return "slot", max(costs)


def time_costs(times: Sequence[ModelTimes]) -> StackCosts:
    """Nanoseconds of F + I + W without time that turns may hide, from the model's times on each slot's device, or on the only device."""
    found = once_a_device(times, _compute_costs)
    return found[0] if len(set(found)) == 1 else found[0]._replace(own=tuple(found))


def _compute_costs(times: ModelTimes) -> StackCosts:
    return StackCosts(tuple([layer.compute_ns for layer in times.layers]), times.first.compute_ns, times.last.compute_ns, "ns")


def least_busiest(parts: Mapping[StackCosts, int]) -> int:
    """Lower bound on the slowest part of a pipeline over all cuts, for given numbers of parts on each type of device.

    If every part takes at most T on its own device, any weighted mean of the parts is at most T. The weights are 1 / C, where C is the
    whole model's time on the part's device; a layer adds the smallest of its weighted times to the mean.
    """
    wholes = [max(1, sum(each.layers) + each.first + each.last) for each in parts]
    columns = zip(*((*each.layers, each.first, each.last) for each in parts), strict=True)
    shares: int = sum(min([cost * SCALE // whole for cost, whole in zip(column, wholes, strict=True)]) for column in columns)
    weights = sum(number * -(-SCALE // whole) for number, whole in zip(parts.values(), wholes, strict=True))
    return -(-shares // weights)


def stack_costs(spec: Spec, inventory: Inventory, measured: MeasuredCosts | None = None) -> StackCosts:
    """Costs of each layer and of both ends: F + I + W.

    Args:
        spec: The spec.
        inventory: Parameter tensors of the spec.
        measured: A costs file with the same number of layers: nanoseconds of one microbatch on one rank.

    Without a costs file: executed FLOPs per token, including work that an op repeats internally, without recompute policies. The token
    embedding costs 0; side embeddings and an encoder are on the first slot; the head (6 · hidden · vocab) and every MTP depth (its block,
    its projection, one more head) on the last.
    """
    if measured is not None:
        return time_costs((measured.times,))
    costs = model_costs(spec, inventory)
    last = costs.head.total_flops + sum(depth.total_flops for depth in costs.mtp)
    return StackCosts(
        tuple(layer.total_flops for layer in costs.layers), costs.side_embeddings.total_flops + costs.towers.total_flops, last
    )


def objective_of(spec: Spec) -> CutObjective:
    """The objective of weighted cuts. With thousands of microbatches per rank, the step is the bottleneck plus fill and drain."""
    return "bottleneck" if spec.num_actions > MAX_REPLAYED else asked_objective(spec)


def asked_objective(spec: Spec) -> CutObjective:
    """The objective that the spec states, or the default: step_time for a weighted split of a pipeline of megarun, else bottleneck.

    The steps of other hosts come from a model of their software, not from the replayed schedule that step_time minimises.
    """
    if spec.split.objective is not None:
        return spec.split.objective
    weighted = spec.split.mode == "weighted" and BOUNDARY not in spec.model.pattern
    return "step_time" if weighted and spec.mesh.pp > 1 and spec.host.kind.trained else "bottleneck"


def objective_notes(spec: Spec) -> list[Diagnostic]:
    """MP315 if the objective for choosing cuts is not the spec's."""
    if objective_of(spec) == asked_objective(spec):
        return []
    detail = (
        f"split.objective = step_time, the schedule has up to {spec.num_actions:,} actions, and at most {MAX_REPLAYED:,} are replayed: "
        "the cuts are chosen for objective bottleneck"
    )
    return [diagnostic("MP315", detail, Location(key="split.objective"), ("--set split.objective=bottleneck",), Severity.NOTE)]


def equal_cuts(num_layers: int, num_slots: int, block_layers: int = 1) -> tuple[int, ...]:
    """Cuts that give every slot num_layers div num_slots layers, and the remainder one each to the inner slots.

    If a host's blocks have several layers, blocks are counted instead of layers.

    The edge stages take fewer (R-23), because embeddings, head, MTP and loss are work too. The remainder goes to slots 1, 2, … up to the
    one before the last, in order, then to slot 0; the last slot never takes one. 10 layers on 4 slots: 2, 3, 3, 2.

    Raises:
        ValueError: If there are fewer layers than slots.
    """
    if block_layers > 1 and num_layers >= block_layers * num_slots:
        return tuple(block_layers * cut for cut in equal_cuts(num_layers // block_layers, num_slots))
    if not 0 < num_slots <= num_layers:
        raise ValueError(f"{num_layers} layers cannot fill {num_slots} slots")
    share, rest = divmod(num_layers, num_slots)
    takers = set([*range(1, num_slots - 1), 0][:rest])
    cuts, reached = [], 0
    for slot in range(num_slots - 1):
        reached += share + (slot in takers)
        cuts.append(reached)
    return tuple(cuts)
