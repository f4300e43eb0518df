"""Least squares with priors: constants to the logarithms of measured steps."""

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


class _Problem:
    """The least squares of some rows: residuals of their logarithms, and of the constants that they touch relative to the priors."""

    def __init__(self, rows: Sequence[Row]) -> None:
        known = priors()
        self.names = tuple(known)
        self.table = Table([step_of_row(row) for row in rows], self.names)
        self.free = np.flatnonzero(self.table.touches.any(0))
        self.base = np.log([known[name].value for name in self.names])
        self.spread = np.array([known[name].spread for name in self.names])
        most = np.array([np.log(min(known[name].most / known[name].value, np.e**3)) for name in self.names])
        self.upper = np.minimum(most[self.free] - 1e-9, 3.0)
        self.measured, self.weight = np.log([row["step_s"] for row in rows]), row_weights(rows)
        self._groups = colours(self.table.touches[:, self.free])

    def log_seconds(self, shifts: Array) -> Array:
        """Logarithms of the predicted seconds."""
        whole = np.zeros(len(self.names))
        whole[self.free] = shifts
        return np.log(self.table.seconds(self.base + whole))

    def residuals(self, shifts: Array) -> Array:
        """Softened errors of the rows, then shifts over spreads."""
        errors = softened((self.log_seconds(shifts) - self.measured) / SIGMA * self.weight)
        return np.concatenate([errors, shifts / self.spread[self.free]])

    def jacobian(self, shifts: Array) -> Array:
        """Derivatives of the residuals."""
        rows, free = len(self.measured), len(self.free)
        found = np.zeros((rows + free, free))
        at = self.log_seconds(shifts)
        errors = (at - self.measured) / SIGMA * self.weight
        slope = np.where(np.abs(errors) < 1e-6, 1.0, np.abs(errors) / np.maximum(np.abs(softened(errors)), 1e-12) / np.sqrt(1 + errors**2))
        for group in self._groups:
            moved = shifts.copy()
            moved[group] += STEP
            change = (self.log_seconds(moved) - at) / STEP * self.weight / SIGMA * slope
            for column in group:
                found[:rows, column] = np.where(self.table.touches[:, self.free[column]], change, 0.0)
        found[rows + np.arange(free), np.arange(free)] = 1 / self.spread[self.free]
        return found


def fit(rows: Sequence[Row], max_steps: int = 100, near: Fit | None = None) -> Fit:
    """Fit every constant that the rows touch; the others stay at their priors. `near`: a fit whose constants the search starts from."""
    problem = _Problem(rows)
    free, names = problem.free, problem.names
    start = np.minimum(np.zeros(len(free)) if near is None else near.shifts[free], problem.upper - 1e-6)
    bounds = (-3.0, problem.upper)
    done = least_squares(problem.residuals, start, problem.jacobian, bounds=bounds, max_nfev=max_steps, x_scale=problem.spread[free])
    shifts, spreads = np.zeros(len(names)), problem.spread.copy()
    shifts[free] = done.x
    spreads[free] = np.sqrt(np.diag(np.linalg.inv(done.jac.T @ done.jac)))
    return Fit(names, shifts, spreads, problem.table.touches.sum(0))


REFITS = 4
"""Steps of a fit without a few rows; its derivatives are those of the fit to all rows."""


def left_out(found: Fit, rows: Sequence[Row], groups: Sequence[Sequence[int]]) -> Array:
    """Predicted seconds of every row by constants without the rows of its group: Gauss-Newton steps from the fit to all rows.

    Args:
        found: The fit to all rows.
        rows: The rows.
        groups: Numbers of the rows that are left out together; every row is in one group.
    """
    problem = _Problem(rows)
    start, seconds = found.shifts[problem.free], np.zeros(len(rows))
    slopes = problem.jacobian(start)
    for numbers in groups:
        kept = np.ones(len(slopes), bool)
        kept[list(numbers)] = False
        own = slopes[kept]
        inverse, shifts = np.linalg.inv(own.T @ own), start
        for _ in range(REFITS):
            shifts = np.clip(shifts - inverse @ (own.T @ problem.residuals(shifts)[kept]), -3.0, problem.upper)
        seconds[list(numbers)] = np.exp(problem.log_seconds(shifts))[list(numbers)]
    return seconds


def predict(found: Fit, rows: Sequence[Row]) -> Array:
    """Predicted seconds of rows."""
    return Table([step_of_row(row) for row in rows], found.names).seconds(found.logs(priors()))
