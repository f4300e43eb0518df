"""Response lengths as a distribution: log-normal, or a log-normal through each pair of given percentiles, cut at the limit."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from math import exp, log
from statistics import NormalDist

from megaplan.spec.post_training import ResponseLengths

SPREAD = 0.6
"""Standard deviation of the logarithm if the spec gives only one number."""
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
GRID = 512
BISECTIONS = 60
WIDEST = 4.0
SHORTEST = 1.0


class Lengths:
    """Response lengths of a spec.

    Args:
        given: Numbers of the spec, checked.
        limit: Tokens at which a response is cut.
    """

    def __init__(self, given: ResponseLengths, limit: int) -> None:
        self.limit = limit
        points = [(NormalDist().inv_cdf(share), log(value)) for name, share in PERCENTILES.items() if (value := getattr(given, name))]
        mean = given.mean
        if mean is None:
            line = points if len(points) > 1 else [points[0], (points[0][0] + 1, points[0][1] + SPREAD)]
            self._log_at = _through(line)
        elif points:
            z, at = points[0]
            spread = _solve(lambda spread: self._mean_of(at - z * spread, spread) - mean, 0.01, WIDEST)
            self._log_at = _line(at - z * spread, spread)
        else:
            self._log_at = _line(_solve(lambda middle: self._mean_of(middle, SPREAD) - mean, 0.0, log(limit) + 4 * SPREAD), SPREAD)
        sample = self.quantiles(GRID)
        self.mean, self.mean_square = sum(sample) / GRID, sum(length * length for length in sample) / GRID

    def quantiles(self, count: int) -> list[float]:
        """`count` ascending lengths that represent `count` responses."""
        return [self._cut(self._log_at(z)) for z in _normals(count)]

    def longest(self, count: int) -> float:
        """The median of the longest of `count` responses."""
        return self._cut(self._log_at(NormalDist().inv_cdf(0.5 ** (1 / count))))

    def at(self, share: float) -> float:
        """The length that this share of responses does not exceed."""
        return self._cut(self._log_at(NormalDist().inv_cdf(share)))

    def _cut(self, logarithm: float) -> float:
        return min(float(self.limit), max(SHORTEST, exp(min(logarithm, 40.0))))

    def _mean_of(self, middle: float, spread: float) -> float:
        return sum([self._cut(middle + spread * z) for z in _normals(GRID)]) / GRID


@cache
def _normals(count: int) -> tuple[float, ...]:
    normal = NormalDist()
    return tuple(normal.inv_cdf((index + 0.5) / count) for index in range(count))


def _line(middle: float, spread: float) -> Callable[[float], float]:
    return lambda z: middle + spread * z


def _through(points: list[tuple[float, float]]) -> Callable[[float], float]:
    """Straight lines through the points; the first and the last one continue."""

    def at(z: float) -> float:
        pairs = list(pairwise(points))
        (left, low), (right, high) = next((pair for pair in pairs if z <= pair[1][0]), pairs[-1])
        return low + (high - low) * (z - left) / (right - left)

    return at


def _solve(of: Callable[[float], float], low: float, high: float) -> float:
    """The zero of a monotonic function in the interval; the nearer end if it has no zero."""
    rising = of(high) > of(low)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if (of(middle) < 0) is rising else (low, middle)
    return (low + high) / 2
