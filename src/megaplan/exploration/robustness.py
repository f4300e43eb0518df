"""How sure the first row is: the rows timed again with one efficiency changed at a time, and with uneven routing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megaplan.exploration.evaluate import Evaluator
from megaplan.exploration.values import Exact


class Case(NamedTuple):
    """One change.

    Attributes:
        name: What is changed: `network -10 %`.
        best: Which row is best, from 0.
        loss: By how much the first row's step is longer than that one's, as a share of it.
    """

    name: str
    best: int
    loss: float


class Robustness(NamedTuple):
    """Robustness of the first row among the rows, each with its policy and cuts as they are.

    Attributes:
        cases: One for each change.
    """

    cases: tuple[Case, ...]

    @property
    def num_kept(self) -> int:
        """In how many cases no other row is better than the first."""
        return sum(case.best == 0 for case in self.cases)

    @property
    def worst(self) -> Case | None:
        """The case in which the first row loses the most; None where it loses nothing."""
        return max((case for case in self.cases if case.best), key=lambda case: case.loss, default=None)


def robustness(rows: Sequence[Exact], evaluator: Evaluator) -> Robustness:
    """The rows, best first, under every change that their clocks know.

    A change is ±10 % of one efficiency, or uneven routing where the model and its times have any.
    """
    specs = [evaluator.space.spec_of(row.layout, row.policy) for row in rows]
    # a side is a clock of its own: what they change is the same, so they go side by side
    clocks = [evaluator.side(spec).clock for spec in specs]
    changed = {id(clock): dict(clock.variants(specs)) for clock in clocks}
    cases = []
    for name in changed[id(clocks[0])] if rows else ():
        steps = [changed[id(clock)][name](spec, row.spans) for clock, spec, row in zip(clocks, specs, rows, strict=True)]
        best = min(range(len(steps)), key=steps.__getitem__)
        cases.append(Case(name, best, steps[0] / steps[best] - 1))
    return Robustness(tuple(cases))
