"""`megaplan.project`: from a measured run of a few devices to many."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from megaplan.api.load import LoadedJob, load
from megaplan.api.measured import measured_steps, measured_subject
from megaplan.api.search import search
from megaplan.budget.peaks import build_budget
from megaplan.diagnostics import refuse
from megaplan.layout.calibrate import calibrations
from megaplan.layout.step_time import planned_time
from megaplan.results import Result, Row
from megaplan.scalars import RecipeType
from megaplan.units import format_figure

if TYPE_CHECKING:
    from megaplan.exploration.engine import Progress
    from megaplan.spec.models import Spec

FORMAT = "megaplan.projection/1"
VARIED = ("schedule", "batch")
"""Settings that a search on more devices may change in addition to the mesh."""
MOST_POINTS = 24


@dataclass(frozen=True)
class ProjectedPoint:
    """The run on another number of devices.

    Attributes:
        devices: Devices.
        layout: `KEY=VALUE` texts of the keys that differ from the measured run.
        step_seconds: Seconds of a step, with the calibrated rates.
        low: Lower end of its 80 % interval.
        high: Upper end.
        tokens_per_second_per_device: Tokens of the step over seconds and devices.
        efficiency: The same relative to the efficiency of the calibrated model on the measured devices.
        peak_bytes: The largest peak of any rank.
        headroom_bytes: Usable bytes less the peak; negative if it does not fit.
    """

    devices: int
    layout: tuple[str, ...]
    step_seconds: float
    low: float
    high: float
    tokens_per_second_per_device: float
    efficiency: float
    peak_bytes: int
    headroom_bytes: int


@dataclass(frozen=True, repr=False)
class Projection(Result):
    """A measured run and its projection.

    Attributes:
        format: Format of the JSON document.
        name: Name of the measured spec or plan.
        device: Device.
        dtype: Dtype of the calibrated products.
        devices: Devices of the measured run.
        measured_seconds: Measured step.
        modelled_seconds: The same step by the calibrated model.
        share_before: Share of the peak that products reach by the constants.
        share: The same by the measured run.
        searched: True if the layout was searched at each number of devices; False if the data axis grew.
        points: Points in the requested order; a number of devices on which nothing fits has no point.
    """

    format: str
    name: str
    device: str
    dtype: str
    devices: int
    measured_seconds: float
    modelled_seconds: float
    share_before: float
    share: float
    searched: bool
    points: tuple[ProjectedPoint, ...]

    def _summary(self) -> Sequence[str]:
        measured = f"measured step {format_figure(self.measured_seconds)} s; modelled {format_figure(self.modelled_seconds)} s"
        how = "searched again at each size" if self.searched else "the data axis grows"
        return (f"{self.name}: {self.devices:,} x {self.device}", measured, how)

    def _rows(self) -> Sequence[Row]:
        return [
            {
                "devices": each.devices,
                "step_seconds": each.step_seconds,
                "tokens_per_second_per_device": each.tokens_per_second_per_device,
                "efficiency_share": each.efficiency,
                "peak_bytes": each.peak_bytes,
                "headroom_bytes": each.headroom_bytes,
                "layout": " ".join(each.layout),
            }
            for each in self.points
        ]


def project(
    metrics: str,
    to: Sequence[int],
    *,
    keep_layout: bool = False,
    processes: int | None = None,
    report: Callable[[Progress], None] = lambda _: None,
) -> Projection:
    """Project a measured run to other numbers of devices: it fixes the rates, and the plan is searched again at each number.

    The batch of a device stays: the global batch grows with the devices.

    Args:
        metrics: The folder that `megarun train --out` wrote, or JSON rows as `megaplan calibrate` reads them; the first row is projected.
        to: Numbers of devices, multiples of the measured run's.
        keep_layout: Grow the data axis alone, instead of a search.
        processes: Worker processes of a search.
        report: Callback for the progress of a search.

    Raises:
        MegaplanError: MP473, a number is not a multiple of the measured devices; MP487: the measured steps cannot be read. Also the errors
            of `megaplan.search`.

    Examples:
        >>> import json, megaplan, pathlib, tempfile
        >>> rows = pathlib.Path(tempfile.mkdtemp(), "rows.json")
        >>> _ = rows.write_text(json.dumps([{"spec": "plans/llama-3.1-8b.yaml", "step_seconds": 5.0}]))
        >>> [point.devices for point in megaplan.project(str(rows), (16, 32), keep_layout=True).points]
        [16, 32]
    """
    steps = measured_steps(metrics)
    source, changes = measured_subject(metrics)
    job = load(source, *changes)
    world = job.spec.mesh.world_size
    if wrong := [number for number in to if number < world or number % world]:
        raise refuse("MP473", f"{wrong[0]} devices, but the measured run has {world}", f"--to {2 * world},{4 * world}")
    if not to or len(to) > MOST_POINTS:
        raise refuse(
            "MP473", f"{len(to)} numbers of devices are given, but 1 to {MOST_POINTS} can be projected", f"--to {2 * world},{4 * world}"
        )
    own = next(each for each in calibrations(steps) if each.device == job.spec.device.name and each.dtype == steps[0].dtype)
    if own.dtype not in get_args(RecipeType):
        detail = f"the step was measured in {own.dtype}, but rates exist only for {', '.join(get_args(RecipeType))}"
        raise refuse("MP487", detail, "precision: {params: bf16}")
    calibrated = (f'device.reached={{"{own.dtype}": {own.after}}}', *([] if own.factor == 1 else [f"device.step_factor={own.factor}"]))
    modelled = steps[0].predict(own.after) * own.factor
    rate = job.spec.global_batch_tokens / world / modelled
    points = []
    for number in to:
        grown = _grown(job, number // world, calibrated)
        if not keep_layout:
            found = search(grown.spec.as_document(), devices=number, vary=VARIED, top=1, processes=processes, report=report)
            if found.best is None:
                continue
            grown = load(found.best.spec.as_document())
        points.append(_point(grown, job.spec, rate))
    name, device = job.spec.name, job.spec.device.name
    return Projection(
        FORMAT, name, device, own.dtype, world, steps[0].seconds, modelled, own.before, own.after, not keep_layout, tuple(points)
    )


def _grown(job: LoadedJob, factor: int, calibrated: tuple[str, ...]) -> LoadedJob:
    """The job with more ranks of data, on as many more devices of each type, and the measured rates."""
    pools = [pool.model_dump(mode="json", exclude_none=True) | {"count": pool.count * factor} for pool in job.spec.pools]
    counts = [f"pools={json.dumps(pools)}"] if pools else []
    return load(job, f"mesh.dp_shard={job.spec.mesh.dp_shard * factor}", *counts, *calibrated)


def _point(job: LoadedJob, before: Spec, rate: float) -> ProjectedPoint:
    spec, inventory, layout = job.spec, job.inventory, job.layout
    time = planned_time(spec, job.spans, inventory)
    if isinstance(time, str):
        raise refuse("MP471", f"the step of {spec.name} is not timed: {time}", "megaplan estimate SPEC")
    worst = build_budget(spec, inventory, layout).worst
    tokens = time.tokens_per_second_per_device
    return ProjectedPoint(
        *(spec.mesh.world_size, tuple(_differences(before, spec)), time.seconds, time.low, time.high, tokens, tokens / rate),
        *(worst.peak_bytes, worst.headroom_bytes),
    )


def _differences(before: Spec, after: Spec) -> list[str]:
    """Keys of the layout that another number of devices changes."""
    found = []
    for section in ("mesh", "schedule", "batch", "sharding"):
        old, new = (getattr(spec, section).model_dump(mode="json") for spec in (before, after))
        found += [f"{section}.{key}={_text(value)}" for key, value in new.items() if old.get(key) != value]
    return found


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
