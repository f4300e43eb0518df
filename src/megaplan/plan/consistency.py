"""Checks that a plan's parts follow from each other: decisions from inputs and cuts, sums within the estimates."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from megaplan.columns import Column
from megaplan.errors import Diagnostic, Location, Severity
from megaplan.layout.build import span_problems
from megaplan.layout.ranks import rank_coordinate
from megaplan.partition.values import bottleneck
from megaplan.plan import problems
from megaplan.plan.canonical import normalise
from megaplan.plan.decide import decisions_record
from megaplan.plan.digests import model_digest
from megaplan.plan.document import DeviceFigures, PlanDocument, RankEstimate
from megaplan.plan.inputs import inputs_record
from megaplan.spec.document import KeyPath
from megaplan.spec.mesh_rules import MAX_WORLD_SIZE
from megaplan.spec.pattern import parse_pattern
from megaplan.spec.pools import parts_of
from megaplan.spec.rules import check_rules

At = Callable[[Sequence[str | int]], Location]


def shape_problems(plan: PlanDocument, at: At) -> list[Diagnostic]:
    """Errors that no command can handle, not even `check` and `diff`: layers beyond the model, ranks without number, other columns."""
    num_layers, columns = plan.spec.model.num_layers, {column.key for column in Column}
    found = []
    for index, stage in enumerate(plan.decisions.stages):
        if stage.layers[1] > num_layers:
            detail = f"stage {index} stops at layer {stage.layers[1]}, and model.num_layers = {num_layers}"
            found.append(problems.contradiction(detail, at(("decisions", "stages", index, "layers"))))
    for index, rank in enumerate(plan.estimates.ranks):
        if set(rank.columns) != columns:
            wrong = ", ".join(sorted(set(rank.columns) ^ columns))
            detail = f"{rank.label}: missing or unknown columns: {problems.shortened(wrong)}"
            found.append(problems.contradiction(detail, at(("estimates", "ranks", index, "columns"))))
    total = sum(max(0, stop - start) for rank in plan.estimates.ranks for start, stop in rank.ranks)
    if total > MAX_WORLD_SIZE:
        detail = f"the estimates name {total:,} ranks, and a job has at most {MAX_WORLD_SIZE:,}"
        found.append(problems.contradiction(detail, at(("estimates", "ranks"))))
    return found


def rule_errors(plan: PlanDocument, at: At) -> list[Diagnostic]:
    """The rules of specs that the plan's inputs break; such a plan is invalid."""
    return [found for found in check_rules(plan.spec, lambda key: at(_input_path(key))) if found.severity is Severity.ERROR]


def contradictions(plan: PlanDocument, at: At) -> list[Diagnostic]:
    """Every part of `plan` that does not follow from the others.

    Args:
        plan: A plan whose fields are valid individually.
        at: Position of a key path in its file.
    """
    found = list(_inputs_normal(plan, at)) + list(_cuts(plan, at))
    if not found:
        found = [*_decisions(plan, at), *_certificate(plan, at)]
    return found + list(_estimates(plan, at))


def _input_path(key: str) -> KeyPath:
    """`split.spans[0][1]` as a path below `inputs`."""
    steps = re.findall(r"[^.\[\]]+", key)
    return ("inputs", *(int(step) if step.isdigit() else step for step in steps))


def _inputs_normal(plan: PlanDocument, at: At) -> Iterator[Diagnostic]:
    expected = inputs_record(plan.spec)
    for path, written, wanted in _differences(plan.inputs, expected):
        key = ("inputs", *path)
        yield problems.contradiction(f"{problems.dotted(key)} = {written}, whose normal form is {wanted}", at(key))


def _cuts(plan: PlanDocument, at: At) -> Iterator[Diagnostic]:
    """The spans must tile the layers, in order, without an empty slot, one for each slot of the mesh."""
    mesh = plan.spec.mesh
    for found in span_problems(plan.spans, plan.spec.model.num_layers, mesh.pp, mesh.vpp, may_be_empty=plan.spec.host.kind.empty_slots):
        yield problems.contradiction(found.detail, at(("decisions", "stages")))


def _decisions(plan: PlanDocument, at: At) -> Iterator[Diagnostic]:
    letters = "".join(parse_pattern(plan.spec.model.pattern, plan.spec.model.num_layers).layers)
    written = plan.decisions.model_dump(mode="json")
    derived = normalise(decisions_record(plan.spec, letters, plan.layout(), written["split"]))
    for path, found, wanted in _differences(written, derived):
        key = ("decisions", *path)
        yield problems.contradiction(f"{problems.dotted(key)} = {found}; the inputs and cuts give {wanted}", at(key))
    computed = model_digest(plan.spec, letters)
    if computed != plan.digests.model:
        yield problems.digest_mismatch(plan.digests.model, computed, at(("digests", "model")))


def _certificate(plan: PlanDocument, at: At) -> Iterator[Diagnostic]:
    """Checks the certificate's own arithmetic; only planning again can check its bound (`megaplan check`)."""
    certificate, num_slots = plan.decisions.split.certificate, len(plan.spans)
    here: KeyPath = ("decisions", "split", "certificate")
    if plan.decisions.split.costs is not None and certificate.unit != "ns":
        yield problems.contradiction(f"unit = {certificate.unit}, and the cuts were weighed by a costs file, in ns", at((*here, "unit")))
    if len(certificate.costs) != num_slots:
        yield problems.contradiction(f"{len(certificate.costs)} costs, and the model has {num_slots} parts", at((*here, "costs")))
    elif certificate.objective == "bottleneck":
        measures, value = bottleneck(plan.decisions.schedule.placement, certificate.costs)
        if (certificate.measures, certificate.value) != (measures, value):
            detail = f"value = {certificate.value} of a {certificate.measures}; by the costs the largest {measures} has {value}"
            yield problems.contradiction(detail, at((*here, "value")))
    elif certificate.measures != "step":
        yield problems.contradiction(f"measures = {certificate.measures} for {certificate.objective}", at((*here, "measures")))
    gap = certificate.value - certificate.lower_bound
    if certificate.gap != gap or certificate.optimal != (gap == 0):
        detail = f"gap = {certificate.gap}, optimal = {str(certificate.optimal).lower()}; value − lower_bound = {gap}"
        yield problems.contradiction(detail, at((*here, "gap")))


def _estimates(plan: PlanDocument, at: At) -> Iterator[Diagnostic]:
    estimates = plan.estimates
    yield from _device(estimates.device, ("estimates", "device"), at)
    here: KeyPath
    for index, pool in enumerate(estimates.device.pools):
        yield from _device(pool, ("estimates", "device", "pools", index), at)
    if [stage.slot for stage in estimates.stages] != list(range(len(plan.decisions.stages))):
        yield problems.contradiction("the estimates' stages are not the slots of the plan, each once", at(("estimates", "stages")))
    for index, rank in enumerate(estimates.ranks):
        here = ("estimates", "ranks", index)
        for detail in _rank_sums(rank, estimates.device.of_rank(rank.ranks[0][0] if rank.ranks else 0).usable_bytes):
            yield problems.contradiction(f"{rank.label}: {detail}", at(here))
    if estimates.fits != all(rank.fits for rank in estimates.ranks):
        yield problems.contradiction(
            f"estimates.fits = {str(estimates.fits).lower()}, but the ranks say otherwise", at(("estimates", "fits"))
        )
    mesh, world_size = plan.spec.mesh, plan.spec.mesh.world_size
    planned = [(part.ranks.start * (world_size // mesh.pp), part.spec.device.name) for part in parts_of(plan.spec) if plan.spec.pools]
    if (named := [(pool.ranks[0], pool.name) for pool in estimates.device.pools]) != planned:
        yield problems.contradiction(f"devices from rank: {named}; by the inputs {planned}", at(("estimates", "device", "pools")))
    if not _tiled((run for entry in estimates.ranks for run in entry.ranks), world_size):
        detail = f"the estimates' ranks are not the {world_size} ranks of the mesh, each once"
        yield problems.contradiction(detail, at(("estimates", "ranks")))
        return
    for index, rank in enumerate(estimates.ranks):
        first = rank.ranks[0][0] if rank.ranks else 0
        for axis, written, wanted in _differences(rank.coordinate, rank_coordinate(mesh, first)):
            here = ("estimates", "ranks", index, "coordinate", *axis)
            yield problems.contradiction(f"{problems.dotted(here)} = {written}; rank {first} of the mesh has {wanted}", at(here))


def _device(device: DeviceFigures, here: KeyPath, at: At) -> Iterator[Diagnostic]:
    usable, total = device.capacity_bytes - device.reserve_bytes, sum(device.reserve.values())
    if device.usable_bytes != usable:
        yield problems.contradiction(f"usable_bytes = {device.usable_bytes}; capacity − reserve = {usable}", at(here))
    if device.reserve_bytes != total:
        yield problems.contradiction(f"reserve_bytes = {device.reserve_bytes}; its items sum to {total}", at(here))


def _tiled(runs: Iterable[tuple[int, int]], stop: int) -> bool:
    """True if the half-open runs cover [0, stop) once. Runs are never expanded: a forged one may have any length."""
    reached = 0
    for start, end in sorted(runs):
        if start != reached or end <= start:
            return False
        reached = end
    return reached == stop


def _rank_sums(rank: RankEstimate, usable_bytes: int) -> Iterator[str]:
    total = sum(rank.columns.values())
    if total != rank.peak_bytes:
        yield f"peak_bytes = {rank.peak_bytes}; its columns sum to {total}"
    highest = max(rank.phases.values(), default=0)
    if highest != rank.peak_bytes or rank.phases.get(rank.peak_phase) != rank.peak_bytes:
        yield f"peak_bytes = {rank.peak_bytes} at {rank.peak_phase}; the highest phase has {highest}"
    if rank.headroom_bytes != usable_bytes - rank.peak_bytes:
        yield f"headroom_bytes = {rank.headroom_bytes}; usable − peak = {usable_bytes - rank.peak_bytes}"
    if rank.fits != (rank.headroom_bytes >= 0):
        yield f"fits = {str(rank.fits).lower()}, but its headroom is {rank.headroom_bytes} bytes"


def _differences(written: Any, wanted: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str, str]]:
    """Leaves that differ between two JSON values: path, and both values as text."""
    if isinstance(written, dict) and isinstance(wanted, dict):
        for key in sorted(written.keys() | wanted.keys()):
            yield from _differences(written.get(key, _ABSENT), wanted.get(key, _ABSENT), (*path, key))
    elif isinstance(written, list) and isinstance(wanted, list) and len(written) == len(wanted):
        for index, (left, right) in enumerate(zip(written, wanted, strict=True)):
            yield from _differences(left, right, (*path, index))
    elif written != wanted:
        yield path, problems.shortened(repr(written)), problems.shortened(repr(wanted))


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()
