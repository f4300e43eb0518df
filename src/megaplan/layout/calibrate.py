"""Shares of a device's peaks that products reach, from the user's own measured steps: one per dtype, with the model's share as prior.

If the device's products are known but no fitted row has the combination of framework and launch, a factor of the whole step is fitted too,
with a prior as wide as the interval of such steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log
from typing import TYPE_CHECKING, NamedTuple

from megaplan.layout.build import Spans
from megaplan.layout.step_time import NS, interval_of, planned_time, step_to_time
from megaplan.spec.models import Spec

if TYPE_CHECKING:
    from megaplan.cost.step.predict import StepTime
    from megaplan.cost.step.workload import TimedStep

SIGMA = 0.04
"""Spread of a measured step's logarithm, as in `benchmarks/step_times/fitting.py`."""
UNMEASURED = 0.15
"""Spread of a share without measured steps: the interval of an uncalibrated time."""
MOST, REACH, SECTIONS = 0.95, 0.9, 28
MIDDLE = 2.563
"""Width of the middle 80 % of a normal distribution, in its standard deviations."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A timed step, and its model.

    Attributes:
        name: Name in tables.
        host: Name of the host.
        device: Name of the device.
        dtype: Dtype of the recipe.
        seconds: Measured seconds.
        modelled: Seconds without calibration.
        predict: Seconds as a function of the share of the peak that large products reach.
        terms: The modelled seconds by term, as in an estimate.
        share: Share of the uncalibrated model.
        spread: Standard deviation of its logarithm.
        factor_spread: Standard deviation of the logarithm of a factor of the whole step; 0 if the constants know such steps.
    """

    name: str
    host: str
    device: str
    dtype: str
    seconds: float
    modelled: float
    predict: Callable[[float], float]
    terms: Callable[[float], dict[str, float]]
    share: float
    spread: float
    factor_spread: float = 0.0


def measured_step(name: str, spec: Spec, spans: Spans, seconds: float) -> MeasuredStep | str:
    """The timed step of a spec; or the reason that its time cannot be modelled."""
    if spec.host.kind.trained:
        return _replayed_step(name, spec, spans, seconds)
    work = step_to_time(spec, spans)
    return work if isinstance(work, str) else _fitted_step(name, spec.host.kind.name, work, seconds)


def _fitted_step(name: str, host: str, work: TimedStep, seconds: float) -> MeasuredStep:
    from megaplan.cost.step.constants import intervals  # noqa: PLC0415  (a replayed step needs none of these)
    from megaplan.cost.step.predict import predict_step, reached_share  # noqa: PLC0415

    dtype = work.software.dtype

    @cache
    def timed(share: float) -> StepTime:
        return predict_step(replace(work, machine=replace(work.machine, reached={dtype: share})))

    def predict(share: float) -> float:
        return timed(share).seconds

    def terms(share: float) -> dict[str, float]:
        return timed(share).terms

    before, spread, measured = reached_share(work.machine, dtype)
    wide = spread if measured else UNMEASURED
    interval, missing = interval_of(work)
    low, high = intervals()[interval]
    of_step = log(high / low) / MIDDLE if measured and missing else 0.0
    return MeasuredStep(name, host, work.machine.name, dtype, seconds, predict(before), predict, terms, before, wide, of_step)


def _replayed_step(name: str, spec: Spec, spans: Spans, seconds: float) -> MeasuredStep | str:
    """A step of megarun, whose linears reach a percentage by letter: its share is the one with the same time as these percentages."""
    from megaplan.cost.pools import timer_of  # noqa: PLC0415
    from megaplan.inventory.build import build_inventory  # noqa: PLC0415

    inventory, dtype = build_inventory(spec), str(spec.precision.params)
    time = planned_time(spec, spans, inventory)
    if isinstance(time, str):
        return time

    def reaching(share: float) -> Spec:
        return spec.model_copy(update={"device": spec.device.model_copy(update={"reached": {dtype: share}})})

    @cache
    def predict(share: float) -> float:
        changed = reaching(share)
        return timer_of(changed, inventory).step_ns(changed, spans) * NS

    def terms(share: float) -> dict[str, float]:
        found = planned_time(reaching(share), spans, inventory)
        return {} if isinstance(found, str) else found.terms

    share = exp(_least(lambda at: log(predict(exp(at)) / time.seconds) ** 2, log(0.05), 0.0))
    return MeasuredStep(name, spec.host.kind.name, spec.device.name, dtype, seconds, time.seconds, predict, terms, share, UNMEASURED)


class TermTime(NamedTuple):
    """Modelled time of one term of a measured step.

    Attributes:
        before: Seconds with the share of the constants.
        after: Seconds with the share of the measured steps.
        factor: Factor of this term alone that would make the model equal the measured step; None if no factor does.
    """

    before: float
    after: float
    factor: float | None


class Residual(NamedTuple):
    """Error of the model for a measured step.

    Attributes:
        name: Name of the step.
        before: Predicted over measured less 1, with the share of the constants.
        after: The same with the share of the measured steps.
        terms: Terms of the modelled step, by name.
    """

    name: str
    before: float
    after: float
    terms: dict[str, TermTime]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Calibration of one device and dtype.

    Attributes:
        device: Name of the device.
        dtype: Dtype of the recipe.
        before: Share of the peak by the constants.
        after: Share by the measured steps.
        spread: Standard deviation of its logarithm.
        factor: Factor of whole steps on the device with the framework of the steps; 1 if the constants know such steps.
        host: Host of the steps.
        residuals: Residual of each step.
    """

    device: str
    dtype: str
    before: float
    after: float
    spread: float
    factor: float
    host: str
    residuals: tuple[Residual, ...]


def calibrations(steps: Sequence[MeasuredStep]) -> tuple[Calibration, ...]:
    """One calibration for each device and dtype among the steps, in their order."""
    groups: dict[tuple[str, str], list[MeasuredStep]] = {}
    for step in steps:
        groups.setdefault((step.device, step.dtype), []).append(step)
    return tuple(_calibration(device, dtype, group) for (device, dtype), group in groups.items())


def _calibration(device: str, dtype: str, steps: Sequence[MeasuredStep]) -> Calibration:
    before = exp(sum(log(step.share) for step in steps) / len(steps))
    prior, of_step = max(step.spread for step in steps), max(step.factor_spread for step in steps)

    def slower(share: float) -> float:
        """Logarithm of the factor that is most likely with a share."""
        if not of_step:
            return 0.0
        left = [log(step.seconds / step.predict(share)) for step in steps]
        return sum(left) / SIGMA**2 / (len(left) / SIGMA**2 + of_step**-2)

    def cost(shift: float) -> float:
        share = before * exp(shift)
        factor = slower(share)
        of_steps = sum(((log(step.predict(share) / step.seconds) + factor) / SIGMA) ** 2 for step in steps)
        return of_steps + (shift / prior) ** 2 + ((factor / of_step) ** 2 if of_step else 0.0)

    shift = _least(cost, -REACH, min(REACH, log(MOST / before)))
    slopes = [log(step.predict(before * exp(shift + 0.01)) / step.predict(before * exp(shift - 0.01))) / 0.02 for step in steps]
    after = before * exp(shift)
    factor = exp(slower(after))
    residuals = tuple(_residual(step, after, factor) for step in steps)
    narrowed = (sum((slope / SIGMA) ** 2 for slope in slopes) + prior**-2) ** -0.5
    return Calibration(device, dtype, before, after, narrowed, factor, steps[0].host, residuals)


def _residual(step: MeasuredStep, after: float, factor: float) -> Residual:
    modelled = step.predict(after) * factor
    before, now = step.terms(step.share), {name: seconds * factor for name, seconds in step.terms(after).items()}
    terms = {}
    for name, seconds in now.items():
        needed = seconds + step.seconds - modelled
        terms[name] = TermTime(before.get(name, 0.0), seconds, needed / seconds if seconds > 0 and needed > 0 else None)
    return Residual(step.name, step.modelled / step.seconds - 1, modelled / step.seconds - 1, terms)


def _least(cost: Callable[[float], float], low: float, high: float) -> float:
    """Position of the minimum of a unimodal cost, by golden sections."""
    ratio = (5**0.5 - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = cost(left), cost(right)
    for _ in range(SECTIONS):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = cost(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = cost(right)
    return (low + high) / 2
