"""Decision if a step of megarun counts as measured: everything that it runs has constants from profiled steps, in the same mode."""

from __future__ import annotations

from typing import NamedTuple

from megaplan.columns import Basis
from megaplan.cost.replay import ReplayTimer
from megaplan.measured.constants import measured
from megaplan.spec.models import Spec
from megaplan.spec.step_graphs import replays_graphs

UNCALIBRATED = "uncalibrated"
GIVEN = ("efficiency_percent", "launch_ns", "recurrence_step_ns", "reached", "memory_bytes_per_second", "peak_flops")
"""Keys of the device by which a spec replaces measured rates."""


class TimeBasis(NamedTuple):
    """Basis of a step's time.

    Attributes:
        basis: Measured, or modelled.
        calibration: The measurement: device, dtype, host, mode and ranks; or `uncalibrated`.
        interval: Ratios of the time: a tenth of steps is below the first, a tenth above the second; None without profiled steps.
        reason: Reason that it is not measured, for a device that has constants.
    """

    basis: Basis
    calibration: str
    interval: tuple[float, float] | None
    reason: str | None = None


def time_basis(spec: Spec, timer: ReplayTimer) -> TimeBasis:
    """The basis of the time of a step."""
    found = measured(spec.device.name) if spec.host.uses_triton else None
    if found is None:
        return TimeBasis(Basis.MODELLED, UNCALIBRATED, None)
    reason = _reason(spec, timer)
    if reason is not None:
        return TimeBasis(Basis.MODELLED, UNCALIBRATED, None, reason)
    return TimeBasis(Basis.MEASURED, f"{found.device}, {dtype_of(spec)}, megarun, {mode_of(spec)}, one rank", found.interval)


def dtype_of(spec: Spec) -> str:
    """Dtype in which linears multiply: the recipe, or the dtype of the parameters."""
    return spec.precision.params.value if spec.precision.recipe is None else spec.precision.recipe.name


def mode_of(spec: Spec) -> str:
    """The way in which the host launches a step's kernels."""
    return "CUDA graphs" if replays_graphs(spec) else "eager"


def _reason(spec: Spec, timer: ReplayTimer) -> str | None:
    """Reason that a step of a device with constants is not measured; None if it is."""
    found, section = measured(spec.device.name), spec.device
    assert found is not None
    if spec.mesh.world_size > 1:
        return "one rank was measured"
    if dtype_of(spec) not in found.dtypes:
        return f"{', '.join(found.dtypes)} were measured"
    if any(getattr(section, key) not in (None, {}) for key in GIVEN):
        return "the spec gives rates of its own"
    if mode_of(spec) not in found.modes:
        return f"{' and '.join(found.modes)} steps were measured"
    kinds, known = timer.kinds_seen(spec), {*found.shares, *found.steps_ns}
    if kinds - known:
        return f"{_names(kinds - known)} not measured"
    from megaplan.cost.kinds import changed_kinds  # noqa: PLC0415  (it counts specs of its own)

    later = kinds & changed_kinds(spec.device.name)
    return f"{_names(later)} changed since measured" if later else None


def _names(kinds: set[str]) -> str:
    return ", ".join(sorted(kinds))
