"""What a device's products reach, from measured steps of the user's own: one share a dtype, with the fitted one as prior."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log

from megaplan.cost.step.predict import predict_step, reached_share
from megaplan.cost.step.workload import StepWorkload

SIGMA = 0.05
"""Spread of a measured step's logarithm: what `benchmarks/step_times/fitting.py` takes."""
UNMEASURED = 0.15
"""Spread of a share that no measured step moved: the interval of an uncalibrated time."""
MOST, REACH, HALVINGS = 0.95, 0.9, 60


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step that was timed, and what it ran."""

    name: str
    work: StepWorkload
    seconds: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Of one device and dtype.

    Attributes:
        device: Its name.
        dtype: The recipe's.
        before: Share of the peak that the constants say.
        after: Share that the measured steps say.
        spread: Standard deviation of its logarithm.
        residuals: (name, error with `before`, error with `after`) of each step, predicted over measured less 1.
    """

    device: str
    dtype: str
    before: float
    after: float
    spread: float
    residuals: tuple[tuple[str, float, float], ...]


def calibrations(steps: Sequence[MeasuredStep]) -> tuple[Calibration, ...]:
    """One for each device and dtype among the steps, in their order."""
    groups: dict[tuple[str, str], list[MeasuredStep]] = {}
    for step in steps:
        groups.setdefault((step.work.machine.name, step.work.software.dtype), []).append(step)
    return tuple(_calibration(device, dtype, group) for (device, dtype), group in groups.items())


def _calibration(device: str, dtype: str, steps: Sequence[MeasuredStep]) -> Calibration:
    before, spread, measured = reached_share(steps[0].work.machine, dtype)
    prior = spread if measured else UNMEASURED

    def cost(shift: float) -> float:
        share = before * exp(shift)
        return sum((log(_seconds(step, share) / step.seconds) / SIGMA) ** 2 for step in steps) + (shift / prior) ** 2

    shift = _least(cost, -REACH, min(REACH, log(MOST / before)))
    slopes = [log(_seconds(step, before * exp(shift + 0.01)) / _seconds(step, before * exp(shift - 0.01))) / 0.02 for step in steps]
    after = before * exp(shift)
    residuals = tuple((step.name, _seconds(step, before) / step.seconds - 1, _seconds(step, after) / step.seconds - 1) for step in steps)
    narrowed = (sum((slope / SIGMA) ** 2 for slope in slopes) + prior**-2) ** -0.5
    return Calibration(device, dtype, before, after, narrowed, residuals)


def _seconds(step: MeasuredStep, share: float) -> float:
    machine = replace(step.work.machine, reached={step.work.software.dtype: share})
    return predict_step(replace(step.work, machine=machine)).seconds


def _least(cost: Callable[[float], float], low: float, high: float) -> float:
    """Where a cost with one minimum has it, by golden sections."""
    ratio = (5**0.5 - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = cost(left), cost(right)
    for _ in range(HALVINGS):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = cost(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = cost(right)
    return (low + high) / 2
