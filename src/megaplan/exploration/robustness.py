"""Robustness of the first row: the rows timed again with one efficiency changed at a time, and with uneven routing."""

from collections.abc import Sequence
from time import monotonic
from typing import NamedTuple

from megaplan.exploration.evaluate import Evaluator
from megaplan.exploration.values import Exact


class Case(NamedTuple):
    """One change.

    Attributes:
        name: Name of the change: `network -10 %`.
        best: Index of the best row, from 0.
        loss: Excess of the first row's step over the best one's, relative to that.
    """

    name: str
    best: int
    loss: float


class Robustness(NamedTuple):
    """Robustness of the first row among the rows, each with its policy and cuts.

    Attributes:
        cases: One case per change whose steps were timed.
        num_untimed: Number of changes for which no time was left.
    """

    cases: tuple[Case, ...]
    num_untimed: int = 0

    @property
    def num_kept(self) -> int:
        """Number of cases in which no other row is better than the first."""
        return sum(case.best == 0 for case in self.cases)

    @property
    def worst(self) -> Case | None:
        """The case with the largest loss of the first row; None if it loses nothing."""
        return max((case for case in self.cases if case.best), key=lambda case: case.loss, default=None)


def robustness(rows: Sequence[Exact], evaluator: Evaluator, ends: float) -> Robustness:
    """The rows, best first, under the changes that their clocks know.

    A change is ±10 % of one efficiency, or uneven routing if the model and its times depend on it. No change is begun after `ends`, a
    value of `time.monotonic`.
    """
    specs = [evaluator.space.spec_of(row.layout, row.policy) for row in rows]
    # each side has its own clock, and their changes are the same, so they are paired
    clocks = [evaluator.side(spec).clock for spec in specs]
    changed = {id(clock): dict(clock.variants(specs)) for clock in clocks}
    cases, names = [], list(changed[id(clocks[0])]) if rows else []
    for name in names:
        if monotonic() >= ends:
            break
        steps = [changed[id(clock)][name](spec, row.spans) for clock, spec, row in zip(clocks, specs, rows, strict=True)]
        best = min(range(len(steps)), key=steps.__getitem__)
        cases.append(Case(name, best, steps[0] / steps[best] - 1))
    return Robustness(tuple(cases), len(names) - len(cases))
