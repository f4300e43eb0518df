"""The sections `data` and `training`: a run's tokens, length and rates."""

from typing import Annotated, Literal

from pydantic import Field

from megaplan.scalars import FactorAboveOne, NaturalInt, NonNegativeFloat, PositiveFloat, PositiveInt, Section


class Data(Section):
    """Contents of a batch's rows.

    Attributes:
        packing: documents predicts nothing across the ends of a row's documents; none reads a row as one text.
    """

    packing: Literal["none", "documents"] = "none"


Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)]
LONGEST_WARM_UP_STEPS = 100


class ConstantRate(Section):
    """A linear warm-up, then the base rate.

    Attributes:
        kind: constant.
        warmup_steps: Steps up to the base rate; 0 for none, null for a tenth of training.steps, at most 100.
    """

    kind: Literal["constant"] = "constant"
    warmup_steps: NaturalInt | None = None


class CosineRate(Section):
    """A linear warm-up, then half a cosine down to the end of training.

    Attributes:
        kind: cosine.
        warmup_steps: Steps up to the base rate; 0 for none, null for a tenth of training.steps, at most 100.
        final_fraction: Rate at the last step, as a fraction of the base rate.
    """

    kind: Literal["cosine"]
    warmup_steps: NaturalInt | None = None
    final_fraction: Fraction = 0.1


class StableRate(Section):
    """Warm-up, stable, decay (WSD): the base rate until the last decay_steps.

    Attributes:
        kind: wsd.
        warmup_steps: Steps up to the base rate; 0 for none, null for a tenth of training.steps, at most 100.
        decay_steps: Steps of the decay, the last ones of training.
        decay: Shape of the decay: linear, or by the square root of its progress.
        final_fraction: Rate at the last step, as a fraction of the base rate.
    """

    kind: Literal["wsd"]
    warmup_steps: NaturalInt | None = None
    decay_steps: PositiveInt
    decay: Literal["linear", "sqrt"] = "linear"
    final_fraction: Fraction = 0.0


RateSchedule = Annotated[ConstantRate | CosineRate | StableRate, Field(discriminator="kind")]


def warm_up_steps(schedule: RateSchedule, num_steps: int) -> int:
    """Steps of a schedule's warm-up; by default a tenth of training, at most 100."""
    return min(LONGEST_WARM_UP_STEPS, num_steps // 10) if schedule.warmup_steps is None else schedule.warmup_steps


class LossSpike(Section):
    """Condition under which a finite loss counts as bad.

    Attributes:
        factor: A loss above this multiple of the median of the latest steps is a spike.
        steps: Number of these steps; before that many steps no loss counts as a spike.
    """

    factor: FactorAboveOne = 2.0
    steps: PositiveInt = 20


class BadSteps(Section):
    """Steps with a loss or gradient norm that is not finite, or with a spike of the loss: their update is never applied.

    Attributes:
        skips: Consecutive bad steps whose batch is skipped; the next one returns to the last checkpoint.
        rewinds: Number of returns to a checkpoint per start of a run; the next bad step ends it.
        window_batches: Batches before the first bad one that are skipped too after a return.
        spike: Spikes of the loss count as bad steps; null for none.
    """

    skips: NaturalInt = 3
    rewinds: NaturalInt = 1
    window_batches: NaturalInt = 2
    spike: LossSpike | None = None


class Training(Section):
    """Length and rates of training; outside the plan's digest.

    Attributes:
        steps: Optimizer steps.
        seed: Seed of initialisation and data order.
        learning_rate: Learning rate of AdamW, and of Muon if muon_learning_rate is null.
        weight_decay: Decoupled weight decay.
        gradient_clip: Limit of the gradient norm; null for none.
        muon_learning_rate: Learning rate of Muon; null for learning_rate.
        rate_schedule: Course of both rates over the steps.
        bad_steps: Number of bad steps to skip, and when to return to a checkpoint.
    """

    steps: PositiveInt = 1000
    seed: NaturalInt = 0
    learning_rate: PositiveFloat = 3.0e-4
    weight_decay: NonNegativeFloat = 0.1
    gradient_clip: PositiveFloat | None = 1.0
    muon_learning_rate: PositiveFloat | None = None
    rate_schedule: RateSchedule = ConstantRate.plain()
    bad_steps: BadSteps = BadSteps.plain()
