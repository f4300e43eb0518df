"""The three fitted constants of a post-training loop: time of the host in a decoding step, of training over the step, and of MoE layers.

python benchmarks/rl/fit.py     prints the constants, and those without each model in turn; `engines.json` has them

An iteration is linear in the constants: the rollout's other time + host · steps, and factor · time of training and log-probabilities + the
host's time of an MoE layer · passes of such layers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from megaplan.post_training.engines import engine_figures

if TYPE_CHECKING:
    from rl.run import Iteration

NAMES = ("host_step_seconds", "loop", "expert_layer_seconds")
PRIOR = np.log([0.003, 1.2, 0.001])
WIDTHS = np.array([2.0, 0.5, 2.0])
"""Spreads of the priors' logarithms."""
FORWARDS = ("log_probs", "reference")
NOISE = 0.1
SEED, NUM_DRAWN = 40, 16
ROUNDS = 100


class Parts(NamedTuple):
    """An iteration in parts that do not depend on the constants."""

    model: str
    published: float
    passes: float
    together: bool
    steps: float
    rollout: float
    trained: float
    others: float

    def seconds(self, constants: Sequence[float]) -> float:
        """Seconds of the iteration with these constants."""
        host, loop, layer = constants
        rollout, trained = self.rollout + host * self.steps, loop * self.trained + layer * self.passes
        return self.others + (max(trained, rollout) if self.together else trained + rollout)


class Fit(NamedTuple):
    """The fitted constants.

    Attributes:
        constants: Values in the order of `NAMES`.
        spread: Least and largest value of each without one of the models.
        left_out: Error of each iteration, by identity, with constants that are fitted without its model, in per cent.
        drawn: Errors of the iterations of the draw with constants that are fitted without them.
    """

    constants: tuple[float, ...]
    spread: tuple[tuple[float, float], ...]
    left_out: dict[int, float]
    drawn: tuple[float, ...]

    def seconds(self, each: Iteration) -> float:
        """Seconds of an iteration with the constants."""
        return parts_of(each).seconds(self.constants)

    @property
    def text(self) -> str:
        """The constants for the page."""
        named = zip(NAMES, self.constants, self.spread, strict=True)
        return "; ".join(f"`{name}` {value:.3g} ({low:.3g} to {high:.3g})" for name, value, (low, high) in named)


def parts_of(each: Iteration) -> Parts:
    """The parts of a predicted iteration."""
    seconds = {phase.name: phase.seconds.value for phase in each.found.times}
    known, job = engine_figures(each.found.engine.name), each.job()
    passes = job.expert_layers * (job.training_passes + sum(name in seconds for name in FORWARDS))
    trained = sum(seconds.get(name, 0.0) for name in ("training", *FORWARDS))
    trained = (trained - known["expert_layer_seconds"].value * passes) / known["loop"].value
    rollout = seconds["rollout"] - known["host_step_seconds"].value * each.found.engine.steps
    others = seconds["sync"] + seconds.get("offload", 0.0)
    return Parts(
        each.row["model"], each.row["seconds"], passes, bool(each.row["staleness"]), each.found.engine.steps, rollout, trained, others
    )


def solve(rows: Sequence[Parts]) -> tuple[float, ...]:
    """The constants with the least squares of logarithmic errors and distances from the priors (Levenberg-Marquardt)."""

    def residuals(logs: np.ndarray) -> np.ndarray:
        errors = [np.log(row.seconds(np.exp(logs)) / row.published) / NOISE for row in rows]
        return np.concatenate([errors, (logs - PRIOR) / WIDTHS])

    logs, damping = PRIOR.copy(), 1.0
    now = residuals(logs)
    for _ in range(ROUNDS):
        slopes = np.array([(residuals(logs + step) - now) / 1e-5 for step in np.eye(len(logs)) * 1e-5]).T
        move = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(logs)), -slopes.T @ now)
        then = residuals(logs + move)
        better = then @ then < now @ now
        logs, now, damping = (logs + move, then, damping / 3) if better else (logs, now, damping * 4)
    return tuple(float(value) for value in np.exp(logs))


def fitted(times: Sequence[Iteration]) -> Fit:
    """The fit, with and without each model."""
    rows = {id(each): parts_of(each) for each in times if each.fitted}
    by_model = {
        name: solve([row for row in rows.values() if row.model != name]) for name in dict.fromkeys(row.model for row in rows.values())
    }
    spread = tuple((min(values), max(values)) for values in zip(*by_model.values(), strict=True))
    left_out = {key: 100 * (row.seconds(by_model[row.model]) / row.published - 1) for key, row in rows.items()}
    return Fit(solve(list(rows.values())), spread, left_out, _drawn(times))


def _drawn(times: Sequence[Iteration]) -> tuple[float, ...]:
    """Errors of the iterations that a draw holds out, which the terms of decision 40 were chosen without."""
    order = sorted(times, key=lambda each: each.number)
    drawn = set(Random(SEED).sample(range(len(order)), NUM_DRAWN))
    constants = solve([parts_of(each) for each in order if each.fitted and each.number not in drawn])
    return tuple(100 * (parts_of(order[number]).seconds(constants) / order[number].row["seconds"] - 1) for number in sorted(drawn))


def main() -> int:
    """Print the constants."""
    from rl.run import iterations  # noqa: PLC0415  (the page imports this module)

    rows = iterations()
    fit = fitted(rows)
    print(fit.text)
    held = [fit.seconds(each) / each.row["seconds"] for each in rows if not each.fitted]
    ratios = np.quantile([1 / (1 + error / 100) for error in fit.left_out.values()] + [1 / ratio for ratio in held], [0.1, 0.9])
    print(f"published over predicted, 10 and 90 % quantiles: {ratios[0]:.3f}, {ratios[1]:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
