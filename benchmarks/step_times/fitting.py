"""Least squares with priors: constants to the logarithms of measured steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from step_times.priors import Prior, priors
from step_times.rows import Row, step_of_row
from step_times.table import Table

Array = NDArray[np.float64]
SIGMA = 0.04
"""Spread of a row's logarithm that costs as much as one spread of a prior: between what one release and two releases differ by."""
STEP = 1e-4


@dataclass(frozen=True)
class Fit:
    """Logarithms of the constants relative to their priors, in the order of `names`, and the spreads of the priors."""

    names: tuple[str, ...]
    shifts: Array
    spreads: Array
    touched: NDArray[Any]

    def logs(self, known: dict[str, Prior]) -> Array:
        """Logarithms of the constants."""
        return np.log([known[name].value for name in self.names]) + self.shifts


def cluster(row: Row) -> tuple[str, ...]:
    """Rows that repeat one another: their weight is that of the square root of their number."""
    return (row["framework"], row["model"], row["device"], row["precision"])


def row_weights(rows: Sequence[Row]) -> Array:
    """Weights of mean square 1."""
    count = Counter(map(cluster, rows))
    found = np.array([count[cluster(row)] ** -0.5 for row in rows])
    return found / np.sqrt((found**2).mean())


def softened(errors: Array) -> Array:
    """Pseudo-Huber: quadratic up to about one spread, linear beyond."""
    return np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))


def colours(touches: NDArray[np.bool_]) -> list[list[int]]:
    """Constants in groups of which no two touch one row: one evaluation gives the derivatives of a group."""
    groups: list[list[int]] = []
    taken: list[NDArray[np.bool_]] = []
    for column in np.argsort(-touches.sum(0), kind="stable"):
        rows = touches[:, column]
        for number, used in enumerate(taken):
            if not (used & rows).any():
                groups[number].append(int(column))
                taken[number] = used | rows
                break
        else:
            groups.append([int(column)])
            taken.append(rows.copy())
    return groups


def fit(rows: Sequence[Row], max_steps: int = 100, near: Fit | None = None) -> Fit:
    """Fit every constant that the rows touch; the others stay at their priors. `near`: a fit whose constants the search starts from."""
    known = priors()
    names = tuple(known)
    table = Table([step_of_row(row) for row in rows], names)
    free = np.flatnonzero(table.touches.any(0))
    base = np.log([known[name].value for name in names])
    spread = np.array([known[name].spread for name in names])
    most = np.array([np.log(min(known[name].most / known[name].value, np.e**3)) for name in names])
    measured, weight = np.log([row["step_s"] for row in rows]), row_weights(rows)
    groups = colours(table.touches[:, free])

    def log_seconds(shifts: Array) -> Array:
        whole = np.zeros(len(names))
        whole[free] = shifts
        return np.log(table.seconds(base + whole))

    def residuals(shifts: Array) -> Array:
        errors = softened((log_seconds(shifts) - measured) / SIGMA * weight)
        return np.concatenate([errors, shifts / spread[free]])

    def jacobian(shifts: Array) -> Array:
        found = np.zeros((len(rows) + len(free), len(free)))
        at = log_seconds(shifts)
        errors = (at - measured) / SIGMA * weight
        slope = np.where(np.abs(errors) < 1e-6, 1.0, np.abs(errors) / np.maximum(np.abs(softened(errors)), 1e-12) / np.sqrt(1 + errors**2))
        for group in groups:
            moved = shifts.copy()
            moved[group] += STEP
            change = (log_seconds(moved) - at) / STEP * weight / SIGMA * slope
            for column in group:
                found[: len(rows), column] = np.where(table.touches[:, free[column]], change, 0.0)
        found[len(rows) + np.arange(len(free)), np.arange(len(free))] = 1 / spread[free]
        return found

    upper = np.minimum(most[free] - 1e-9, 3.0)
    start = np.minimum(np.zeros(len(free)) if near is None else near.shifts[free], upper - 1e-6)
    done = least_squares(residuals, start, jacobian, bounds=(-3.0, upper), max_nfev=max_steps, x_scale=spread[free])
    shifts, spreads = np.zeros(len(names)), spread.copy()
    shifts[free] = done.x
    spreads[free] = np.sqrt(np.diag(np.linalg.inv(done.jac.T @ done.jac)))
    return Fit(names, shifts, spreads, table.touches.sum(0))


def predict(found: Fit, rows: Sequence[Row]) -> Array:
    """Predicted seconds of rows."""
    return Table([step_of_row(row) for row in rows], found.names).seconds(found.logs(priors()))
