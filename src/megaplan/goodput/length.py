"""The steps of a whole run: all at the step's time, plus the additional time of a growing batch, the run's slower rate and evaluations."""

from math import ceil, exp, hypot, log
from typing import NamedTuple

from megaplan.cost.forward import ONCE, forward_seconds
from megaplan.goodput.figures import RunFigure, figures, given
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import Spans
from megaplan.layout.step_time import PlannedTime, planned_time
from megaplan.schedules import schedule_problems
from megaplan.spec.models import Run, Spec


class Sustained(NamedTuple):
    """Mean rate of the run's steps relative to the single step.

    Attributes:
        figure: The figure, with its basis.
        low: Lowest rate of its 80 % interval.
        high: Highest rate.
    """

    figure: RunFigure
    low: float
    high: float


def sustained_rate(run: Run) -> Sustained:
    """The given rate, or the rate fitted to published steps; a step given by `run.step` is taken to be one."""
    if run.sustained is not None:
        return Sustained(given("sustained", run.sustained, "of the step's rate"), run.sustained, run.sustained)
    known = figures()
    return Sustained(known["sustained"], known["sustained_low"].value, known["sustained_high"].value)


class StepsOfRun(NamedTuple):
    """Steps of a run, and their total seconds by cause.

    Attributes:
        num_steps: Optimizer steps.
        plain: Seconds of all tokens in full batches, at the step's time.
        ramp: Seconds that smaller batches at the beginning take longer.
        slow: Seconds that the steps of a long run take longer than the step.
        evaluations: Seconds of evaluations, which training waits for.
    """

    num_steps: int
    plain: float
    ramp: float
    slow: float
    evaluations: float

    @property
    def training(self) -> float:
        """Seconds of all steps."""
        return self.plain + self.ramp + self.slow

    @property
    def mean(self) -> float:
        """Mean seconds of a step."""
        return self.training / self.num_steps

    @property
    def cadence(self) -> float:
        """Mean seconds from one step to the next, evaluations among them."""
        return (self.training + self.evaluations) / self.num_steps


def steps_of_run(spec: Spec, inventory: Inventory, spans: Spans, time: PlannedTime | str, seconds: float, rate: float) -> StepsOfRun:
    """The steps of the spec's run.

    Args:
        spec: A checked spec.
        inventory: Parameter tensors of the spec.
        spans: Cuts of the spec.
        time: The planned time of its step, or the reason that there is none.
        seconds: Seconds of the step.
        rate: Mean rate of the run's steps relative to the single step.
    """
    run, batch = spec.run or Run(), spec.global_batch_tokens
    tokens = spec.training.steps * batch if run.tokens is None else run.tokens
    more, longer = _ramp(spec, inventory, spans, time, seconds)
    plain = ceil(tokens / batch)
    count = plain + round(more)
    trained = plain * seconds + longer
    evaluations = 0.0
    if run.eval_every is not None:
        terms = {} if isinstance(time, str) else {name: value * seconds / time.seconds for name, value in time.terms.items()}
        each = forward_seconds(spec, inventory, seconds, terms) * (run.eval_tokens or batch) / batch
        evaluations = each * (count // run.eval_every)
    return StepsOfRun(count, plain * seconds, longer, trained * (1 / rate - 1), evaluations)


def _ramp(spec: Spec, inventory: Inventory, spans: Spans, time: PlannedTime | str, seconds: float) -> tuple[float, float]:
    """Additional steps and seconds of a batch that grows with the tokens.

    A step of b tokens takes f + (seconds - f) b / batch; ds = dx / b, where b grows linearly in x from the first batch to the full one. A
    run that ends before its batch has grown ends with a smaller one.
    """
    run, batch = spec.run or Run(), spec.global_batch_tokens
    if run.ramp_tokens is None:
        return 0.0, 0.0
    first = min(batch, run.ramp_from or batch // spec.schedule.num_microbatches)
    tokens = run.ramp_tokens if run.tokens is None else min(run.ramp_tokens, run.tokens)
    if first == batch:
        return 0.0, 0.0
    last = first + (batch - first) * tokens / run.ramp_tokens
    steps_a_token = log(last / first) / (last - first) if last > first * (1 + 1e-9) else 1 / first
    more = tokens * (steps_a_token - 1 / batch)
    return more, more * _fixed_share(spec, inventory, spans, time) * seconds


def _fixed_share(spec: Spec, inventory: Inventory, spans: Spans, time: PlannedTime | str) -> float:
    """Share of a step that does not shrink with its microbatches, from the time with half of them, or with twice their number.

    For a step of one microbatch, or one that cannot be timed with another number, it is the share of the terms that occur once.
    """
    if isinstance(time, str):
        return 0.0
    schedule, mesh, count = spec.schedule, spec.mesh, spec.schedule.num_microbatches
    granted = mesh.pp if mesh.num_slots > mesh.pp else 1
    fewer = count // 2 // granted * granted
    others = fewer if fewer and not schedule_problems(schedule.kind, mesh.pp, mesh.vpp, fewer, few=True) else 2 * count
    if fewer:
        changed = spec.model_copy(update={"schedule": schedule.model_copy(update={"num_microbatches": others})})
        other = planned_time(changed, spans, inventory)
        if not isinstance(other, str):
            slope = (time.seconds - other.seconds) / (count - others)
            return min(1.0, max(0.0, 1 - slope * count / time.seconds))
    return sum(time.terms.get(name, 0.0) for name in ONCE) / time.seconds


def combined(value: float, ends: tuple[tuple[float, float], ...], end: float) -> float:
    """The end of a product's interval, from the ends of its factors' intervals, whose errors are independent.

    Args:
        value: The product.
        ends: Each factor and its end on this side.
        end: -1 for the lower end, 1 for the upper one.
    """
    return value * exp(end * hypot(*(log(bound / factor) for factor, bound in ends)))
