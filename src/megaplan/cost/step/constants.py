"""The fitted constants (`constants.json`): value, spread, basis and source of each."""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from megaplan.columns import Basis
from megaplan.devices import device_names, load_device

DATA = Path(__file__).with_name("constants.json")


class Constant(NamedTuple):
    """One constant of the step-time model.

    Attributes:
        value: Value in `unit`.
        spread: Standard deviation of the logarithm after the fit: 0.1 is about 10 %.
        unit: seconds, rows, share or factor.
        basis: fitted if measured steps depend on it, modelled if it has the value of its prior.
        source: Source of the prior, and the number of rows that depend on the constant.
    """

    value: float
    spread: float
    unit: str
    basis: Basis
    source: str


@cache
def _document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


@cache
def constants() -> dict[str, Constant]:
    """Every constant by name."""
    return {
        name: Constant(record["value"], record["spread"], record["unit"], Basis(record["basis"]), record["source"])
        for name, record in _document()["constants"].items()
    }


@cache
def values() -> dict[str, float]:
    """Every constant's value by name."""
    return {name: constant.value for name, constant in constants().items()}


@cache
def rated_as(device: str, generation: str) -> str:
    """The device whose shares of the peak apply: this one, or the first of its generation if no constant names this one."""
    known = (name for name in device_names() if f"clock.{name}" in constants() and load_device(name).generation == generation)
    return device if f"clock.{device}" in constants() else next(known, device)


@cache
def fitted_tuples() -> tuple[tuple[str, ...], ...]:
    """The combinations of the rows of the fit, with the fields of `fitted.FittedTuple`."""
    return tuple(tuple(each) for each in _document()["tuples"])


@cache
def intervals() -> dict[str, tuple[float, float]]:
    """The 10 % and 90 % quantiles of measured over predicted time, by class of step (`fitted.interval_class`).

    Rows of a fitted combination are predicted without their group of framework, model and device; rows outside by constants that are
    fitted without their combination, device or framework.
    """
    return {name: (low, high) for name, (low, high) in _document()["intervals"].items()}
