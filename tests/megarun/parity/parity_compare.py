"""Whole tensors from what the ranks of a layout hold, and the parity metric."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import hypot, isfinite, sqrt
from typing import Any

import torch

from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Inventory, Owner, ParamTensor
from megaplan.layout.ranks import expert_coordinate, rank_coordinate
from megaplan.spec.models import GroupedQueryAttention, Mesh, Spec

Record = dict[str, Any]
NOISE = 1e-6
"""Share of the largest gradient that an analytically zero one may be."""
MOST_NOISE = 0.2
"""Share of a tensor's entries that may be such noise."""
PERTURBATIONS = 8
MOST_DEVIATIONS = 6.0
"""Standard deviations of what parameters one unit in the last place away move a gradient in one process: as far as rounding takes it."""
Perturbed = Callable[[int], Record]
"""One process's record from parameters moved by one unit in their last place, up or down by this seed."""


@dataclass(frozen=True)
class Difference:
    """The first tensor, in model order, that is further from one process than it may be."""

    what: str
    name: str
    distance: float
    worst_name: str
    worst_distance: float

    def __str__(self) -> str:
        worst = f"; the furthest is {self.worst_name}, {self.worst_distance:.2e}" if self.worst_name != self.name else ""
        return f"{self.what}: the first tensor that differs is {self.name}, max|a − b| / max|b| = {self.distance:.2e}{worst}"


def first_difference(case: dict[str, Any], records: Sequence[Record], reference: Record, tolerance: float) -> Difference | None:
    """Differences of a layout's records from one process's: initial parameters (bitwise), gradients, losses, norms, parameters."""
    spec = Spec.model_validate(case["spec"])
    inventory = build_inventory(spec)
    order = _model_order(inventory)
    losses = _numbers("losses", records, reference, tolerance)
    auxiliary = _numbers("auxiliary", records, reference, tolerance)
    norms = _numbers("norms", records, reference, tolerance)
    routing = [_numbers(key, records, reference, tolerance) for key in ("router_load", "router_entropy", "idle_experts")]
    held_out = _numbers("held_out", records, reference, tolerance)
    return (
        _tensors("initial", order, inventory, spec, records, reference, 0.0)
        or _tensors("gradients", order, inventory, spec, records, reference, tolerance)
        or losses
        or auxiliary
        or norms
        or next((found for found in routing if found is not None), None)
        or _tensors("parameters", order, inventory, spec, records, reference, tolerance)
        or held_out
    )


def course_difference(
    case: dict[str, Any], records: Sequence[Record], reference: Record, tolerance: float, perturbed: Perturbed | None = None
) -> Difference | None:
    """Largest difference of a layout from one process: gradients of every step, and parameters after plain steps and the optimizers' steps.

    Args:
        case: Cell of the layout.
        records: Records of its ranks.
        reference: One process's.
        tolerance: Tolerance of the metric.
        perturbed: Courses of perturbed parameters. If given, a value past the tolerance (a gradient, its norm, a loss, or a parameter after
            plain steps) is judged by how well fp32 can know it: it may differ by `MOST_DEVIATIONS` of what the perturbations move it.
    """
    spec = Spec.model_validate(case["spec"])
    inventory = build_inventory(spec)
    order = _model_order(inventory)
    steps = [key for key in reference if key.startswith("gradients ")]
    compared = [("initial", 0.0, None), *((key, tolerance, perturbed) for key in steps)]
    compared += [("trained", tolerance, perturbed), ("updated", tolerance, None)]
    tensors = (_tensors(key, order, inventory, spec, records, reference, bound, by) for key, bound, by in compared)
    numbers = (_numbers(key, records, reference, tolerance, perturbed) for key in ("losses", "auxiliary", "norms"))
    return next((found for found in chain(tensors, numbers) if found is not None), None)


def zero_gradients(spec: Spec) -> frozenset[str]:
    """Tensors whose gradient is zero analytically: what is computed is rounding, which AdamW turns into steps of a random sign.

    Softmax does not see a shift of all its scores, so biases of keys that are neither rotated nor normed have no effect. Gradients are
    held to be small; parameters are not compared.
    """
    attention = spec.model.attention
    if not isinstance(attention, GroupedQueryAttention) or not attention.bias or attention.qk_norm:
        return frozenset()
    return frozenset(f"layers.{index}.k_proj.bias" for index in attention.nope_layers)


def _is_noise(name: str, reference: Record) -> torch.Tensor:
    """Entries of a tensor that began as zeros whose first gradient is rounding relative to its largest.

    AdamW makes a whole step of any gradient, and such a tensor is only steps: where it differs, these entries are left out. One
    without any gradient makes no step, and stays; so do all, where they are many.
    """
    size = reference["gradients"][name][0].abs()
    found = (size > 0) & (size <= NOISE * size.max())
    if bool(reference["initial"][name][0].any()) or found.sum() > MOST_NOISE * found.numel():
        return torch.zeros_like(found)
    return found


def _model_order(inventory: Inventory) -> list[str]:
    """Full names of the parameters, in the order in which a token passes them."""
    names = [name for name, _ in inventory.tensors()]
    last = ("final_norm.", "head.", "mtp.")
    rank = {name: (0 if not name.startswith(("layers.", *last)) else 1 if name.startswith("layers.") else 2) for name in names}
    return sorted(names, key=rank.__getitem__)


def _numbers(
    key: str, records: Sequence[Record], reference: Record, tolerance: float, perturbed: Perturbed | None = None
) -> Difference | None:
    """A scalar of every step, or of every E layer of every step: equal on all ranks, and near one process's."""
    for index, expected in enumerate(reference[key]):
        found = [record[key][index] for record in records]
        distance = max(abs(value - expected) / (abs(expected) or 1.0) for value in found)
        name = f"step {1 + index * len(reference['losses']) // len(reference[key])}"
        if len(set(found)) > 1:
            return Difference(f"{key}: ranks disagree", name, distance, name, distance)
        # a norm sums squares of all tensors in another order, whatever the layout; auxiliary losses and entropies are summed by stage
        allowed = tolerance if key in ("losses", "held_out") else max(tolerance, 1e-12)
        if distance > allowed and perturbed is not None:
            others = [perturbed(seed)[key][index] for seed in range(PERTURBATIONS)]
            allowed = MOST_DEVIATIONS * hypot(*((other - expected) / (abs(expected) or 1.0) for other in others)) / sqrt(PERTURBATIONS)
        if not distance <= allowed:
            return Difference(key, name, distance, name, distance)
    return None


def _tensors(
    what: str,
    order: list[str],
    inventory: Inventory,
    spec: Spec,
    records: Sequence[Record],
    reference: Record,
    tolerance: float,
    perturbed: Perturbed | None = None,
) -> Difference | None:
    tensors, expected, mesh = dict(inventory.tensors()), reference[what], spec.mesh
    zero = zero_gradients(spec) if what not in ("initial", "updated") else frozenset()
    held = {name for record in records for name in record[what]}
    if held != expected.keys():
        missing = sorted(held ^ expected.keys())
        return Difference(f"{what}: one side has no {missing[0]}", missing[0], float("inf"), missing[0], float("inf"))
    scale = max(float(value[0].abs().max()) for value in expected.values())
    distances = {}
    for name in (name for name in order if name in held):
        found, (right,) = whole(tensors[name], [record[what].get(name, []) for record in records], mesh), expected[name]
        if found is None:
            return Difference(f"{what}: ranks that hold the same part disagree", name, float("nan"), name, float("nan"))
        if name in zero:
            distances[name] = 0.0 if what == "parameters" or float(found.abs().max()) <= NOISE * scale else float("inf")
            continue
        distances[name] = _distance(found, right)
        if what == "parameters" and distances[name] > tolerance:
            distances[name] = _distance(torch.where(_is_noise(name, reference), right, found), right)
    wrong = [name for name, distance in distances.items() if not distance <= tolerance]
    if wrong and perturbed is not None:
        others = [perturbed(seed)[what] for seed in range(PERTURBATIONS)]
        deviations = {name: hypot(*(_distance(other[name][0], expected[name][0]) for other in others)) for name in wrong}
        if not all(isfinite(deviation) for deviation in deviations.values()):
            raise ValueError(f"{what}: perturbed parameters give no finite numbers")
        wrong = [name for name in wrong if not distances[name] <= MOST_DEVIATIONS * deviations[name] / sqrt(PERTURBATIONS)]
    if not wrong:
        return None
    worst = max(wrong, key=distances.__getitem__)
    return Difference(what, wrong[0], distances[wrong[0]], worst, distances[worst])


def _distance(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).abs().max() / right.abs().max().clamp(min=1e-30))


def whole(tensor: ParamTensor, held: Sequence[Sequence[torch.Tensor]], mesh: Mesh) -> torch.Tensor | None:
    """A tensor from the parts on the ranks, by the axes that may shard it; None if ranks with the same part differ in a bit.

    Args:
        tensor: Shape, owner rule, `tp_dim` and `tp_parts`.
        held: Part that each rank holds: nothing, a part, or the same part twice (two chunks).
        mesh: Places the ranks.
    """
    parts: dict[tuple[int, int], torch.Tensor] = {}
    for rank, copies in enumerate(held):
        for part in copies:
            expert, dense = expert_coordinate(mesh, rank), rank_coordinate(mesh, rank)
            banked = tensor.owner is Owner.EXPERT_PARALLEL and part.shape[0] != tensor.shape[0]
            split = tensor.tp_dim is not None and part.shape[tensor.tp_dim] != tensor.shape[tensor.tp_dim]
            width = expert["etp"] if tensor.owner is Owner.EXPERT_PARALLEL else dense["tp"]
            place = (expert["ep"] if banked else 0, width if split else 0)
            if not torch.equal(parts.setdefault(place, part), part):
                return None
    experts = sorted({bank for bank, _ in parts})
    widths = sorted({width for _, width in parts})
    rows = [_joined(tensor, [parts[bank, width] for width in widths]) for bank in experts]
    if any(row is None for row in rows):
        return None
    found = torch.cat([row for row in rows if row is not None]) if len(rows) > 1 else rows[0]
    if found is None or tuple(found.shape) != tensor.shape:
        raise ValueError(f"{tensor.name}: parts of {[tuple(p.shape) for p in parts.values()]} make no {tensor.shape}")
    return found


def _joined(tensor: ParamTensor, shards: list[torch.Tensor]) -> torch.Tensor | None:
    """Shards side by side along `tp_dim`, each of `tp_parts` on its own; heads that several ranks repeat count once."""
    if len(shards) == 1:
        return shards[0]
    dim = tensor.tp_dim
    assert dim is not None
    repeats = len(shards) * shards[0].shape[dim] // tensor.shape[dim]
    if repeats > 1:
        if any(not torch.equal(shard, shards[index - index % repeats]) for index, shard in enumerate(shards)):
            return None
        shards = shards[::repeats]
    parts = tensor.tp_parts or (tensor.shape[dim],)
    pieces = [shard.split([part // len(shards) for part in parts], dim) for shard in shards]
    return torch.cat([piece[part] for part in range(len(parts)) for piece in pieces], dim)
