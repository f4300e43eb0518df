"""Learning-rate schedules: a factor of the base rate, equal for AdamW and Muon; pure functions of the step."""

import math

from megaplan.spec.models import CosineRate, RateSchedule, StableRate
from megaplan.spec.training import warm_up_steps


def rate_factor(schedule: RateSchedule, step: int, num_steps: int) -> float:
    """The factor of the base rate at 0-based `step`.

    With n = step + 1 updates done after it, w warm-up steps, N = num_steps, d decay steps and f the final fraction: n / w while n ≤ w. Then
    `constant` is 1; `cosine` is f + (1 − f) · (1 + cos(π · (n − w) / (N − w))) / 2; `wsd` is 1 until N − d, and then falls to f with
    p = (n − N + d) / d as 1 − (1 − f) · p (linear) or 1 − (1 − f) · √p (sqrt). After N the factor is constant.

    Args:
        schedule: `training.rate_schedule`.
        step: 0-based.
        num_steps: `training.steps`.

    Source: arXiv:1608.03983 (cosine); arXiv:2404.06395 (WSD); arXiv:2405.18392 (√ decay).
    """
    done, warm_up = min(step + 1, num_steps), warm_up_steps(schedule, num_steps)
    if done < warm_up:
        return done / warm_up
    match schedule:
        case CosineRate():
            progress = (done - warm_up) / max(1, num_steps - warm_up)
            return schedule.final_fraction + (1 - schedule.final_fraction) * (1 + math.cos(math.pi * progress)) / 2
        case StableRate():
            progress = max(0, done - num_steps + schedule.decay_steps) / schedule.decay_steps
            return 1 - (1 - schedule.final_fraction) * (progress if schedule.decay == "linear" else math.sqrt(progress))
    return 1.0


def learning_rate(base: float, schedule: RateSchedule, step: int, num_steps: int) -> float:
    """Learning rate of 0-based `step`: `base` times the schedule's factor."""
    return base * rate_factor(schedule, step, num_steps)
