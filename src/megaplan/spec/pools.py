"""Mixed pools: a pipeline whose stages lie on several types of devices, and its rules."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from megaplan.devices import device_names
from megaplan.errors import Diagnostic
from megaplan.schedules import MAX_REPLAYED
from megaplan.spec.context import Checked
from megaplan.spec.host import DeviceRef, device_of
from megaplan.spec.models import Spec
from megaplan.spec.pattern import BOUNDARY


class Part(NamedTuple):
    """Stages on one type of device.

    Attributes:
        spec: The spec with all stages on this device.
        ranks: Pipeline ranks of these stages.
    """

    spec: Spec
    ranks: range


def parts_of(spec: Spec) -> tuple[Part, ...]:
    """The stages of each type of device, in the order of the pipeline; one part with the spec itself without pools."""
    if not spec.pools:
        return (Part(spec, range(spec.mesh.pp)),)
    found, start, per_stage = [], 0, spec.mesh.world_size // spec.mesh.pp
    for (count, _), alone in zip(device_counts(spec, spec.mesh.world_size), alone_specs(spec), strict=True):
        stop = start + count // per_stage
        found.append(Part(alone, range(start, stop)))
        start = stop
    return tuple(found)


def device_counts(spec: Spec, world: int) -> list[tuple[int, DeviceRef]]:
    """Number of a job's devices of each type, in the order of the pipeline."""
    first = world - sum(pool.count for pool in spec.pools)
    return [(first, spec.device), *((pool.count, pool.device) for pool in spec.pools)]


def alone_specs(spec: Spec) -> list[Spec]:
    """The spec with all stages on each of its types of devices in turn, whatever its mesh."""
    return [spec.model_copy(update={"device": device, "pools": ()}) for _, device in device_counts(spec, 0)]


def spec_on(spec: Spec, pp_rank: int) -> Spec:
    """The spec with all stages on the device of one pipeline rank."""
    return next(part.spec for part in parts_of(spec) if pp_rank in part.ranks)


def joins_pools(spec: Spec) -> bool:
    """True if a boundary of the pipeline joins two types of devices, which are in different nodes."""
    return any(one.spec.device != other.spec.device for one, other in pairwise(parts_of(spec)))


def peak_flops(spec: Spec) -> int:
    """Dense FLOPs per second of all devices of the job in the dtype of the parameters."""
    per_stage, dtype = spec.mesh.world_size // spec.mesh.pp, spec.precision.params
    return sum(device_of(part.spec.device).peak_flops[dtype].value * len(part.ranks) * per_stage for part in parts_of(spec))


def uneven_pools(spec: Spec, world: int, pp: int) -> Iterator[tuple[str, str, str]]:
    """Key, detail and hint of each pool that does not hold whole stages of a mesh (MP509)."""
    per_stage, counted = world // pp, sum(pool.count for pool in spec.pools)
    for index, pool in enumerate(spec.pools):
        if pool.count % per_stage:
            detail = f"pools[{index}].count = {pool.count}, but a stage has {world} / {pp} = {per_stage} devices"
            yield f"pools[{index}].count", detail, f"count: {max(1, pool.count // per_stage) * per_stage}"
    if spec.pools and counted >= world:
        detail = f"the pools count {counted} devices, the mesh has {world}, of which at least {per_stage} must be of type `device`"
        yield "pools", detail, "count fewer devices, or raise mesh.pp"


def pool_rules(checked: Checked) -> Iterator[Diagnostic]:
    """Yields MP509 and MP510."""
    spec, mesh = checked.spec, checked.spec.mesh
    if not spec.pools:
        return
    for key, detail, hint in uneven_pools(spec, mesh.world_size, mesh.pp):
        yield checked.error("MP509", detail, key, hint, *(("pools: []",) if key == "pools" else ()))
    for index, pool in enumerate(spec.pools):
        if pool.device.name not in device_names():
            detail = f"pools[{index}].device.name = {pool.device.name}; the data file has {', '.join(device_names())}"
            yield checked.error("MP504", detail, f"pools[{index}].device.name", "megaplan devices")
    for key, reason in _unsupported(spec):
        yield checked.error("MP510", f"pools of {', '.join(pool.device.name for pool in spec.pools)}, and {reason}", key, "pools: []")


def _unsupported(spec: Spec) -> Iterator[tuple[str, str]]:
    if not spec.host.kind.trained:
        yield "host.name", f"host.name = {spec.host.kind.name}, which is estimated with one type of device"
    if spec.split.objective == "bottleneck" and spec.split.mode == "weighted" and BOUNDARY not in spec.model.pattern:
        yield "split.objective", "split.objective = bottleneck: layers have no one cost on several devices"
    if spec.num_copies > 1:
        yield "schedule.kind", f"schedule.kind = {spec.schedule.kind}, whose two copies of a stage would be on two types of devices"
    if spec.num_actions > MAX_REPLAYED:
        yield "schedule.num_microbatches", f"the schedule has {spec.num_actions:,} actions; at most {MAX_REPLAYED:,} are replayed"
    if spec.post_training is not None:
        yield "post_training", "post_training is given: its phases are on one device"
